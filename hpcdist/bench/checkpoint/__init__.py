"""Benchmark of checkpoints: throughput against raw files and PyTorch, and the cost of a background save.

Uses no other benchmark. `hpcdist.checkpoint` itself is passed in by the command, as a contender. Begin with
`throughput.run` and `background.run`.
"""
