"""Context parallelism: the tokens of a sample are divided over the ranks of one axis.

Floor 4. A causal sample has 2 c pieces on c ranks. Rank r has pieces r (head) and 2 c - 1 - r (tail; "zig-zag"), so
that all ranks have equally many query-key pairs. For gradients, the ranks are replicas.

With b bytes of keys of a sample, and as many of values, a rank sends in each layer of ring attention (Liu, Zaharia,
Abbeel, arXiv:2310.01889) 2 b (c - 1) / c bytes forward and, with gradients, 4 b (c - 1) / c backward.

Begin with `operations.pieces`, `operations.ring_operations`, `ring.RingAttention` and `model.cut_context`.
"""
