"""Reducers of compressors that take the place of the optimizer's momentum: DGC and 1-bit Adam.

Their payloads are not sums of gradients, and their state must not change in a step that is given up. So a step is:
gradients are complete and nothing is sent (KEEP, or REDUCE after the warm-up); all ranks agree that loss and gradients
are finite (AGREE); payloads travel and become the update directions (COMPRESS); the update follows.

The norm of the summed gradient is not known. The reported norm is sqrt(sum over the ranks of |g_r|^2), where g_r is
divided by the samples of the global batch. It is the norm of the sum if the gradients of different ranks are
orthogonal, like noise; equal gradients on P ranks have a sum with sqrt(P) times that norm. Clipping uses the same
estimate (Lin et al., arXiv:1712.01887, section 3.2): each of P replicas clips its own gradient at
``optimizer.clip_norm`` / sqrt(P), with one factor for all ranks of the replica.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.compression import dgc
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.parts import Reducer


class LocalGradients(Reducer):
    """Base class of reducers that include the optimizer's momentum. The optimizer of ``update`` has no momentum.

    ``buckets``: ranges of the flat gradient vector, each handled by one operation.
    """

    def __init__(self, context: RankContext, update: ShardedUpdate, buckets: Sequence[Range]) -> None:
        super().__init__(update)
        self.context, self.buckets = context, buckets
        self._replica = 0.0  # squared norm of this replica's gradients, over all of its ranks
        self.handlers = {Kind.KEEP: self.keep, Kind.COMPRESS: self.compress}

    def keep(self, op: Operation) -> None:
        """Do nothing: the gradients in the range ``op.range`` stay on this rank. Local."""

    def compress(self, op: Operation) -> None:
        """Exchange compressed gradients of the range ``op.range``; replace the gradients by update directions."""
        raise NotImplementedError

    def norm_squared(self) -> float:
        """Return the squared norm of this rank's gradients.

        Local, or collective over the world if gradients are clipped and a replica has several ranks.
        """
        squared, context = self.update.norm_squared(), self.context
        self._replica = squared
        if context.optimizer.clip_norm and context.pipeline.size * context.tensor.size > 1:
            replicas = np.zeros(context.data.size)
            replicas[context.data.rank] = squared
            collectives.allreduce(context.world, replicas, context.agree_algorithm)
            self._replica = float(replicas[context.data.rank])
        return squared

    def clip_factor(self, correction: float) -> float:
        """Return ``correction`` (normalizes a weighted loss) times this replica's gradient clipping factor. Local."""
        limit = self.context.optimizer.clip_norm
        replica = self._replica * correction**2
        return correction * (dgc.clip_factor(replica, limit, self.context.data.size) if limit else 1.0)
