"""Sinks of the events of a run: JSON lines, TensorBoard and Prometheus.

Floor 5, inside telemetry: imports `hpcdist.telemetry.config`, `hpcdist.telemetry.metrics`, reporting and errors. Only
rank 0 has a stream. A sink is imported when the recipe names it.
Begin with `stream.EventStream` and `stream.StreamSink`.
"""
