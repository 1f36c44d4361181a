"""Decentralised training: replicas that differ, and are mixed with neighbours or averaged periodically.

Floor 4; imports core, schedule and allreduce. Each rank updates by its own gradient. `gossip` mixes parameters on a
graph of ranks (D-PSGD), `local_sgd` averages all replicas every few steps (local SGD, DiLoCo). Begin with
`replicas.Replicas`, the base class, and `gossip.Graph`.
"""
