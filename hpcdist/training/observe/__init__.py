"""Observers of a run, which never change the training's numbers.

May import `telemetry`, `energy`, `strategies` and the parts of a run. Begin with `metrics.RunMetrics` and
`event_publisher.EventPublisher`.
"""
