"""Benchmark of training steps: the same gpt here, wrapped, and in PyTorch, phase by phase.

Imports `bench.pipeline.run` for its model and `bench.collectives.report` for its check of picture files. Begin with
`results.StepRequest` and `run.run`.
"""
