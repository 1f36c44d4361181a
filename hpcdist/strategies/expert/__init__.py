"""Expert parallelism: replicas divide the experts of each block, and exchange the tokens for them.

Floor 4, inside strategies (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961). `axis` has the all-to-alls, `model`
wraps a rank's experts with them, `shared` replaces them by shared memory on one node, and `exchange` reduces dense
tensors and experts over their replicas. Begin with `model.share_out` and `exchange.ExpertExchange`.
"""
