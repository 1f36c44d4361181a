"""Metrics of a run: the HDF5 file ``metrics.h5`` with one row per step, its side tables, and the names of figures.

Imports hdf5, comm, arrays, reporting and errors. `sampling` reads long runs in bounded memory, `quantities` names every
figure. Begin with `step_metrics.MetricsWriter` and `step_metrics.read`.
"""
