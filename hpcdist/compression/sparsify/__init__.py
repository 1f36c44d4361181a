"""Sparsifiers: compressors that send k of the n values of a tensor.

Floor 3: imports `compressor` and arrays. `coo` is the payload of indices and values, `topk` selects the largest
values, `randomk` random values without sending indices, `dgc` accumulates unsent values. Begin with `topk.TopK`.
"""
