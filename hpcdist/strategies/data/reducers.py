"""Reducers that sum gradients over replicas that all hold the whole model.

With Psi bytes of gradients on p ranks, each rank sends 2 Psi (p-1)/p per step on the ring. `TreeSum` sends the same if
its number of shards per rank is a power of two, and keeps log2(shards per rank) partial sums of Psi bytes in addition;
see `hpcdist.collectives.algorithms.fixed_tree`.
"""

from collections.abc import Sequence

from hpcdist import collectives
from hpcdist.arrays.ranges import Range, cut
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.buckets import buckets_of_rank, groups_of_layers
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.parts import Reducer


class Sum(Reducer):
    """Allreduce of gradients in buckets. With ``background``, it overlaps with the backward pass."""

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        background: BackgroundCollectives | None = None,
        buckets: Sequence[Range] = (),
    ) -> None:
        super().__init__(update, counts=context.data.rank == 0)
        self._data, self._algorithm, self._background = context.data, context.algorithm, background
        self.buckets = buckets or buckets_of_rank(context, update.gradients.array.itemsize)
        self.handlers = {Kind.REDUCE: self.reduce, Kind.START: self.start, Kind.WAIT: self.wait}

    def plan(self) -> list[Operation]:
        kinds = (Kind.REDUCE,) if self._background is None else (Kind.START, Kind.WAIT)
        return [Operation(kind, range=bucket) for kind in kinds for bucket in self.buckets]

    def reduce(self, op: Operation) -> None:
        """Allreduce the gradients in the range ``op.range`` in place."""
        collectives.allreduce(self._data, self.update.gradients.range(op.part), self._algorithm)

    def start(self, op: Operation) -> None:
        """Start to allreduce the gradients in the range ``op.range`` in place."""
        assert self._background is not None
        self._background.start(op.part, self.update.gradients.range(op.part), self._algorithm)

    def wait(self, op: Operation) -> None:
        """Wait for the allreduce that `start` started for the range ``op.range``."""
        assert self._background is not None
        self._background.wait(op.part)


class TreeSum(Reducer):
    """Allreduce that adds the micro-batches' gradients in a fixed tree, with the same bits on any number of ranks."""

    # Micro-batches are logical shards. Ranks with fewer shards get an empty last micro-batch. After each micro-batch
    # but the last, the operation ADD adds its gradients to this rank's partial sums. After the last, REDUCE completes
    # the sums with the other ranks.

    def __init__(self, context: RankContext, update: ShardedUpdate, shards: LogicalShards) -> None:
        super().__init__(update, counts=context.data.rank == 0)
        self._shards = shards
        longest = max(1, context.bucket_bytes // context.dtype.itemsize)  # elements of a message
        self._trees = {
            group: [(piece, shards.tree()) for piece in cut(group, longest)]
            for part in reversed(context.parts)
            for group in groups_of_layers(context.ranges.values(), longest, part)
        }
        self.handlers = {Kind.ADD: self.add, Kind.REDUCE: self.reduce}

    def plan(self) -> list[Operation]:
        return [Operation(kind, range=group) for kind in (Kind.ADD, Kind.REDUCE) for group in self._trees]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients in the range ``op.range`` over all parts of the batch, in place and in a fixed order."""
        self._add(op, copy=False)
        for piece, tree in self._trees[op.part]:
            tree.reduce(self.update.gradients.range(piece))

    def add(self, op: Operation) -> None:
        """Add a micro-batch's gradients in the range ``op.range`` to this rank's partial sums. Local."""
        self._add(op, copy=True)

    def _add(self, op: Operation, *, copy: bool) -> None:
        for piece, tree in self._trees[op.part]:
            self._shards.add(tree, op.microbatch, self.update.gradients.range(piece), copy=copy)
