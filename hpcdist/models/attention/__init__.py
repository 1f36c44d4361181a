"""Attention in tiles of queries and keys, without a square of the context in memory.

Floor 3, inside models: imports arrays, `hpcdist.models.layers` and `hpcdist.models.stage`. `tiles` says where heads lie
and which are computed at a time, `kernels` has the loops between matrix products, `flash` puts them together and, in
16-bit floats on a GPU, launches the fused kernels of ``models/cuda/attention.cu``.
Begin with `flash.LocalAttention` and `tiles.Heads`.
"""
