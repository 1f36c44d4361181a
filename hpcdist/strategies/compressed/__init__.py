"""Compressed exchanges: strategies that send the payloads of `hpcdist.compression` in the place of gradients.

Floor 4; imports compression, collectives and, of the strategies, core, allreduce and zero. `reduction` makes
payloads and sums them over the ranks, `error_feedback` keeps what they lose; `dgc` and `onebit` replace the momentum
of the optimizer; `autoselect` measures whether compression pays. `config` is light. Begin with
`exchange.CompressedExchange` and `reduction.CompressedReduction`.
"""
