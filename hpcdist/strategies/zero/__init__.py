"""Sharded data parallelism (ZeRO): a sharding degree each for parameters, gradients and optimizer state.

Floor 4; imports core, schedule and pipeline of the strategies. Layers are cut over the replicas along nested levels
(`levels`). The plain path of the paper is `plain`; `hybrid`, `logical_sums`, `overlap`, `node_parameters` and
`offload` are layers around it, which `exchange` puts together. `config` is light. Begin with `plain.PlainZero`, whose
`free` frees the layers of stage 3 after use, and `exchange.ZeroExchange`.
"""
