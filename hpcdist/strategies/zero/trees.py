"""Gradients of logical shards, layer by layer, in the order of a tree to the owners of their parts.

As much is summed on each rank as it can without the others, so partial sums are of whole layers, wherever a rank owns a
part of them only: log2(L/p) of Psi bytes for L shards on p ranks (see `hpcdist.collectives.fixed_tree`). They go once a
step, k of them, to all owners: k Psi (p-1)/d_o bytes from each rank, where d_o ranks cut the optimizer state.
"""

from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.logical_shards import LogicalShards
from hpcdist.strategies.zero.levels import WHOLE, Levels


class LayerTrees:
    """A tree for each layer that ``levels`` cuts. Collective over the data axis, but where it says local."""

    def __init__(self, shards: LogicalShards, levels: Levels) -> None:
        self._shards, self._levels = shards, levels
        self._trees = {layer: shards.tree() for layer in levels.cuts}
        self._owners = {layer: levels.owners(layer) for layer in levels.cuts}

    def add(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Take in the gradients of a shard of a layer that is not the last one here (local)."""
        self._take_in(layer, microbatch, store, copy=True)

    def reduce(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Take in those of the last one, and put the sum over all shards in the place of the own cut.

        What ``store`` holds of the layer beyond that is undefined afterwards.
        """
        self._take_in(layer, microbatch, store, copy=False)
        self._trees[layer].reduce_scatter(store.range(self._levels.cuts[layer][WHOLE]), self._owners[layer])

    def _take_in(self, layer: int, microbatch: int, store: FlatStore, *, copy: bool) -> None:
        whole = store.range(self._levels.cuts[layer][WHOLE])
        self._shards.add(self._trees[layer], microbatch, whole, copy=copy)
