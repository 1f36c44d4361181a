"""Decentralised training: replicas that differ, mixed with their neighbours or averaged from time to time.

Floor 4; imports core, schedule and allreduce of the strategies. Each rank steps by its own gradient; `gossip` mixes
parameters on a graph of ranks (D-PSGD), `local_sgd` averages all of them every few steps (local SGD, DiLoCo). Begin
with `replicas.Replicas`, the base class, and `gossip.Graph`. `config` is light.
"""
