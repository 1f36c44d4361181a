"""Benchmarks of `hpcdist bench`, `hpcdist compare`, `hpcdist schedule` and `hpcdist plan calibrate`.

Floor 5: imports errors, arrays, reporting, comm, hdf5, collectives, models, optim, strategies and adapters, but no
other package of floor 5. Most packages here have the modules `run` (the measurement), `results` (the request and the
HDF5 file) and `report`. `calibration.run` measures a machine for the planner. Begin with `sweep.definition.Sweep`
(trials from a TOML file) and `collectives.run.run`.
"""
