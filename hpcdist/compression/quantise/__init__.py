"""Quantisers: compressors that write each value as a code of 1 to 8 bits, with a scale per block.

Floor 3: imports `compressor` and arrays. Begin with `uniform.Blockwise` and `sign.SignSgd`.
"""
