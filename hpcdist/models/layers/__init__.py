"""Layers of the models, each with an explicit forward and backward on the CPU and on a GPU.

`hpcdist.models.model.LOCAL` is the table of layers. Start with `linear.LocalLinear` and `norm.LocalNorm`.
"""
