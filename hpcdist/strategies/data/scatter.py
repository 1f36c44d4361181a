"""Reducers of ZeRO: sum each layer's gradients to the ranks that update the layer.

REDUCE    sum a layer to the shards of its gradients, or to the cuts of the optimizer if gradients are kept whole
COMBINE   once per step, sum the shards over the ranks that hold the same shard, to the cuts of the optimizer
"""

from collections.abc import Sequence

from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.cuts import GRADIENTS, OPTIMIZER, WHOLE, Cuts
from hpcdist.strategies.data.parts import Reducer


class Scatter(Reducer):
    """Gradient reduction of ZeRO: reduce-scatters each layer's gradients to the ranks' shards."""

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
    ) -> None:
        super().__init__(update, counts=cuts.replicas is None or cuts.replicas.rank == 0)
        self.cuts, self.sum_cuts = cuts, cuts.sum
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

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store of the whole ``layer``. If `reduce` frees the layer, the store becomes invalid. Local."""
        return self.update.gradients if self._whole is None else self._whole.at(layer)

    def reduce(self, op: Operation) -> None:
        """Reduce-scatter the gradients of the layer in ``op.range``, and free the layer unless it is kept whole."""
        layer = self._layer_at[op.part]
        self.sum_cuts(self.gradients_at(layer), layer, WHOLE, self._first_stop)
        self._keep_shard(layer)

    def combine(self, op: Operation) -> None:
        """Reduce-scatter this rank's gradient shard of the layer in ``op.range`` among the ranks that hold it."""
        self.sum_cuts(self.update.gradients, self._layer_at[op.part], GRADIENTS, OPTIMIZER)

    def start(self, op: Operation) -> None:
        """Start to reduce-scatter the gradients of the layer in the flat range ``op.range``."""
        assert self._background is not None
        layer = self._layer_at[op.part]
        whole = self.gradients_at(layer).range(op.part)
        self._background.start_sum(op.range, whole, self.cuts.shares(layer), self.cuts.algorithm)

    def wait(self, op: Operation) -> None:
        """Wait for the reduce-scatter that `start` started for the layer in ``op.range``; keep this rank's shard."""
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
    """Gradient reduction of ZeRO that adds micro-batches in a fixed tree: the same bits on any number of ranks."""

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
        """Add the last micro-batch's gradients of the layer in ``op.range``; complete the sum with the other ranks."""
        layer = self._layer_at[op.part]
        self._trees[layer].reduce_scatter(self._add(layer, op, copy=False), self._owners[layer])
        self._keep_shard(layer)

    def add(self, op: Operation) -> None:
        """Add a micro-batch's gradients of the layer in ``op.range`` to local partial sums. Free the layer. Local."""
        layer = self._layer_at[op.part]
        self._add(layer, op, copy=True)
        if self._whole is not None:
            self._whole.free(layer)

    def _add(self, layer: int, op: Operation, *, copy: bool) -> Array:
        whole = self.gradients_at(layer).range(self.cuts.cuts[layer][WHOLE])
        self._shards.add(self._trees[layer], op.microbatch, whole, copy=copy)
        return whole
