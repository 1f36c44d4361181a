"""Sinks of the events of a run on rank 0: JSON lines, TensorBoard and Prometheus.

A sink is imported only if the recipe names it. Begin with `stream.EventStream` and `stream.StreamSink`.
"""
