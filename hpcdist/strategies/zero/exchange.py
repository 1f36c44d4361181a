"""The ZeRO exchange with all that is optional: the plain path, and layers around it.

The plain path (`plain`) is ZeRO of Rajbhandari et al. (arXiv:1910.02054). Around it: degrees between the
stages (`hybrid`), sums over logical shards (`logical_sums`), overlap of messages with computation (`overlap`), one copy
of the parameters for the ranks of a node (`node_parameters`), and shards on the host or in a file (`offload`).

Every layer is cut over the replicas, and each rank updates its own cut: no two replicas need keep the same part of a
model and of its state. Parameters, gradients and optimizer state each have a sharding degree, d_p | d_g | d_o | p, on
p replicas (see `levels`). The three stages are special cases, and so are others' ideas:

    zero1   (1, 1, p)    zero2   (1, p, p)    zero3   (p, p, p)
    MiCS (Zhang et al., arXiv:2205.00119)                     (d, d, d)   d ranks hold a model; all else are replicas
    hpZ of ZeRO++ (Wang et al., arXiv:2306.10209)             (d, p, p)   gathers stay among the d ranks of a node
    hybrid sharding of FSDP (Zhao et al., arXiv:2304.11277)   (d, d, d)
    AMSP (Chen et al., arXiv:2311.00257)                      any

With Psi bytes of parameters and m micro-batches a step, each rank sends on the ring, in bytes,

    gradients    m Psi (1 - 1/d_g)       after each micro-batch, where d_g > 1: then they are freed
                 Psi (1/d_g - 1/d_o)     once a step, to the cuts of the optimizer
                 2 Psi/d_o (1 - d_o/p)   once a step, over the p/d_o owners of the same cut
    parameters   Psi (1/d_p - 1/d_o)     once a step, the new cuts to all that keep them
                 2 m Psi (1 - 1/d_p)     for each use, once forward and once backward; uses of the same layer that
                                         follow each other are one, as those of the last layer of a model;
                                         up to 3 m where a pipeline computes forwards again

so 2 Psi (p-1)/p in zero1, (1 + m) of these in zero2 and 3 m in zero3; Psi is that of the layers of this rank. Where m
is large, as in a pipeline, memory buys bytes: ``keep_gradients`` adds up those of a step whole and reduces once (Psi
more memory), ``keep_parameters`` gathers once and keeps to the last use (Psi more): zero3 then sends what zero1 does.
Else what is kept of a model takes Psi/d_p + Psi/d_g + K Psi/d_o, with K = 2 for Adam, and where d_p or d_g is above 1
memory for whole layers on top: the largest one, or two.

A layer that others are tied to stays gathered from its first use in a micro-batch to its last: stage 3 then sends
less. A layer of fewer than ``persistent_below`` elements, S bytes, stays gathered for good: it sends S (1 - 1/d_o)
after its update, nothing for each use, and no message of a few bytes holds up a layer. All of its state is cut as
before. So does a layer with a tensor that another stage of a pipeline has a copy of.
"""

from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.zero.config import ZeroConfig
from hpcdist.strategies.zero.hybrid import HybridZero
from hpcdist.strategies.zero.logical_sums import ShardedSums
from hpcdist.strategies.zero.node_parameters import NodeSharedZero
from hpcdist.strategies.zero.overlap import OverlappedZero

_DEFAULT = ZeroConfig()


# Python calls a method of these classes from left to right. Each layer leaves to the next what its part of ``config``
# does not ask for, so the last word is that of the plain path. The order matters: what the ranks of a node share
# replaces the messages of all others, and the guard of the overlap meets each operation before it is carried out.
class ZeroExchange(NodeSharedZero, OverlappedZero, ShardedSums, HybridZero):
    """ZeRO of ``stage`` 1, 2 or 3, with the layers that ``config`` asks for. Collective over the data axis.

    The one place that puts the layers around the plain path. ``parameters`` holds the whole of layers that stay
    gathered, and the shard of the others.
    """

    def __init__(
        self, context: RankContext, stage: int, config: ZeroConfig = _DEFAULT, shards: LogicalShards | None = None
    ) -> None:
        degrees = config.degrees(stage, context.data.size)
        super().__init__(context, degrees, config, shards=shards)
