"""Compressed reductions: collectives that send payloads of `hpcdist.compression` instead of gradients.

Floor 4. Begin with `reduction.CompressedReduction`; `hpcdist.strategies.data` uses it in exchanges.
"""
