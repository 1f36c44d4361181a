"""Benchmark of pipeline schedules: measured, simulated and closed-form bubbles, and timelines.

Imports `bench.collectives.report` for its check of picture files. Begin with `run.run` (measures) and
`schedules.simulate_schedule` (on paper, `hpcdist schedule`).
"""
