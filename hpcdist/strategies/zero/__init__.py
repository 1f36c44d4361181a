"""Sharded data parallelism (ZeRO): a sharding degree each for parameters, gradients and optimizer state.

Floor 4; imports core, schedule and pipeline of the strategies. Layers are cut over the replicas along nested levels;
their states may be offloaded to the host or to files, and the parameters of a node may lie in its memory once. Begin
with `exchange.ZeroExchange` and, for the nested cuts, `levels.Levels`. `config` is light.
"""
