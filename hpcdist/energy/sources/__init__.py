"""Sources of energy of a node: NVML, RAPL, Cray's pm_counters, a model by TDP, and the utilisation of the node.

Begin with `counters.EnergyCounter` and `discovery.open_node_sources`.
"""
