"""Expert parallelism: replicas share out the experts of each block, and send each other the tokens for them.

Floor 4, inside strategies (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961). `axis` has the all-to-alls, `model`
puts them around the experts of a rank, `shared` takes their place inside of a node and evens out loads, `exchange`
reduces dense tensors and experts over their own replicas. Begin with `model.share_out` and `exchange.ExpertExchange`.
"""
