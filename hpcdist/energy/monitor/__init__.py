"""Monitor the energy of a running job: sampler thread, windows of phases, tables of a file, live figures.

Floor 5, middle part of `hpcdist.energy`: imports `sources`, `report`, comm and hdf5. `monitor.EnergyWatch` monitors one
machine without a job. Begin with `monitor.EnergyMonitor` and `sampler.EnergySampler`.
"""
