"""Allreduce with the same bits on any number of ranks: sums in a fixed tree over logical shards.

How a step is cut into shards and what is summed how is said in `hpcdist.strategies.logical_shards`. With Psi bytes of
gradients each of p ranks sends 2 Psi (p-1)/p a step where L/p is a power of two, and keeps log2(L/p) partial sums of
Psi bytes beside its gradients; see `hpcdist.collectives.fixed_tree` for other numbers.
"""

from collections.abc import Iterator

from hpcdist.arrays.ranges import Range, cut
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.logical_shards import LogicalShards
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat


class FixedTreeExchange(AllreduceExchange):
    """Gradients of ``shards`` logical shards in a fixed tree. Collective over the data axis.

    Every rank has as many micro-batches as the one with the most shards; where it has a shard less, the last is empty.
    After each but the last, ADD takes its gradients into the partial sums of this rank, without a message; REDUCE takes
    those of the last one, and finishes the sums with the other ranks.
    """

    accumulates = False  # each shard's gradients are taken before the next one overwrites them

    def __init__(self, seat: Seat, shards: LogicalShards) -> None:
        super().__init__(seat, shards)
        self.carries_out = {**self.carries_out, Kind.ADD: self.add}
        self._logical = shards
        self._trees = {
            reduced: [(piece, shards.tree()) for piece in cut(reduced, self._longest)] for reduced in self._reduced()
        }

    @property
    def _longest(self) -> int:
        """How many elements travel at once."""
        return max(1, self.seat.bucket_bytes // self.seat.dtype.itemsize)

    def _reduced(self) -> Iterator[Range]:
        """Yield ranges of whole layers, last layers first, each of a bucket's size or more, but for the last."""
        for part in reversed(self.seat.parts):
            stop = part.stop
            for unit in sorted(filter(part.intersect, self.seat.ranges.values()), reverse=True):
                if stop - unit.start >= self._longest or unit.start == part.start:
                    yield Range(unit.start, stop)
                    stop = unit.start

    def plan(self) -> list[Operation]:
        """Return ADD and REDUCE of whole layers, AGREE, then the update of everything."""
        sums = [Operation(kind, range=reduced) for kind in (Kind.ADD, Kind.REDUCE) for reduced in self._trees]
        return [*sums, Operation(Kind.AGREE), *self.owner.plan()]

    def reduce(self, op: Operation) -> None:
        """Put the sum over all shards in the place of the last one's gradients. Collective over the data axis."""
        assert op.range is not None
        self._take_in(op, copy=False)
        for piece, tree in self._trees[op.range]:
            tree.reduce(self.gradients.range(piece))

    def add(self, op: Operation) -> None:
        """Take in the gradients of a shard, which the next one overwrites (local)."""
        self._take_in(op, copy=True)

    def _take_in(self, op: Operation, *, copy: bool) -> None:
        assert op.range is not None
        for piece, tree in self._trees[op.range]:
            self._logical.add(tree, op.microbatch, self.gradients.range(piece), copy=copy)
