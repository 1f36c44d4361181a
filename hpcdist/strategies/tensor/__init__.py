"""Tensor parallelism: the ranks of one axis compute every layer together, each with a shard of the matrices.

Floor 4. As in Megatron-LM (M. Shoeybi et al., arXiv:1909.08053), the first of two linear layers is sharded by outputs,
the second by inputs. With b bytes of activations (tokens x hidden), p ranks and L blocks, a rank sends on a ring, per
micro-batch:

    blocks                 4 L     allreduces of b           8 L b (p-1)/p
    embedding, head        2       allreduces of b           4 b (p-1)/p
    cross entropy          3       numbers per token, summed or compared

With ``sequence_parallel`` (V. A. Korthikanti et al., arXiv:2205.05198) norms, residuals and dropout are sharded by
tokens: an allreduce becomes a reduce-scatter and an all-gather. The backward pass adds 2 L + 1 all-gathers of b, and
the memory is 1/p. Begin with `model.cut_model` and `axis.Borders`.
"""
