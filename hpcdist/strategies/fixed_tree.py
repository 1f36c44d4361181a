"""Data parallelism with the same bits on any number of ranks: sums in a fixed tree over logical shards.

A step is cut into L logical shards of equal size, whatever the number of ranks; each is a micro-batch of its own, so
that every matrix product has the same shape everywhere. Gradients and losses of the shards are summed in the order of
`hpcdist.collectives.fixed_tree`. All else that decides a step follows from those sums, on every rank alike: the norm of
the gradient, the update. With Psi bytes of gradients each of p ranks sends 2 Psi (p-1)/p a step where L/p is a power of
two, and keeps log2(L/p) partial sums of Psi bytes beside its gradients; see there for other numbers.

The price is that of gradient accumulation: smaller matrix products, and one more pass over the gradients of each shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range, cut
from hpcdist.collectives.fixed_tree import FixedTree, shards_of, tree_sum
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.arithmetic import arithmetic
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat

ALGORITHM: Final = "fixed_tree"
CURE: Final = "Give every rank the same OMP_NUM_THREADS, the same kind of processor and the same numpy"


class FixedTreeExchange(AllreduceExchange):
    """Gradients of ``shards`` logical shards in a fixed tree. Collective over the data axis.

    Every rank has as many micro-batches as the one with the most shards; where it has a shard less, the last is empty.
    After each but the last, ADD takes its gradients into the partial sums of this rank, without a message; REDUCE takes
    those of the last one, and finishes the sums with the other ranks.

    ``arithmetic`` names the bits that the ranks compute; construction and `restore` raise ConfigurationError, on all of
    them, where it is not the same on all ranks or not that of the run so far.
    """

    accumulates = False  # each shard's gradients are taken before the next one overwrites them

    def __init__(self, seat: Seat, shards: int) -> None:
        super().__init__(seat)
        self.algorithm = ALGORITHM
        self.shards = shards
        self.arithmetic = _common(seat)
        self.own = shards_of(shards, seat.data.size)[seat.data.rank]
        self.carries_out = {**self.carries_out, Kind.ADD: self.add}
        self._trees = {
            reduced: [(piece, FixedTree(seat.data, shards)) for piece in cut(reduced, self._longest)]
            for reduced in self._reduced()
        }

    @property
    def _longest(self) -> int:
        """How many elements travel at once."""
        return max(1, self.seat.bucket_bytes // self.seat.dtype.itemsize)

    def _reduced(self) -> Iterator[Range]:
        """Yield ranges of whole layers, last layers first, each of a bucket's size or more, but for the last."""
        stop = self.seat.part.stop
        for unit in sorted(self.seat.ranges.values(), reverse=True):
            if stop - unit.start >= self._longest or unit.start == self.seat.part.start:
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
        if op.microbatch < self.own.size:
            for piece, tree in self._trees[op.range]:
                tree.add(self.own.start + op.microbatch, self.gradients.range(piece), copy=copy)

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum ``losses``, one of each own shard, in the order of the tree, and ``values`` as `agree`. Collective."""
        of_shards = np.zeros(self.shards)
        of_shards[self.own.slice] = losses  # all others add zeros to them, which is exact in any order
        sums = self.agree(np.concatenate([of_shards, values]))
        return tree_sum(sums[: self.shards].tolist()), sums[self.shards :]

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock and the name of the arithmetic."""
        return super().state() | {"arithmetic": self.arithmetic}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the optimizer's clock."""
        before = state.get("arithmetic", self.arithmetic)
        if before != self.arithmetic:
            raise ConfigurationError(
                f"run.logical_shards = {self.shards}: this run was computed with the arithmetic {before}, and here it "
                f"is {self.arithmetic}, so it cannot go on with the same bits. {CURE}; or set run.logical_shards = 0 "
                "to go on without that promise"
            )
        super().restore(state)


def _common(seat: Seat) -> str:
    """Return the arithmetic of all ranks. Collective over the data axis."""
    names = seat.data.allgather_object(arithmetic(np.dtype(seat.dtype)))
    other = [rank for rank, name in enumerate(names) if name != names[0]]
    if other:
        raise ConfigurationError(
            f"run.logical_shards: rank {other[0]} and {len(other) - 1} others compute other bits than rank 0 "
            f"(arithmetic {names[other[0]]}, not {names[0]}). {CURE}"
        )
    return str(names[0])
