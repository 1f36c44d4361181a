"""Layers of the models, each with an explicit forward and backward on the CPU and on a GPU.

Floor 3, inside models: imports arrays, errors and `hpcdist.models.stage`. `arrays.jit` compiles the CPU kernels;
`cuda_kernels` launches the GPU kernels in ``models/cuda``. `hpcdist.models.model.LOCAL` is the table of layers. Start
with `linear.LocalLinear` and `norm.LocalNorm`.
"""
