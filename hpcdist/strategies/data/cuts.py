"""Nested cuts of every layer over the data axis, for reduce-scatters and all-gathers level by level.

A layer is cut over the ranks of a parameter group. Each shard of parameters is cut over the ranks of a gradient group
that hold the shard. Each shard of gradients is cut over the ranks of an optimizer group in the same way. Groups are
blocks of consecutive data ranks. With the sharding degrees d_p | d_g | d_o of p data ranks:

    level 0   d_p consecutive ranks                                 whole layer      -> shard of the parameters
    level 1   d_g/d_p ranks, d_p apart: one of each parameter group                  -> shard of the gradients
    level 2   d_o/d_g ranks, d_g apart: one of each gradient group                   -> cut of the optimizer
    replicas  p/d_o ranks, d_o apart, that own the same cut

If d_p ranks share a node, level 0 stays inside it and the other levels go between nodes. Reduce-scatters down the
levels send as much as a single one over all ranks: 1 - 1/d_p + (1/d_p) (1 - d_p/d_g) = 1 - 1/d_g of the layer.

Next on the path of a gradient: `hpcdist.collectives.sharded`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from hpcdist import collectives
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.sharded import SHARDED, SHARDED_ON_GPUS, Sharding
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.optim.muon import owned_ranges
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.core.logical_shards import ALGORITHM
from hpcdist.strategies.core.rank_context import RankContext

WHOLE: Final = 0  # indices into the cuts of a layer
PARAMETERS: Final = 1
GRADIENTS: Final = 2
OPTIMIZER: Final = 3


class Cuts:
    """Nested ranges of each layer on this rank, by the number of levels that cut it.

    0: whole layer. 1: parameter shard. 2: gradient shard. 3: range that this rank updates.
    """

    def __init__(self, context: RankContext, degrees: ShardingDegrees) -> None:
        self.degrees = degrees
        self._data, self._made = context.data, dict[tuple[int, int], Communicator | None]()
        bounds = (1, degrees.parameters, degrees.gradients, degrees.optimizer)
        self._blocks, self._itemsize = list(pairwise(bounds)), context.dtype.itemsize
        # Construction is collective over the world. comms[k]: ranks that divide range k into range k + 1, or None
        self.comms = [self._between(inner, outer) for inner, outer in self._blocks]
        self.sharers = self._between(1, degrees.optimizer)  # ranks that together update each layer once
        self.replicas = self._between(degrees.optimizer, context.data.size)  # ranks that update the same ranges
        self.algorithm = _alike(context)
        self._sharding = self._choose_sharding(context)
        self.cuts: dict[int, list[Range]] = {}  # by layer: the layer, its parameter and gradient shards, updated range
        self._shares: dict[int, list[list[Range]]] = {}  # of all members of each level, relative to its range
        layers = {context.model.stages[unit].layer: whole for unit, whole in context.ranges.items()}
        # Muon updates whole matrices: {layer: ranges of the ranks that update it}, in the order of the flat space
        self._owned: dict[int, list[Range]] = {}
        if context.optimizer.name == "muon" and layers:
            self._owned = owned_ranges(context.optimizer, context.layout, layers, degrees.optimizer)
        for layer, whole in layers.items():
            self.cuts[layer], self._shares[layer] = self._cut(layer, whole)

    def _between(self, inner: int, outer: int) -> Communicator | None:
        data = self._data
        if (inner, outer) not in self._made:
            if outer == inner:
                self._made[inner, outer] = None
            elif (inner, outer) == (1, data.size):
                self._made[inner, outer] = data
            else:
                # Ranks of one block (rank // outer) with one index in their inner blocks (rank % inner).
                color = data.rank // outer * inner + data.rank % inner
                self._made[inner, outer] = data.split(color, data.rank, f"data of {inner} in {outer}")
        return self._made[inner, outer]

    def _choose_sharding(self, context: RankContext) -> Sharding:
        if self.algorithm == ALGORITHM:
            return SHARDED["ring"]  # only for gathers: trees sum the gradients
        shardings = SHARDED | SHARDED_ON_GPUS if context.on == "gpu" else SHARDED
        if self.algorithm not in shardings:
            raise ConfigurationError(
                f"communication.algorithm = {self.algorithm!r} has no separate reduce-scatter and all-gather, which "
                f"ZeRO needs; on the device type {context.on}, choose one of {', '.join(shardings)}"
            )
        nested = not all(comm in (None, self._data) for comm in self.comms)
        if self.algorithm == "hierarchical" and (nested or context.optimizer.name == "muon"):
            # Its cuts follow the nodes, which may differ between groups. The levels are the hierarchy instead. Nor can
            # its cuts keep matrices whole.
            return shardings["ring"]
        return shardings[self.algorithm]

    def _cut(self, layer: int, whole: Range) -> tuple[list[Range], list[list[Range]]]:
        cuts, shares = [whole], []
        owned = self._owned.get(layer, [])  # ranges of the owners within the last cut
        for comm in self.comms:
            parts, member = [Range(0, cuts[-1].size)], 0
            if comm is not None:
                member, groups = comm.rank, _groups(owned, comm.size)
                parts = self._sharding.shares(comm, cuts[-1].size, self._itemsize)
                if owned:
                    parts = [Range(group[0].start, group[-1].stop).shift(-cuts[-1].start) for group in groups]
                    owned = groups[member]
            cuts.append(parts[member].shift(cuts[-1].start))
            shares.append(parts)
        return cuts, shares

    def first(self, start: int, stop: int) -> Communicator | None:
        """Return the first communicator that divides a range of level ``start`` to ``stop`` - 1, or None. Local."""
        return next((comm for comm in self.comms[start:stop] if comm is not None), None)

    def sum(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Reduce-scatter ``layer`` of ``store`` in place. Collective.

        The input is the range after ``start`` levels. The output is this rank's range after ``stop`` levels. If this is
        the range that the rank updates, it is also summed over the replicas.
        """
        for level in range(start, stop):
            self.reduce_level(store, layer, level)
        if stop == OPTIMIZER and self.replicas is not None:
            self.sum_replicas(store, layer)

    def reduce_level(self, store: FlatStore, layer: int, level: int) -> None:
        """Reduce-scatter the range of ``layer`` at nesting level ``level``, in place in ``store``.

        Afterwards, this rank has the sum of its range at ``level`` + 1. Collective over the ranks of ``level``.
        """
        comm, part = self.comms[level], self.cuts[layer][level]
        if comm is not None and part:
            self._sharding.reduce_scatter(comm, store.range(part), self._shares[layer][level])

    def shares_at(self, layer: int, level: int) -> list[Range]:
        """Return a list with the range of ``layer`` at nesting level ``level`` + 1 on each rank of ``level``. Local.

        The ranks of ``level`` are the ranks that divide this rank's range at nesting level ``level``.
        """
        return [share.shift(self.cuts[layer][level].start) for share in self._shares[layer][level]]

    def sum_replicas(self, store: FlatStore, layer: int) -> None:
        """Allreduce the range of ``layer`` that this rank updates, in place in ``store``.

        Collective over the ranks that update the same range.
        """
        part = self.cuts[layer][OPTIMIZER]
        if self.replicas is not None and part:
            collectives.allreduce(self.replicas, store.range(part), self.algorithm)

    def of_replicas(self, parts: Sequence[Range]) -> list[Range]:
        """Divide ``parts`` among the ranks that update the same ranges. Return a list of this rank's pieces. Local."""
        if self.replicas is None:
            return list(parts)
        count, rank = self.replicas.size, self.replicas.rank
        return [split(part.size, count, self._itemsize)[rank].shift(part.start) for part in parts]

    def gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """All-gather ``layer`` of ``store`` in place. Collective.

        This rank contributes its range at nesting level ``stop``, and receives its range at level ``start``.
        """
        for level in reversed(range(start, stop)):
            comm, part = self.comms[level], self.cuts[layer][level]
            if comm is not None and part:
                self._sharding.all_gather(comm, store.range(part), self._shares[layer][level])

    def owners(self, layer: int) -> list[Range]:
        """Return a list with the range of ``layer`` that each data rank updates. Local.

        The ranges are relative to the start of ``layer``.
        """
        owners = []
        for rank in range(self._data.size):
            part, owned = Range(0, self.cuts[layer][WHOLE].size), self._owned.get(layer, [])
            for inner, outer in self._blocks:
                if owned:
                    owned = _groups(owned, outer // inner)[rank % outer // inner]
                    part = Range(owned[0].start, owned[-1].stop).shift(-self.cuts[layer][WHOLE].start)
                    continue
                part = split(part.size, outer // inner, self._itemsize)[rank % outer // inner].shift(part.start)
            owners.append(part)
        return owners

    def free(self) -> None:
        """Free the communicators. Collective."""
        for comm in self._made.values():
            if comm is not None and comm is not self._data:
                comm.free()
        self._made.clear()

    @property
    def at_once(self) -> bool:
        """True if every layer is divided once, over the whole data axis, and not in nested steps."""
        return [comm for comm in self.comms if comm is not None] == [self._data]

    def shares(self, layer: int) -> list[Range]:
        """Return a list. Item r is the range that data rank r updates, relative to the start of ``layer``. Local."""
        return [part.shift(-self.cuts[layer][WHOLE].start) for part in self.of_all(layer)]

    def of_all(self, layer: int) -> list[Range]:
        """Return a list with the flat parameter range of ``layer`` that each data rank updates. Local.

        Requires that `at_once` is True or that the data axis has a single rank.
        """
        if self._data.size == 1:
            return [self.cuts[layer][OPTIMIZER]]
        (level,) = [level for level, comm in enumerate(self.comms) if comm is self._data]
        return [part.shift(self.cuts[layer][WHOLE].start) for part in self._shares[layer][level]]


def _groups(owned: list[Range], count: int) -> list[list[Range]]:
    size = len(owned) // count
    return [owned[size * index : size * (index + 1)] for index in range(count)]


def _alike(context: RankContext) -> str:
    # Shards of "hierarchical" follow the nodes of the data axis, which may differ between tensor ranks. Layers must be
    # sharded alike on all tensor ranks. Collective over the world.
    if context.algorithm != "hierarchical" or context.tensor.size == 1:
        return context.algorithm
    places = context.world.allgather_object(context.data.nodes().members)
    return context.algorithm if all(place == places[0] for place in places) else "ring"
