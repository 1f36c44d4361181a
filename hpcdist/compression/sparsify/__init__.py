"""Sparsifiers: compressors that send k of the n values of a tensor.

Floor 3: imports `compressor` and arrays. `coo` is the payload of indices and values, `topk` selects the largest,
`randomk` random ones (no index travels), `dgc` accumulates a velocity until it is sent. Begin with `topk.TopK` and
`coo.accumulate`.
"""
