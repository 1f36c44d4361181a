"""Update kernels: loops over the elements of weights, gradients and moments, for CPU (numba) and GPU (CUDA).

Floor 3: imports collectives.half_precision, arrays and errors. `kernels` has one loop per part of an update, `fused`
whole updates in one pass, `exact` sums of squares without rounding. ``cuda/updates.cu`` has the GPU kernels. Start with
`kernels.adam_direction` and `fused.adam`.
"""
