"""Compressed exchanges: strategies that send payloads of `hpcdist.compression` instead of gradients.

Floor 4. Begin with `exchange.CompressedExchange` and `reduction.CompressedReduction`.
"""
