"""Data parallelism by allreduce: every rank holds everything, gradients are summed, all take the same step.

Gradients arrive here already divided by the number of samples of the whole batch, so their *sum* over the ranks is the
mean over samples, exact however unevenly the samples are spread.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.optim import clip
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.schedule.operations import Kind, Operation


def buckets(layout: Layout, itemsize: int, bucket_bytes: int) -> list[Range]:
    """Cut the flat space into buckets of whole layers, last layers first: the order in which backward completes them.

    A bucket closes when it has reached ``bucket_bytes``; a layer larger than that is cut.
    """
    longest = max(1, bucket_bytes // itemsize)
    found: list[Range] = []
    stop = layout.size
    for unit in sorted(layout.units.values(), reverse=True):
        if stop - unit.start >= longest or unit.start == 0:
            found += reversed(list(cut(Range(unit.start, stop), longest)))
            stop = unit.start
    return found


class AllreduceExchange:
    """Buckets of gradients reduced by one of the algorithms of `hpcdist.collectives`. Collective over the data axis.

    ``clip_norm`` bounds the norm of the mean gradient; 0 leaves it alone.
    """

    replicas_identical = True

    def __init__(
        self,
        comm: Communicator,
        parameters: FlatStore,
        gradients: FlatStore,
        optimizer: Optimizer,
        *,
        algorithm: str = "native",
        bucket_bytes: int = 4 << 20,
        clip_norm: float = 0.0,
    ) -> None:
        self.comm, self.parameters, self.gradients, self.optimizer = comm, parameters, gradients, optimizer
        self.algorithm, self.clip_norm = algorithm, clip_norm
        self._buckets = buckets(parameters.layout, gradients.array.itemsize, bucket_bytes)
        self._norm_squared = float("nan")
        self._norms = np.zeros((0, 2))
        # A few numbers do not deserve a ring: log2(p) messages, whose bytes are counted unless nothing is.
        self.agree_algorithm = "native" if algorithm == "native" else "recursive_doubling"

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket, AGREE, then DIRECTION and APPLY of everything."""
        whole = Range(0, self.parameters.layout.size)
        return [
            *(Operation(Kind.REDUCE, range=bucket) for bucket in self._buckets),
            Operation(Kind.AGREE),
            Operation(Kind.DIRECTION, range=whole),
            Operation(Kind.APPLY, range=whole),
        ]

    def reduce(self, part: Range) -> None:
        """Sum the gradients of ``part`` in place."""
        collectives.allreduce(self.comm, self.gradients.range(part), self.algorithm)

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the ranks; the norm needs no message, since all hold the same gradient."""
        collectives.allreduce(self.comm, values, self.agree_algorithm)
        return values

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean gradient before clipping."""
        self._norm_squared = clip.sum_of_squares(self.gradients, self.gradients.part)
        return float(np.sqrt(self._norm_squared))

    def direction(self, part: Range) -> None:
        """Turn gradients into directions, clipped; the optimizer's clock advances with the first part of a step."""
        scale = clip.clip_scale(self._norm_squared, self.clip_norm) if self.clip_norm else 1.0
        if part.start == 0:
            self.optimizer.begin_step()
        self.optimizer.direction(part, self.parameters, self.gradients, scale)

    def apply(self, part: Range) -> None:
        """Step the parameters; layer-wise rates come from norms that every rank has in full."""
        self.optimizer.apply(part, self.parameters, self.gradients, None, self.optimizer.partial_norms())

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of parameters and optimizer state: replicas are written once."""
        mine = split(self.parameters.layout.size, self.comm.size, self.parameters.array.itemsize)[self.comm.rank]
        return self.pieces_of(mine)

    def pieces_of(self, part: Range) -> list[Piece]:
        """Return the pieces of ``part``; a replica restores them for the whole space (local)."""
        stores = {"parameters": self.parameters} | {f"optimizer.{n}": s for n, s in self.optimizer.slots.items()}
        return [
            Piece.of(kind, segment, touched, store.range(touched))
            for kind, store in stores.items()
            for segment, touched in store.layout.within(part)
        ]
