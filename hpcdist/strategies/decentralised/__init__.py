"""Decentralised training: replicas that differ, and are mixed with neighbours or averaged periodically.

Floor 4. Begin with `replicas.Replicas`, the base class, `gossip.Graph` (D-PSGD) and `local_sgd` (local SGD, DiLoCo).
"""
