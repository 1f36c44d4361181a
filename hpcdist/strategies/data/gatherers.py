"""Gatherers: they bring the parameters that ranks update to all ranks that compute with the parameters.

`CutGatherer` belongs to ZeRO. Operations on a layer that is cut:

GATHER    before each use, all-gather the layer from the shards
FREE      after each use, free the layer; its shard stays
REFRESH   after the update, all-gather the shard from the smaller cuts of the optimizer

Operation on a layer that every rank keeps whole:

GATHER    after the update, all-gather the layer from the cuts of the optimizer

Next on the path: `cuts.Cuts.gather`, or `coded_zero.CompressedGathers.gather` for compressed parameters.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.coded_zero import CompressedGathers
from hpcdist.strategies.data.cuts import OPTIMIZER, PARAMETERS, WHOLE, Cuts


class Gatherer:
    """Base class of gatherers: they send updated parameters to all ranks that compute with the parameters.

    The base class gathers nothing: every rank updates all parameters that it computes with.
    """

    handlers: Handlers = MappingProxyType({})

    def __init__(self, update: ShardedUpdate) -> None:
        self.update = update

    @property
    def parameters(self) -> FlatStore:
        """Store of the parameters that this rank keeps between steps."""
        return self.update.parameters

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store with the current parameters of ``layer``. Local."""
        return self.parameters

    def plan(self) -> list[Operation]:
        """Return the gatherer's operations after the optimizer update. Local."""
        return []

    def begin(self) -> None:
        """Prepare for a step or an evaluation. Collective over the data axis."""

    def begin_update(self) -> None:
        """Prepare for the update of a step. Local."""

    def spread(self) -> None:
        """Send this rank's updated parameters to the ranks that compute with them. Collective over the data axis."""
        for op in self.plan():
            self.handlers[op.kind](op)

    def loaded(self) -> None:
        """Record that initial parameters were loaded. Local."""

    def restored(self) -> None:
        """Record that parameters were restored from a checkpoint. Local."""

    def close(self) -> None:
        """Free communicators. Collective over the data axis."""


class CutGatherer(Gatherer):
    """All-gather of each layer's ZeRO parameter shards before use. Handlers are collective over the data axis."""

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        cuts: Cuts,
        cut_units: Collection[int],  # indices of the model stages whose parameters are gathered
        whole: TransientLayers,  # memory of the gathered layers
        background: BackgroundCollectives | None = None,  # gathers layers while other layers are computed
        compressed: CompressedGathers | None = None,  # gathers the layers that are cut in place of ``cuts``
    ) -> None:
        super().__init__(update)
        self.cuts = cuts
        self._gathers: Cuts | CompressedGathers = cuts if compressed is None else compressed
        self._layer_of: Mapping[int, int] = {unit: context.model.stages[unit].layer for unit in context.units}
        self._cut_layers = {self._layer_of[unit] for unit in cut_units}
        self._whole, self._background = whole, background
        self.handlers = {Kind.GATHER: self.gather, Kind.FREE: self.free, Kind.REFRESH: self.refresh}
        if background is not None:
            self.handlers |= {Kind.START_GATHER: self.start_gather, Kind.WAIT_GATHER: self.wait_gather}

    def plan(self) -> list[Operation]:
        degrees, plan = self.cuts.degrees, []
        for unit, layer in self._layer_of.items():
            is_cut = layer in self._cut_layers
            if (degrees.parameters if is_cut else 1) < degrees.optimizer:
                plan.append(Operation(Kind.REFRESH if is_cut else Kind.GATHER, unit=unit))
        return plan

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store of the whole ``layer``. If it is sharded, the store is valid from `gather` to `free`."""
        return self._whole.at(layer) if layer in self._cut_layers else self.parameters

    def gather(self, op: Operation) -> None:
        """All-gather layer ``op.unit``: before each use if it is cut, else after the update."""
        layer = self._layer_of[op.unit]
        if layer not in self._cut_layers:  # after the update
            self.cuts.gather(self.parameters, layer, WHOLE, OPTIMIZER)
        elif self._background is not None:
            self.start_gather(op)
            self._background.wait(layer)
        else:
            self._gathers.gather(self._with_shard(layer), layer, WHOLE, PARAMETERS)

    def _with_shard(self, layer: int) -> FlatStore:
        store, shard = self._whole.at(layer), self.cuts.cuts[layer][PARAMETERS]
        self.parameters.read(shard, store.range(shard))
        return store

    def free(self, op: Operation) -> None:
        """Free the gathered parameters of model layer ``op.unit`` after their use. Local."""
        self._whole.free(self._layer_of[op.unit])

    def refresh(self, op: Operation) -> None:
        """All-gather this rank's shard of layer ``op.unit`` from the parts that other ranks updated."""
        self._gathers.gather(self.parameters, self._layer_of[op.unit], PARAMETERS, OPTIMIZER)

    def start_gather(self, op: Operation) -> None:
        """Start to all-gather the parameters of model layer ``op.unit``."""
        assert self._background is not None
        layer = self._layer_of[op.unit]
        whole = self._with_shard(layer).range(self.cuts.cuts[layer][WHOLE])
        self._background.start_gather(layer, whole, self.cuts.shares(layer), self.cuts.algorithm)

    def wait_gather(self, op: Operation) -> None:
        """Wait for the all-gather that `start_gather` started for layer ``op.unit``."""
        assert self._background is not None
        self._background.wait_gather(self._layer_of[op.unit])

    def close(self) -> None:
        self.cuts.free()


class CodedGatherer(CutGatherer):
    """Gatherer of ZeRO that compresses the parameters of layers that are cut. Other layers stay uncompressed."""

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        cuts: Cuts,
        cut_units: Collection[int],
        whole: TransientLayers,
        compressed: CompressedGathers,
        decoded: FlatStore | None,  # store of decoded shards, if the exact parameters are in another store
    ) -> None:
        super().__init__(context, update, cuts, cut_units, whole, compressed=compressed)
        self._decoded, self._keeps_decoded = decoded, compressed.keeps_decoded
        self._is_stale = False  # the shards are not yet decoded from the owners' cuts

    @property
    def parameters(self) -> FlatStore:
        """Store of the decoded shards if this rank keeps them, else of the parameters that the optimizer updates."""
        return self.update.parameters if self._decoded is None else self._decoded

    def begin(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self.spread()

    def gather(self, op: Operation) -> None:
        if self._layer_of[op.unit] not in self._cut_layers:
            self._copy_cut(op.unit)
        super().gather(op)

    def refresh(self, op: Operation) -> None:
        self._copy_cut(op.unit)
        super().refresh(op)

    def _copy_cut(self, unit: int) -> None:
        if self._decoded is not None:
            part = self.cuts.cuts[self._layer_of[unit]][OPTIMIZER]
            self._decoded.range(part)[...] = self.update.parameters.range(part)

    def loaded(self) -> None:
        self._is_stale = self._keeps_decoded

    def restored(self) -> None:
        self._is_stale = self._decoded is not None  # 16-bit parameters were gathered when they were rounded
