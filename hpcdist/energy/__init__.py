"""Energy of a run: counters of GPUs and processors, read by one rank of each node, attributed to phases.

Floor 5: imports comm, hdf5, reporting and errors, no other package of this floor. `sources` are the sensors,
`monitor` reads them while a job runs, `accounts` computes from what was read, `power_limits` changes limits for a
while, and `report` makes the joules of a job of those of its nodes.
Begin with `monitor.monitor.EnergyMonitor` and `report.merge`.
"""
