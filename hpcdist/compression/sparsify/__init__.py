"""Sparsifiers: compressors that send k of the n values of a tensor.

Floor 3: imports `compressor` and arrays. Begin with `topk.TopK`.
"""
