"""Attention in tiles of queries and keys, without an array of size context x context.

Floor 3, inside models: imports arrays, `hpcdist.models.layers` and `hpcdist.models.stage`. `tiles` has the layout of
heads and tiles, `kernels` the loops between matrix products. `flash` combines them, and launches the fused kernels of
``models/cuda/attention.cu`` for 16-bit floats on a GPU. Start with `flash.LocalAttention` and `tiles.Heads`.
"""
