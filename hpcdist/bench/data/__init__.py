"""Benchmark of data-parallel exchanges: each strategy on the same model and batch, with and without stragglers.

Builds on `bench.sweep`: trials and results are those of a sweep. Begin with `request.CONTENDERS` and `report.rows`.
"""
