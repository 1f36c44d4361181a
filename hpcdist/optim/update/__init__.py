"""Update kernels: loops over the elements of weights, gradients and moments, for CPU (numba) and GPU (CUDA).

Floor 3: imports collectives.reduction, arrays and errors. Start with `kernels.adam_direction` and `fused.adam`.
"""
