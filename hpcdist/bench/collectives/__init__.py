"""Benchmark of collectives: our algorithms, the MPI library's own, and two yardsticks, in turns.

Uses no other benchmark; `bench.calibrate` builds on it. Begin with `results.CollectivesCell` (one operation,
size and type) and `run.run`.
"""
