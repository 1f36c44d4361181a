"""Benchmark of training steps: the same gpt here, wrapped, and in PyTorch, phase by phase.

Imports `bench.pipeline.run` for its timer of operations. Begin with `request.StepRequest` and `run.run`.
"""
