"""Telemetry of a run: metrics, event sinks, provenance, reports, traces and diagnosis of hangs.

Floor 5: imports comm, hdf5, arrays, reporting and errors. `metrics` writes the file of figures, `sinks` the live
events, `trace` merges the records of all ranks, `page` makes the HTML report. Importing a module loads neither
matplotlib nor Prometheus or TensorBoard clients. Begin with `metrics.step_metrics.MetricsWriter` and `report.report`.
"""
