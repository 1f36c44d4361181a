"""Data parallelism by allreduce: every replica holds everything, gradients are summed, all take the same step.

Gradients arrive here already divided by the number of samples of the whole batch, so their *sum* over the ranks is the
mean over samples, exact however unevenly the samples are spread. With Psi bytes of gradients, each of p ranks sends
2 Psi (p-1)/p a step on the ring.
"""

from collections.abc import Sequence

from hpcdist import collectives
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.strategies.exchange import Handlers, pieces_of
from hpcdist.strategies.logical_shards import LogicalShards
from hpcdist.strategies.overlap import Overlap
from hpcdist.strategies.owner import Owner, OwnerExchange
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.tensor.replicated import counted


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


class AllreduceExchange(OwnerExchange):
    """Buckets of gradients reduced by one of the algorithms of `hpcdist.collectives`. Collective over the data axis."""

    replicas_identical = True

    def __init__(self, seat: Seat, shards: LogicalShards | None = None) -> None:
        super().__init__(seat, shards)
        if seat.overlap != "none" and seat.data.size > 1:
            self.overlap = Overlap(seat.data, seat.overlap)
        over = seat.data if self.overlap is None else self.overlap.over
        stores = seat.store("parameters"), seat.store("gradients", allocate=seat.for_replicas("gradients", over))
        self.owner = Owner(
            *stores,
            seat.build_optimizer(seat.parts),
            seat.parts,
            None,
            seat.agree_algorithm,
            exactly=shards is not None,
            tensor=seat.tensor,
        )
        self.carries_out: Handlers = {Kind.REDUCE: self.reduce, **self.owner.carries_out}
        self.carries_out |= {Kind.START: self.start, Kind.WAIT: self.wait, Kind.POLL: self.poll}

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket, or START and WAIT, AGREE, then the update of everything."""
        sizes = self.gradients.array.itemsize, self.seat.bucket_bytes
        found = [bucket for part in reversed(self.seat.parts) for bucket in buckets(self.seat.layout, *sizes, part)]
        kinds = (Kind.REDUCE,) if self.overlap is None else (Kind.START, Kind.WAIT)
        reduces = [Operation(kind, range=bucket) for kind in kinds for bucket in found]
        return [*reduces, Operation(Kind.AGREE), *self.owner.plan()]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place. Collective over the data axis."""
        assert op.range is not None
        collectives.allreduce(self.seat.data, self.gradients.range(op.range), self.algorithm)

    def start(self, op: Operation) -> None:
        """Begin to sum the gradients of the range in place. Collective over the data axis."""
        assert op.range is not None and self.overlap is not None
        self.overlap.start(op.range, self.gradients.range(op.range), self.algorithm)

    def wait(self, op: Operation) -> None:
        """Return when the sum of the range is there."""
        assert op.range is not None and self.overlap is not None
        self.overlap.wait(op.range)

    def poll(self, op: Operation) -> None:
        """Move what was started (local)."""
        assert self.overlap is not None
        self.overlap.poll()

    def norm_squared(self) -> float:
        """Return this stage's share of the squared norm; one of the replicas, which all hold the same, speaks."""
        own = self.owner.norm_squared()
        return own if self.seat.data.rank == 0 else 0.0

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of parameters and optimizer state: replicas are written once."""
        return pieces_of({"parameters": self.weights, **self.owner.slots()}, self.shares())

    def shares(self) -> list[Range]:
        """Return the ranges that this rank saves of what all replicas have (local)."""
        data, itemsize = self.seat.data, self.weights.array.itemsize
        mine = [split(part.size, data.size, itemsize)[data.rank].shift(part.start) for part in self.seat.parts]
        return counted(self.seat.layout, mine, self.seat.tensor)
