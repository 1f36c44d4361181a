"""Benchmark of training steps: the same GPT built in, wrapped, and in PyTorch, measured phase by phase.

Begin with `request.StepRequest` and `run.run`.
"""
