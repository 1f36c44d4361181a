"""Sources of energy of a node: NVML, RAPL, Cray's pm_counters, a model by TDP, and the utilisation of the node.

Floor 5, lowest part of `hpcdist.energy`: imports its config, comm and errors (`discovery` also the table of part-time
sensors). Only `nvml` imports pynvml, at the first use. Begin with `counters.EnergyCounter` and
`discovery.open_node_sources`.
"""
