"""Gatherer of ZeRO: brings the cuts that ranks update to all ranks that compute with the parameters.

Operations:

GATHER    after the update, all-gather a layer that is kept whole; or, before each use, a layer that is cut
FREE      after each use, free a layer that is cut; its shard stays
REFRESH   after the update, all-gather the shard of a layer that is cut from the smaller cuts of the optimizer
"""

from collections.abc import Collection, Mapping

from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.cuts import OPTIMIZER, PARAMETERS, WHOLE, Cuts
from hpcdist.strategies.data.parts import Gatherer


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
    ) -> None:
        super().__init__(update)
        self.cuts, self.gather_cuts = cuts, cuts.gather
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
        """All-gather the parameters of model layer ``op.unit``."""
        layer = self._layer_of[op.unit]
        if layer not in self._cut_layers:
            self.cuts.gather(self.parameters, layer, WHOLE, OPTIMIZER)
        elif self._background is not None:
            self.start_gather(op)
            self._background.wait(layer)
        else:
            self.gather_cuts(self._with_shard(layer), layer, WHOLE, PARAMETERS)

    def _with_shard(self, layer: int) -> FlatStore:
        store, shard = self._whole.at(layer), self.cuts.cuts[layer][PARAMETERS]
        self.parameters.read(shard, store.range(shard))
        return store

    def free(self, op: Operation) -> None:
        """Free the gathered parameters of model layer ``op.unit`` after their use. Local."""
        self._whole.free(self._layer_of[op.unit])

    def refresh(self, op: Operation) -> None:
        """All-gather this rank's shard of layer ``op.unit`` from the parts that other ranks updated."""
        self.gather_cuts(self.parameters, self._layer_of[op.unit], PARAMETERS, OPTIMIZER)

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
