"""Benchmark of pipeline schedules: measured, simulated and closed-form bubbles, and timelines.

Imports no other benchmark. Begin with `request.PipelineRequest`, `run.run` (measures) and `schedules.simulate_schedule`
(on paper, `hpcdist schedule`).
"""
