"""Benchmarks behind `hpcdist bench`, `hpcdist compare`, `hpcdist schedule` and `hpcdist plan calibrate`.

Floor 5: imports errors, arrays, reporting, comm, hdf5, collectives, models, optim, strategies and adapters; never
another service. One package a benchmark, most of them with `run` (measures), `results` (the request, and the HDF5 file
of what was measured) and `report`. A sweep runs whole trainings, each in processes of its own. Begin with
`sweep.definition.Sweep` (trials from a TOML file) and `collectives.run.run`.
"""
