"""Observers of a run: metrics rows, event stream, console, energy, noise scale, and silent fault checks.

None of them changes a number of the run. It may import `telemetry`, `energy` and `strategies`, and the parts that a
run is built of; the loop calls it. Begin with `metrics.RunMetrics` (rows of all ranks in one file) and
`event_publisher.EventPublisher` (the live stream).
"""
