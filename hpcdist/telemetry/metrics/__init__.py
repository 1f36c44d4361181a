"""Metrics of a run: the HDF5 file ``metrics.h5`` with one row per step, its side tables, and all names of figures.

Floor 5, inside telemetry: imports hdf5, comm, arrays, reporting and errors. `step_metrics` writes and reads steps,
`side_tables` and `observations` what happens beside them, `sampling` reads long runs in bounded memory, `quantities`
names every figure.
Begin with `step_metrics.MetricsWriter` and `step_metrics.read`.
"""
