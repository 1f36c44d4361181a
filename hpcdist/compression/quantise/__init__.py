"""Quantisers: compressors that write each value as a code of 1 to 8 bits, with a scale for each block.

Floor 3: imports `compressor` and arrays. `codes` has what they share (scales, random rounding, packing), `uniform`
the equally spaced levels (blockwise integers, QSGD), `adaptive` levels fitted to the values, `sign` one bit for a
value, `onebit_adam` the optimizer whose momentum travels as signs. Begin with `uniform.Blockwise` and `sign.SignSgd`.
"""
