"""Data parallelism by allreduce: sum the gradients of replicas that all hold the whole model.

Gradients arrive here already divided by the number of samples of the whole batch, so their *sum* over the ranks is
the mean over samples, exact however unevenly the samples are spread. With Psi bytes of gradients, each of p ranks
sends 2 Psi (p-1)/p a step on the ring.

`FixedTreeExchange` gives the same bits on any number of ranks: it sums in a fixed tree over the L logical shards of
`hpcdist.strategies.core.logical_shards`. It also sends 2 Psi (p-1)/p a step where L/p is a power of two, and keeps
log2(L/p) partial sums of Psi bytes beside the gradients; see `hpcdist.collectives.algorithms.fixed_tree` for other
numbers.
"""

from collections.abc import Iterable, Iterator, Sequence

from hpcdist import collectives
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.strategies.core.exchange import BackgroundCollectives, Handlers, pieces_of
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, ShardedUpdateExchange
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted


def groups_of_layers(units: Iterable[Range], longest: int, part: Range) -> Iterator[Range]:
    """Yield ranges of whole layers of ``part``, last layers first: as backward completes them.

    Each has ``longest`` elements or more, but for the last. ``part`` begins and ends between ``units``.
    """
    stop = part.stop
    for unit in sorted(filter(part.intersect, units), reverse=True):
        if stop - unit.start >= longest or unit.start == part.start:
            yield Range(unit.start, stop)
            stop = unit.start


def buckets_of_layers(
    layout: Layout, itemsize: int, bucket_bytes: int, part: Range | None = None, units: Iterable[Range] = ()
) -> list[Range]:
    """Cut ``part`` of the flat space into buckets of whole layers, in the order of `groups_of_layers`.

    A bucket closes when it has reached ``bucket_bytes``; a layer larger than that is cut. ``part`` (None: all) begins
    and ends between layers, or between ``units``, parts of them.
    """
    longest = max(1, bucket_bytes // itemsize)
    groups = groups_of_layers(units or layout.units.values(), longest, part or Range(0, layout.size))
    return [bucket for group in groups for bucket in reversed(list(cut(group, longest)))]


def buckets_of_rank(context: RankContext, itemsize: int) -> list[Range]:
    """Return the buckets of all stages of this rank, in the order in which backward completes them (local)."""
    sizes, units = (itemsize, context.bucket_bytes), [*context.ranges.values()]
    return [
        bucket for part in reversed(context.parts) for bucket in buckets_of_layers(context.layout, *sizes, part, units)
    ]


class AllreduceExchange(ShardedUpdateExchange):
    """Buckets of gradients reduced by one of the algorithms of `hpcdist.collectives`. Collective over the data axis."""

    replicas_identical = True
    whole_state = True

    def __init__(self, context: RankContext, shards: LogicalShards | None = None) -> None:
        super().__init__(context, shards)
        if context.overlap != "none" and context.data.size > 1:
            self.overlap = BackgroundCollectives(context.data, context.overlap)
        over = context.data if self.overlap is None else self.overlap.over
        stores = (
            context.store("parameters"),
            context.store("gradients", allocate=context.for_replicas("gradients", over)),
        )
        self.sharded_update = ShardedUpdate(
            *stores,
            context.build_optimizer(context.parts),
            context.parts,
            None,
            context.agree_algorithm,
            exactly=shards is not None,
            tensor=context.tensor,
            experts=context.expert_norms,
        )
        self.handlers: Handlers = {Kind.REDUCE: self.reduce, **self.sharded_update.handlers}
        self.handlers |= {Kind.START: self.start, Kind.WAIT: self.wait, Kind.POLL: self.poll}

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket (START and WAIT where they overlap), AGREE, then the update of everything."""
        buckets = buckets_of_rank(self.context, self.gradients.array.itemsize)
        kinds = (Kind.REDUCE,) if self.overlap is None else (Kind.START, Kind.WAIT)
        reduces = [Operation(kind, range=bucket) for kind in kinds for bucket in buckets]
        return [*reduces, Operation(Kind.AGREE), *self.sharded_update.plan()]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place. Collective over the data axis."""
        collectives.allreduce(self.context.data, self.gradients.range(op.part), self.algorithm)

    def start(self, op: Operation) -> None:
        """Begin to sum the gradients of the range in place. Collective over the data axis."""
        assert self.overlap is not None
        self.overlap.start(op.part, self.gradients.range(op.part), self.algorithm)

    def wait(self, op: Operation) -> None:
        """Wait for the sum of the range."""
        assert self.overlap is not None
        self.overlap.wait(op.part)

    def norm_squared(self) -> float:
        """Return this stage's share of the squared norm on the first of the replicas, 0 on the others."""
        own = self.sharded_update.norm_squared()
        return own if self.context.data.rank == 0 else 0.0

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of parameters and optimizer state: replicas are written once."""
        return pieces_of({"parameters": self.weights, **self.sharded_update.slots()}, self.shares())

    def shares(self) -> list[Range]:
        """Return the ranges that this rank saves of what all replicas have (local)."""
        data, itemsize = self.context.data, self.weights.array.itemsize
        mine = [split(part.size, data.size, itemsize)[data.rank].shift(part.start) for part in self.context.parts]
        return counted(self.context.layout, mine, self.context.tensor)


class FixedTreeExchange(AllreduceExchange):
    """Allreduce of the gradients of ``shards`` logical shards in a fixed tree. Collective over the data axis.

    Every rank has as many micro-batches as the one with the most shards; where it has a shard less, the last is empty.
    After each but the last, ADD takes its gradients into the partial sums of this rank, without a message; REDUCE takes
    those of the last one, and finishes the sums with the other ranks.
    """

    accumulates = False  # each shard's gradients are taken before the next one overwrites them

    def __init__(self, context: RankContext, shards: LogicalShards) -> None:
        super().__init__(context, shards)
        self.handlers = {**self.handlers, Kind.ADD: self.add}
        self._logical = shards
        longest = max(1, context.bucket_bytes // context.dtype.itemsize)  # elements in a message
        self._trees = {
            group: [(piece, shards.tree()) for piece in cut(group, longest)]
            for part in reversed(context.parts)
            for group in groups_of_layers(context.ranges.values(), longest, part)
        }

    def plan(self) -> list[Operation]:
        """Return ADD and REDUCE of whole layers, AGREE, then the update of everything."""
        sums = [Operation(kind, range=reduced) for kind in (Kind.ADD, Kind.REDUCE) for reduced in self._trees]
        return [*sums, Operation(Kind.AGREE), *self.sharded_update.plan()]

    def reduce(self, op: Operation) -> None:
        """Replace the gradients of the last shard by the sum over all shards. Collective over the data axis."""
        self._take_in(op, copy=False)
        for piece, tree in self._trees[op.part]:
            tree.reduce(self.gradients.range(piece))

    def add(self, op: Operation) -> None:
        """Add the gradients of a shard to the partial sums, before the next one overwrites them (local)."""
        self._take_in(op, copy=True)

    def _take_in(self, op: Operation, *, copy: bool) -> None:
        for piece, tree in self._trees[op.part]:
            self._logical.add(tree, op.microbatch, self.gradients.range(piece), copy=copy)
