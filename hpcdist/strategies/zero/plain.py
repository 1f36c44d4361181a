"""The plain path of ZeRO: reduce-scatter of gradients, update of the own cut, all-gather of parameters.

As in Rajbhandari et al. (arXiv:1910.02054). A layer is cut over the replicas (`levels.Levels`), and each rank updates
its own cut with the sum of its gradients:

    stage 1   REDUCE a layer to its cuts once a step; update; GATHER the new cuts of each layer
    stage 2   REDUCE after each micro-batch, which frees the layer's gradients; update; GATHER
    stage 3   as stage 2, and GATHER a layer before each use, FREE it after that; nothing is gathered after the update

`PlainZero.reduce` sums and frees gradients, `PlainZero.gather` and `PlainZero.free` bring a layer of stage 3 and drop
it after its use; `ShardedUpdate` updates. `hpcdist.strategies.zero.exchange` adds what is optional, in layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, ShardedUpdateExchange
from hpcdist.strategies.pipeline.tied import tied_tensors
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees, ZeroConfig
from hpcdist.strategies.zero.levels import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Levels
from hpcdist.strategies.zero.offload import Offload


class PlainZero(ShardedUpdateExchange):
    """ZeRO with sharding ``degrees``. Collective over the data axis, but where it says local.

    ``parameters`` holds the whole of layers that stay gathered, and the shard of the others. ``of_base`` goes to
    `ShardedUpdateExchange`.
    """

    exact = False  # whether the sums of the norms do not depend on the cuts
    kept_cut = GRADIENTS  # what stays of gradients that are not kept whole

    def __init__(self, context: RankContext, degrees: ShardingDegrees, config: ZeroConfig, **of_base: Any) -> None:
        super().__init__(context, **of_base)
        self.degrees = self._degrees = degrees
        self._memory = memory = Offload(context, config)
        self.levels = levels = self._make_levels(degrees)
        # Shards in other memory than that of the model are read into it for each use, also where nothing is cut.
        self._is_transient = degrees.parameters > 1 or not memory.is_resident
        self.replicas_identical = not self._is_transient
        self._keeps_gradients = (
            (degrees.gradients == 1 or config.keep_gradients) and memory.is_resident and not context.every_microbatch
        )
        self.keeps_parameters = config.keep_parameters
        self.accumulates = self._keeps_gradients
        # Units with a tensor of which another pipeline rank has a copy: it is sent whole, so these units stay gathered.
        self._copied = {tie.unit for tie in tied_tensors(context.model, context.placed)}
        self._layer_at = {part: context.model.stages[unit].layer for unit, part in context.ranges.items()}
        cut = [unit for unit in context.units if self._is_cut(unit, config.persistent_below)]
        self._cut_layers = {context.model.stages[unit].layer for unit in cut}
        self.gathers: Mapping[int, Sequence[int]] = (
            {unit: [used for used in needs if used in cut] for unit, needs in context.model.needs.items()}
            if cut
            else {}
        )
        self._whole_parameters = self._transient_layers("parameters", cut, levels.first(WHOLE, PARAMETERS))
        whole = () if self._keeps_gradients else context.units
        self._whole_gradients = self._transient_layers("gradients", whole, levels.first(WHOLE, GRADIENTS))
        own = [cuts[OPTIMIZER] for cuts in levels.cuts.values()]
        self.sharded_update = ShardedUpdate(
            self._make_parameters(own),
            self._make_gradients(),
            memory.optimizer(own),
            own,
            levels.sharers,
            context.agree_algorithm,
            exactly=self.exact,
            tensor=context.tensor,
            experts=context.expert_norms,
        )
        self._added: set[int] = set()  # layers whose gradient shard holds a micro-batch of this step already
        self.handlers: Handlers = {
            Kind.REDUCE: self.reduce,
            Kind.GATHER: self.gather,
            Kind.FREE: self.free,
            **self.sharded_update.handlers,
        }

    def _make_levels(self, degrees: ShardingDegrees) -> Levels:
        """Return the cuts of all layers. Collective over the world."""
        return Levels(self.context, degrees)

    def _transient_layers(self, name: str, units: Sequence[int], over: Communicator | None) -> TransientLayers:
        """Return memory for whole layers of ``units``, which are exchanged ``over`` these ranks."""
        return TransientLayers(self.context, name, units, over)

    def _is_cut(self, unit: int, persistent_below: int) -> bool:
        """Whether the parameters of ``unit`` are gathered for each use, and not kept whole (local)."""
        size = sum(part.size for _, part in self.context.layout.within(self.context.ranges[unit]))
        return self._is_transient and size >= persistent_below and unit not in self._copied

    def _make_parameters(self, own: Sequence[Range]) -> FlatStore:
        """Return the parameters that the owners of the cuts ``own`` update."""
        if not self._cut_layers:  # only whole parameters are gathered in place, and may lie in memory of the node
            over = self.levels.first(PARAMETERS, OPTIMIZER)
            return self.context.store("parameters", allocate=self.context.for_replicas("parameters", over))
        parts = [cuts[PARAMETERS if layer in self._cut_layers else WHOLE] for layer, cuts in self.levels.cuts.items()]
        return self._memory.shards("parameters", parts)

    def _make_gradients(self) -> FlatStore:
        """Return the gradients that stay until the update: whole layers, or the shards."""
        if self._keeps_gradients:
            return self._gradients_of_all_layers(self.levels.first(WHOLE, OPTIMIZER) or self.levels.replicas)
        return self._memory.shards("gradients", [cuts[self.kept_cut] for cuts in self.levels.cuts.values()])

    def _gradients_of_all_layers(self, over: Communicator | None) -> FlatStore:
        """Return a store for the gradients of all layers, which are exchanged ``over`` these ranks."""
        return self.context.store("gradients", allocate=self.context.for_replicas("gradients", over))

    def plan(self) -> list[Operation]:
        """Return REDUCE per layer, AGREE on loss and norm, the update of the own cuts, and GATHER (local)."""
        ranges = list(reversed(self.context.ranges.values()))
        reduces = [Operation(Kind.REDUCE, range=part) for part in ranges]
        return [
            *reduces,
            *self._sums_after_reduces(ranges),
            Operation(Kind.AGREE),
            *self.sharded_update.plan(),
            *self._gathers_after_update(),
        ]

    def _sums_after_reduces(self, ranges: Sequence[Range]) -> list[Operation]:
        """Return the sums that follow all REDUCE once a step: none (local)."""
        return []

    def _gathers_after_update(self) -> list[Operation]:
        """Return GATHER of the layers that are kept whole (local)."""
        layers = {unit: self.context.model.stages[unit].layer for unit in self.context.units}
        whole = [unit for unit, layer in layers.items() if layer not in self._cut_layers]
        return [Operation(Kind.GATHER, unit=unit) for unit in whole if self._degrees.optimizer > 1]

    def begin(self, operations: Sequence[Operation]) -> None:
        """Reset the sums of gradients (local)."""
        self._added.clear()  # also where the step before was given up

    def reduce(self, op: Operation) -> None:
        """Reduce-scatter the gradients of a layer to the shards, or to the own cuts where gradients are kept whole."""
        store = self.gradients_at(layer := self._layer_of(op))
        self._reduce_scatter(store, layer, WHOLE, OPTIMIZER if self.accumulates else GRADIENTS)
        self._keep_shard(layer)

    def _reduce_scatter(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Sum cut ``start`` of a layer over the ranks to its cut ``stop``. Collective."""
        self.levels.reduce(store, layer, start, stop)

    def _keep_shard(self, layer: int) -> None:
        """Add this rank's shard of a layer to those of earlier micro-batches, and free the layer (local)."""
        if self._keeps_gradients:  # reduced in place, in the store that the update reads
            return
        own, store = self.levels.cuts[layer][self.kept_cut], self.gradients_at(layer)
        (self.gradients.add if layer in self._added else self.gradients.write)(own, store.range(own))
        self._added.add(layer)
        self._whole_gradients.free(layer)

    def gather(self, op: Operation) -> None:
        """All-gather a layer: before a use from the shards; where it is kept whole, from the new cuts."""
        layer = self.context.model.stages[op.unit].layer
        if layer in self._cut_layers:
            self._all_gather(self._with_own_shard(layer), layer, WHOLE, PARAMETERS)
        else:
            self.levels.gather(self.parameters, layer, WHOLE, OPTIMIZER)

    def _with_own_shard(self, layer: int) -> FlatStore:
        """Return memory for a whole layer, with the own shard in it (local)."""
        store, own = self._whole_parameters.at(layer), self.levels.cuts[layer][PARAMETERS]
        self.parameters.read(own, store.range(own))
        return store

    def _all_gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Fill cut ``start`` of a layer that is not kept whole from its cuts ``stop``. Collective."""
        self.levels.gather(store, layer, start, stop)

    def free(self, op: Operation) -> None:
        """Free the memory of a gathered layer after its use: stage 3 (local)."""
        self._whole_parameters.free(self.context.model.stages[op.unit].layer)

    def _layer_of(self, op: Operation) -> int:
        return self._layer_at[op.range] if op.range is not None else self.context.model.stages[op.unit].layer

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store of the whole layer: one that is cut is there between GATHER and FREE only."""
        return self._whole_parameters.at(layer) if layer in self._cut_layers else self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store of the whole layer: where gradients are cut, it is there until its REDUCE."""
        return self.gradients if self._keeps_gradients else self._whole_gradients.at(layer)

    def spread(self) -> None:
        """Send the updated cuts to all ranks that keep them. Collective."""
        for op in self._gathers_after_update():
            self.handlers[op.kind](op)

    def close(self) -> None:
        """Release the communicators of the levels."""
        self.levels.free()
