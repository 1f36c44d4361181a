"""Attention in tiles of queries and keys, without an array of size context x context.

Start with `flash.LocalAttention` and `tiles.Heads`.
"""
