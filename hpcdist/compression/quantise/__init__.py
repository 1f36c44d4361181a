"""Quantisers: compressors that write each value as a code of 1 to 8 bits, with a scale per block.

Floor 3: imports `compressor` and arrays. `codes` has shared code (scales, stochastic rounding, packing), `uniform`
equally spaced levels (blockwise integers, QSGD), `adaptive` levels fitted to the values, `sign` one bit per value,
`onebit_adam` the optimizer whose momentum is sent as signs. Begin with `uniform.Blockwise` and `sign.SignSgd`.
"""
