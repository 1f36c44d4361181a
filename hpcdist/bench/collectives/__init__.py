"""Benchmark of collectives: the algorithms of hpcdist, the MPI library's collectives, and two reference transfers.

Uses no other benchmark; `bench.link_speed` builds on it. Begin with `results.CollectivesCell` and `run.run`.
"""
