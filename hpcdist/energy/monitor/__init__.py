"""Monitor the energy of a running job: sampler thread, windows of phases, tables of a file, live figures.

Begin with `monitor.EnergyMonitor` and `sampler.EnergySampler`.
"""
