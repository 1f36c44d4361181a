"""Metrics of a run: the HDF5 file ``metrics.h5`` with one row per step, its side tables, and the names of figures.

Begin with `step_metrics.MetricsWriter` and `step_metrics.read`.
"""
