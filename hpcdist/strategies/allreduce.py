"""Data parallelism by allreduce: every replica holds everything, gradients are summed, all take the same step.

Gradients arrive here already divided by the number of samples of the whole batch, so their *sum* over the ranks is the
mean over samples, exact however unevenly the samples are spread. With Psi bytes of gradients, each of p ranks sends
2 Psi (p-1)/p a step on the ring.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.exchange import Handlers, pieces_of
from hpcdist.strategies.owner import Owner
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat


def buckets(layout: Layout, itemsize: int, bucket_bytes: int, part: Range | None = None) -> list[Range]:
    """Cut ``part`` of the flat space into buckets of whole layers, last layers first: as backward completes them.

    A bucket closes when it has reached ``bucket_bytes``; a layer larger than that is cut. ``part`` (None: all) begins
    and ends between layers.
    """
    longest = max(1, bucket_bytes // itemsize)
    part = part or Range(0, layout.size)
    found: list[Range] = []
    stop = part.stop
    for unit in sorted(layout.units.values(), reverse=True):
        if part.start <= unit.start < stop and (stop - unit.start >= longest or unit.start == part.start):
            found += reversed(list(cut(Range(unit.start, stop), longest)))
            stop = unit.start
    return found


class AllreduceExchange:
    """Buckets of gradients reduced by one of the algorithms of `hpcdist.collectives`. Collective over the data axis."""

    lock_step = True
    replicas_identical = True
    accumulates = True
    gathers = False

    def __init__(self, seat: Seat) -> None:
        self.seat, self.algorithm = seat, seat.algorithm
        self.parameters, self.gradients = seat.store("parameters"), seat.store("gradients")
        optimizer = seat.build_optimizer(seat.part)
        self.owner = Owner(self.parameters, self.gradients, optimizer, [seat.part], None, seat.agree_algorithm)
        self.carries_out: Handlers = {Kind.REDUCE: self.reduce, **self.owner.carries_out}

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket, AGREE, then the update of everything."""
        found = buckets(self.seat.layout, self.gradients.array.itemsize, self.seat.bucket_bytes, self.seat.part)
        reduces = [Operation(Kind.REDUCE, range=bucket) for bucket in found]
        return [*reduces, Operation(Kind.AGREE), *self.owner.plan()]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place. Collective over the data axis."""
        assert op.range is not None
        collectives.allreduce(self.seat.data, self.gradients.range(op.range), self.algorithm)

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the one store of parameters."""
        return self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the one store of gradients."""
        return self.gradients

    def norm_squared(self) -> float:
        """Return this stage's share of the squared norm; one of the replicas, which all hold the same, speaks."""
        own = self.owner.norm_squared()
        return own if self.seat.data.rank == 0 else 0.0

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world, in place. Collective."""
        collectives.allreduce(self.seat.world, values, self.seat.agree_algorithm)
        return values

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        self.owner.begin_update(scale)

    def take(self, initial: FlatStore) -> None:
        """Take over the initial values."""
        self.parameters.copy_from(initial)

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of parameters and optimizer state: replicas are written once."""
        part, data = self.seat.part, self.seat.data
        mine = split(part.size, data.size, self.parameters.array.itemsize)[data.rank].shift(part.start)
        return pieces_of({"parameters": self.parameters, **self.owner.slots()}, [mine])

    def wanted(self) -> Sequence[Piece]:
        """Return parameters and optimizer state of all stages of this rank."""
        return pieces_of({"parameters": self.parameters, **self.owner.slots()}, [self.seat.part])

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock."""
        return self.owner.optimizer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the optimizer's clock."""
        self.owner.optimizer.restore(dict(state))
