"""Hybrid sharding, a layer around the plain path of ZeRO: degrees between 1 and all of the data ranks.

MiCS, hpZ, FSDP's hybrid shards and AMSP (see `hpcdist.strategies.zero.exchange`): gradients may be cut over more ranks
than parameters, optimizer state over more than gradients, and several ranks may own the same cut. Three messages are
added to those of the plain path, all of them once a step:

    COMBINE   sum the shards of gradients over the ranks that hold the same one, down to the cuts of the optimizer
    replicas  sum these cuts over the ranks that own the same one, after the last reduce-scatter
    REFRESH   gather the new cuts of the optimizer to the larger shards of parameters
"""

from collections.abc import Sequence
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted
from hpcdist.strategies.zero.levels import GRADIENTS, OPTIMIZER, PARAMETERS
from hpcdist.strategies.zero.plain import PlainZero


class HybridZero(PlainZero):
    """Layer of ZeRO for sharding degrees between 1 and the number of data ranks."""

    def __init__(self, *arguments: Any, **of_base: Any) -> None:
        super().__init__(*arguments, **of_base)
        self.handlers = {**self.handlers, Kind.COMBINE: self.combine, Kind.REFRESH: self.refresh}

    def _sums_after_reduces(self, ranges: Sequence[Range]) -> list[Operation]:
        """Return COMBINE of each layer where several ranks hold the same shard of its gradients (local)."""
        if self.accumulates or self._degrees.gradients == self.context.data.size:
            return []
        return [Operation(Kind.COMBINE, range=part) for part in ranges]

    def _gathers_after_update(self) -> list[Operation]:
        """Return GATHER of whole layers, and REFRESH of shards that are larger than the own cut (local)."""
        back = []
        for unit in self.context.units:
            is_cut = self.context.model.stages[unit].layer in self._cut_layers
            if (self._degrees.parameters if is_cut else 1) < self._degrees.optimizer:
                back.append(Operation(Kind.REFRESH if is_cut else Kind.GATHER, unit=unit))
        return back

    def _reduce_scatter(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Sum cut ``start`` of a layer to its cut ``stop``, the last one over all who own the same. Collective."""
        super()._reduce_scatter(store, layer, start, stop)
        if stop == OPTIMIZER:
            self.levels.sum_replicas(store, layer)

    def combine(self, op: Operation) -> None:
        """Sum the shard of a layer over those who hold the same one, to their cuts, once a step."""
        self._reduce_scatter(self.gradients, self._layer_of(op), GRADIENTS, OPTIMIZER)

    def refresh(self, op: Operation) -> None:
        """Gather the shard of a layer from the new cuts."""
        self._all_gather(self.parameters, self.context.model.stages[op.unit].layer, PARAMETERS, OPTIMIZER)

    def norm_squared(self) -> float:
        """Return the share of the own cuts, for one of those who own the same: together they are the model, once."""
        own = super().norm_squared()
        return own if self.levels.replicas is None or self.levels.replicas.rank == 0 else 0.0

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of the own cuts: what several ranks own is written once."""
        own = counted(self.context.layout, self.levels.of_replicas(self.sharded_update.parts), self.context.tensor)
        return pieces_of({"parameters": self.weights, **self.sharded_update.slots()}, own)
