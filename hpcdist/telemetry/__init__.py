"""Telemetry of a run: metrics, event sinks, provenance, reports, traces and diagnosis of hangs.

Floor 5. Importing a module loads neither matplotlib nor Prometheus or TensorBoard clients. Begin with
`metrics.step_metrics.MetricsWriter` and `report.report`. Sinks get the events of an `event_stream.EventStream`.
"""
