"""ZeRO over logical shards: gradients are summed in the order of a fixed tree, whatever the number of ranks.

See `hpcdist.strategies.core.logical_shards`. Cuts decide no bit. Parameters travel as in the plain path, gradients
once a step, to all owners: k Psi (p-1)/d_o bytes with k = 1 where L/p is a power of two (`LayerTrees`, in the order of
`hpcdist.collectives.algorithms.fixed_tree`). Each rank first sums what it can without the others, and these partial
sums are of whole layers: log2(L/p) Psi bytes, so zero2 and zero3 save no memory of gradients unless every rank has
one shard.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees
from hpcdist.strategies.zero.levels import OPTIMIZER, WHOLE, Levels
from hpcdist.strategies.zero.plain import PlainZero


class LayerTrees:
    """Tree of sums for each layer of ``levels``. Collective over the data axis, but where it says local."""

    def __init__(self, shards: LogicalShards, levels: Levels) -> None:
        self._shards, self._levels = shards, levels
        self._trees = {layer: shards.tree() for layer in levels.cuts}
        self._owners = {layer: levels.owners(layer) for layer in levels.cuts}

    def add(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Add the gradients of a layer of one of this rank's shards, but for the last (local)."""
        self._take_in(layer, microbatch, store, copy=True)

    def reduce(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Add those of the last shard, and replace the own cut by the sum over all shards.

        What ``store`` holds of the layer beyond that is undefined afterwards.
        """
        self._take_in(layer, microbatch, store, copy=False)
        self._trees[layer].reduce_scatter(store.range(self._levels.cuts[layer][WHOLE]), self._owners[layer])

    def _take_in(self, layer: int, microbatch: int, store: FlatStore, *, copy: bool) -> None:
        whole = store.range(self._levels.cuts[layer][WHOLE])
        self._shards.add(self._trees[layer], microbatch, whole, copy=copy)


class ShardedSums(PlainZero):
    """Layer of ZeRO that sums gradients over logical shards, where there are any."""

    def __init__(
        self, context: RankContext, degrees: ShardingDegrees, *parts: Any, shards: LogicalShards | None
    ) -> None:
        self.exact = shards is not None
        if shards is not None:  # the tree ends at the owners of the optimizer's cuts, whatever the degree of gradients
            self.kept_cut = OPTIMIZER
        super().__init__(context, degrees, *parts, shards=shards)
        self._trees = None if shards is None else LayerTrees(shards, self.levels)
        if shards is not None:
            self.accumulates = False  # each shard is summed by itself, or its place in the tree would be lost
            self.degrees = replace(degrees, gradients=context.data.size)  # each REDUCE is over all replicas
            self.handlers = {**self.handlers, Kind.ADD: self.add}

    def _sums_after_reduces(self, ranges: Sequence[Range]) -> list[Operation]:
        """Return ADD of each layer where logical shards are summed (local)."""
        if self.shards is None:
            return super()._sums_after_reduces(ranges)
        return [Operation(Kind.ADD, range=part) for part in ranges]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of a layer, by its tree where there are logical shards."""
        if self._trees is None:
            super().reduce(op)
            return
        layer = self._layer_of(op)
        self._trees.reduce(layer, op.microbatch, self.gradients_at(layer))
        self._keep_shard(layer)

    def add(self, op: Operation) -> None:
        """Add the gradients of a logical shard to the partial sums of this rank, and free the layer (local)."""
        assert self._trees is not None
        self._trees.add(layer := self._layer_of(op), op.microbatch, self.gradients_at(layer))
        if not self._keeps_gradients:
            self._whole_gradients.free(layer)
