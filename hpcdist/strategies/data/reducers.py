"""Reducers: each sums the gradients of all data ranks, so that every rank has the sums that it updates with.

`Sum` and `TreeSum` suit ranks that hold the whole model. With Psi bytes of gradients on p ranks, each rank sends
2 Psi (p-1)/p per step on the ring. `TreeSum` sends the same if its number of shards per rank is a power of two. It
keeps log2(shards per rank) partial sums of Psi bytes; see `hpcdist.collectives.algorithms.fixed_tree`.

`Scatter` and `TreeScatter` belong to ZeRO: they sum each layer to the ranks that update the layer. Operations:

REDUCE    sum a layer to the shards of its gradients, or to the cuts of the optimizer if gradients are kept whole
COMBINE   once per step, sum the shards over the ranks that hold the same shard, to the cuts of the optimizer

Next on the path of a gradient: `cuts.Cuts.sum`, or `coded_zero.CompressedSums.sum` for compressed gradients.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_rank, groups_of_layers
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.coded_zero import CompressedSums
from hpcdist.strategies.data.cuts import GRADIENTS, OPTIMIZER, WHOLE, Cuts
from hpcdist.strategies.data.residuals import Feedback


class Reducer:
    """Base class of the gradient reduction in a data-parallel strategy. Handlers are collective over the data axis."""

    # Each rank gets the sums that it updates with. Some methods are marked local.

    handlers: Handlers = MappingProxyType({})

    # ``counts``: False if another rank counts this rank's gradients in the gradient norm
    def __init__(self, update: ShardedUpdate, *, counts: bool = True) -> None:
        self.update, self.counts = update, counts
        self.feedback = Feedback()

    def plan(self) -> list[Operation]:
        """Return a list of the reducer's operations before the agreement on loss and gradient norm. Local."""
        raise NotImplementedError

    def plan_after_agreement(self) -> list[Operation]:
        """Return a list of the reducer's operations after the agreement on loss and gradient norm. Local."""
        return []

    def begin(self, operations: Sequence[Operation]) -> None:
        """Prepare for a step with the list ``operations``. Local.

        If the previous step was abandoned, restore the compression errors from before that step.
        """
        self.feedback.give_up()

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store for the gradients that the backward pass computes for ``layer``. Local."""
        return self.update.gradients

    def norm_squared(self) -> float:
        """Return a number whose sum over ranks is the mean gradient's squared norm. Collective with logical shards."""
        squared = self.update.norm_squared()
        return squared if self.counts else 0.0

    def begin_update(self, scale: float, correction: float) -> float:
        """Return the factor by which the update multiplies the gradients, by default ``scale``. Local.

        ``correction``: factor of this step's gradient, which ``scale`` already includes.
        """
        self.feedback.keep()
        return scale

    def pieces(self) -> list[Piece]:
        """Return a list of the reducer's checkpoint pieces, such as compression residuals. Local."""
        return self.feedback.pieces()

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Prepare to read a checkpoint with the scalars ``state``. Local.

        Return the kinds of the reducer's pieces that may be missing in the checkpoint.
        """
        return self.feedback.prepare_restore(state)

    def wanted(self) -> list[Piece]:
        """Return a list of the reducer's checkpoint pieces to read, as views of the memory to fill. Local."""
        return self.feedback.wanted()

    def state(self) -> dict[str, Any]:
        """Return a dict {name: scalar} with the reducer's state to store in a checkpoint. Local."""
        return self.feedback.state()

    def restored(self, state: Mapping[str, Any]) -> None:
        """Update the reducer's state, such as residuals, after its checkpoint pieces were read. Local.

        ``state``: scalars of the checkpoint.
        """
        self.feedback.restored()


class Sum(Reducer):
    """Allreduce of gradients in buckets, which may overlap with the backward pass."""

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
    """Allreduce that adds micro-batches in a fixed tree, with the same bits on any number of ranks."""

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
        """Sum the gradients in the range ``op.range`` over all logical shards, in place and in a fixed order."""
        self._add(op, copy=False)
        for piece, tree in self._trees[op.part]:
            tree.reduce(self.update.gradients.range(piece))

    def add(self, op: Operation) -> None:
        """Add a micro-batch's gradients in the range ``op.range`` to this rank's partial sums. Local."""
        self._add(op, copy=True)

    def _add(self, op: Operation, *, copy: bool) -> None:
        for piece, tree in self._trees[op.part]:
            self._shards.add(tree, op.microbatch, self.update.gradients.range(piece), copy=copy)


class Scatter(Reducer):
    """Gradient reduction of ZeRO: reduce-scatter of each layer's gradients to the ranks' shards."""

    _kept_cut = GRADIENTS

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        cuts: Cuts,
        # Memory pool of whole layers, which are reduced and freed after each micro-batch. None: all gradients are kept,
        # and reduced once per step.
        whole: TransientLayers | None,
        background: BackgroundCollectives | None = None,
        compressed: CompressedSums | None = None,  # sums the layers in place of ``cuts``
    ) -> None:
        super().__init__(update, counts=cuts.replicas is None or cuts.replicas.rank == 0)
        self.cuts, self._compressed = cuts, compressed
        self.sums: Cuts | CompressedSums = cuts if compressed is None else compressed
        if compressed is not None:
            self.feedback = compressed.feedback
        self._whole, self._background = whole, background
        self._ranges = list(reversed(context.ranges.values()))
        self._layer_at = {part: context.model.stages[unit].layer for unit, part in context.ranges.items()}
        self._first_stop = OPTIMIZER if whole is None else GRADIENTS
        self._combines = whole is not None and context.data.size > cuts.degrees.gradients
        self._summed: set[int] = set()  # layers whose gradient shard holds a micro-batch of this step
        self.handlers = {Kind.REDUCE: self.reduce, Kind.COMBINE: self.combine}
        if background is not None:
            self.handlers |= {Kind.START: self.start, Kind.WAIT: self.wait}

    def plan(self) -> list[Operation]:
        kinds = (Kind.REDUCE, Kind.COMBINE) if self._combines else (Kind.REDUCE,)
        return [Operation(kind, range=part) for kind in kinds for part in self._ranges]

    def begin(self, operations: Sequence[Operation]) -> None:
        super().begin(operations)
        self._summed.clear()  # the previous step may have been given up
        if self._compressed is not None:
            self._compressed.begin()

    def gradients_at(self, layer: int) -> FlatStore:
        return self.update.gradients if self._whole is None else self._whole.at(layer)

    def reduce(self, op: Operation) -> None:
        """Reduce-scatter the gradients of the layer with the flat range ``op.range``."""
        layer = self._layer_at[op.part]
        self.sums.sum(self.gradients_at(layer), layer, WHOLE, self._first_stop)
        self._keep_shard(layer)

    def combine(self, op: Operation) -> None:
        """Reduce-scatter this rank's gradient shard of the layer with the flat range ``op.range``.

        Collective over the ranks that have the same gradient shard.
        """
        self.sums.sum(self.update.gradients, self._layer_at[op.part], GRADIENTS, OPTIMIZER)

    def start(self, op: Operation) -> None:
        """Start to reduce-scatter the gradients of the layer with the flat range ``op.range``."""
        assert self._background is not None
        layer = self._layer_at[op.part]
        whole = self.gradients_at(layer).range(op.part)
        self._background.start_sum(op.range, whole, self.cuts.shares(layer), self.cuts.algorithm)

    def wait(self, op: Operation) -> None:
        """Wait for the reduce-scatter that `start` started for the layer with the flat range ``op.range``."""
        assert self._background is not None
        self._background.wait(op.range)
        self._keep_shard(self._layer_at[op.part])

    def _keep_shard(self, layer: int) -> None:
        # Adds the layer's shard to the sum over micro-batches, and frees the layer.
        if self._whole is None:  # reduced in place, in the store that the update reads
            return
        part, store, gradients = self.cuts.cuts[layer][self._kept_cut], self.gradients_at(layer), self.update.gradients
        (gradients.add if layer in self._summed else gradients.write)(part, store.range(part))
        self._summed.add(layer)
        self._whole.free(layer)


class TreeScatter(Scatter):
    """Reduce-scatter that adds micro-batches in a fixed tree, with the same bits on any number of ranks."""

    # With n micro-batches per rank, each rank keeps log2(n) partial sums of all its gradients. So ZeRO stages 2 and 3
    # save gradient memory only if n is 1.

    _kept_cut = OPTIMIZER

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        cuts: Cuts,
        whole: TransientLayers | None,
        shards: LogicalShards,
    ) -> None:
        super().__init__(context, update, cuts, whole)
        self._shards = shards
        self._trees = {layer: shards.tree() for layer in cuts.cuts}
        self._owners = {layer: cuts.owners(layer) for layer in cuts.cuts}
        self.handlers = {Kind.REDUCE: self.reduce, Kind.ADD: self.add}

    def plan(self) -> list[Operation]:
        return [Operation(kind, range=part) for kind in (Kind.REDUCE, Kind.ADD) for part in self._ranges]

    def reduce(self, op: Operation) -> None:
        layer = self._layer_at[op.part]
        self._trees[layer].reduce_scatter(self._add(layer, op, copy=False), self._owners[layer])
        self._keep_shard(layer)

    def add(self, op: Operation) -> None:
        """Add a micro-batch's gradients of the layer with the flat range ``op.range`` to this rank's sums. Local."""
        layer = self._layer_at[op.part]
        self._add(layer, op, copy=True)
        if self._whole is not None:
            self._whole.free(layer)

    def _add(self, layer: int, op: Operation, *, copy: bool) -> Array:
        whole = self.gradients_at(layer).range(self.cuts.cuts[layer][WHOLE])
        self._shards.add(self._trees[layer], op.microbatch, whole, copy=copy)
        return whole
