"""Expert parallelism: replicas divide the experts of each block, and exchange the tokens for them.

Floor 4 (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961). Begin with `model.share_out` and
`exchange.ExpertExchange`.
"""
