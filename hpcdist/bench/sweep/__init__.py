"""Sweeps: whole trainings over many configurations, their results file, merging and report.

Uses no other benchmark; `bench.data` builds on it. Begin with `definition.Sweep` and `series.run`.
"""
