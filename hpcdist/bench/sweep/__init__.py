"""Sweeps: trainings of many configurations, their results file, the merge of results files, and the report.

The entry points are `definition.Sweep` and `series.run`. This package uses no other benchmark.
"""
