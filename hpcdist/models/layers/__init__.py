"""Layers that a model computes with, each with an explicit forward and backward on the CPU and on a GPU.

Floor 3, inside models: imports arrays, errors and `hpcdist.models.stage`. CPU kernels are compiled by `arrays.jit`; GPU
kernels are launched by `cuda_kernels` from the sources in ``models/cuda``. `vector_math` has what compiled loops share.
`hpcdist.models.model` puts the layers into one table.
Begin with `linear.LocalLinear` and `norm.LocalNorm`.
"""
