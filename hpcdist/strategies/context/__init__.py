"""Context parallelism: the tokens of a sample are divided over the ranks of one axis.

Floor 4; imports models and collectives. A causal sample of T tokens has 2 c pieces on c ranks. Rank r has pieces r
(head) and 2 c - 1 - r (tail; "zig-zag"), so that all ranks have equally many query-key pairs. For gradients, the ranks
are replicas: sums go over data x context.

Ring attention (Liu, Zaharia, Abbeel, arXiv:2310.01889) sends keys and values round the ring. With b bytes of keys of a
sample, and as many of values, a rank sends in each layer

    forward                (c - 1) blocks of 2 b / c       2 b (c - 1) / c
    backward               keys, values and gradients      4 b (c - 1) / c

Begin with `passes.pieces`, `operations.ring_operations`, `ring.RingAttention` and `model.cut_context`.
"""
