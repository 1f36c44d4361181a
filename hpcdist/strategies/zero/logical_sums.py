"""ZeRO over logical shards: gradients are summed in the order of a fixed tree, whatever the number of ranks.

See `hpcdist.strategies.core.logical_shards`. Cuts decide no bit. Parameters travel as in the plain path, gradients
once a step, to all owners: k Psi (p-1)/d_o bytes with k = 1 where L/p is a power of two (in the order of
`hpcdist.collectives.algorithms.fixed_tree`). Each rank first sums what it can without the others, and these partial
sums are of whole layers: log2(L/p) Psi bytes, so zero2 and zero3 save no memory of gradients unless every rank has
one shard.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees
from hpcdist.strategies.zero.levels import OPTIMIZER, WHOLE
from hpcdist.strategies.zero.plain import PlainZero


class ShardedSums(PlainZero):
    """Layer of ZeRO that sums gradients over logical shards, where there are any."""

    def __init__(
        self, context: RankContext, degrees: ShardingDegrees, *parts: Any, shards: LogicalShards | None
    ) -> None:
        self.exact = shards is not None
        if shards is not None:  # the tree ends at the owners of the optimizer's cuts, whatever the degree of gradients
            self.kept_cut = OPTIMIZER
        super().__init__(context, degrees, *parts, shards=shards)
        if shards is not None:
            self._trees = {layer: shards.tree() for layer in self.levels.cuts}
            self._owners = {layer: self.levels.owners(layer) for layer in self.levels.cuts}
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
        if self.shards is None:
            super().reduce(op)
            return
        layer = self._layer_of(op)
        self._trees[layer].reduce_scatter(self._take_in(layer, op.microbatch, copy=False), self._owners[layer])
        self._keep_shard(layer)

    def add(self, op: Operation) -> None:
        """Add the gradients of a logical shard to the partial sums of this rank, and free the layer (local)."""
        self._take_in(layer := self._layer_of(op), op.microbatch, copy=True)
        if not self._keeps_gradients:
            self._whole_gradients.free(layer)

    def _take_in(self, layer: int, microbatch: int, *, copy: bool) -> Array:
        """Give the gradients of a layer, of one of this rank's shards, to its tree, and return them (local)."""
        assert self.shards is not None
        whole = self.gradients_at(layer).range(self.levels.cuts[layer][WHOLE])
        self.shards.add(self._trees[layer], microbatch, whole, copy=copy)
        return whole
