"""Observers of a run: metrics rows, event stream, console, energy, noise scale, and silent-corruption checks.

Observers never change the training's numbers. May import `telemetry`, `energy`, `strategies` and the parts of a run.
Begin with `metrics.RunMetrics` (rows of all ranks in one file) and `event_publisher.EventPublisher` (the live stream).
"""
