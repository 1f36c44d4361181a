"""Telemetry of a run, in its directory: metrics, event sinks, provenance, reports, traces and diagnosis of hangs.

Floor 5: imports comm, hdf5, arrays, reporting and errors, no other package of this floor. `metrics` is the file of the
run's figures, `sinks` where events go while it runs, `trace` what all ranks did in some steps, `page` the HTML report.
Importing a module loads neither matplotlib nor a client of Prometheus or TensorBoard.
Begin with `metrics.step_metrics.MetricsWriter` and `report.report`.
"""
