"""Compressed exchanges: strategies that send payloads of `hpcdist.compression` instead of gradients.

Floor 4; imports compression, collectives, core, allreduce and zero. `reduction` encodes and sums payloads,
`error_feedback` keeps the compression errors, `dgc` and `onebit` replace the optimizer's momentum, and `autoselect`
measures whether compression pays. Begin with `exchange.CompressedExchange` and `reduction.CompressedReduction`.
"""
