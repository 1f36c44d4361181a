"""Tensor parallelism: every matrix of a block is cut over the ranks of one axis.

Floor 4; imports models and collectives. The ranks of the axis compute each layer together. M. Shoeybi et al.,
"Megatron-LM", arXiv:1909.08053: the first of two linears is cut by outputs, the second by inputs, so that a block has
two sums over the ranks in its forward and two in its backward. With b bytes of activations (tokens x hidden), p ranks
and L blocks, each rank sends on the ring, a micro-batch:

    blocks                 4 L     allreduces of b           8 L b (p-1)/p
    embedding, head        2       allreduces of b           4 b (p-1)/p
    cross entropy          3       numbers a token, summed or compared

With ``sequence_parallel`` (V. A. Korthikanti et al., arXiv:2205.05198) what lies between those parts, norms,
residuals and dropout, is cut by tokens: an allreduce becomes a reduce-scatter and an all-gather, of the same bytes
together. The input of a linear that is cut by outputs is gathered once more in the backward, since only its own rows
are kept: that is 2 L + 1 all-gathers of b more, for 1/p of the memory. Begin with `model.cut_model` and
`axis.Borders`.
"""
