"""Context parallelism: the tokens of a sample are cut over the ranks of one axis.

Floor 4; imports models and collectives. Every rank computes its own tokens with whole layers; only attention needs the
others. A causal sample of T tokens is cut into 2 c pieces, of which rank r has number r and number 2 c - 1 - r (head
and tail, "zig-zag"), so that all ranks have as many pairs of a query and a key; with a window, about as many
(`passes.pairs`). Ranks of the axis are replicas for the sums of gradients: those go over data x context.

Ring attention (Liu, Zaharia, Abbeel, arXiv:2310.01889): keys and values travel round the ring, each pass beside the
tiles of the one before, and the softmax goes on over the blocks that come. With b bytes of keys of a sample (T tokens,
as many of values), a rank sends in each layer

    forward                (c - 1) blocks of 2 b / c       2 b (c - 1) / c
    backward               keys, values and gradients      4 b (c - 1) / c

What a rank sends and awaits within one attention is a list (`operations`), which is proven before anything runs.
Begin with `passes.pieces`, `operations.ring_operations`, `ring.RingAttention` and `model.cut_context`.
"""
