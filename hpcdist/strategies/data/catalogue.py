"""Catalogue of data-parallel strategies in lock-step: which reducer, gatherer and update each strategy consists of.

    strategy                reducer                          gatherer
    allreduce               Sum                              Gatherer: every rank updates everything
    zero1                   Scatter, once per step           CutGatherer: after the update
    zero2                   Scatter, after each micro-batch  CutGatherer: after the update
    zero3                   Scatter, after each micro-batch  CutGatherer: before each use
    run.logical_shards      TreeSum, TreeScatter             as above
    zero.shared_parameters  as above                         NodeShared
    communication.delayed   Sum, one step late (`DelayedExchange`)
    communication.compression  CodedSum, or Scatter with CompressedSums; Dgc and OneBit replace the momentum
    compression.parameters  as above                         CutGatherer with CompressedGathers

ZeRO (Rajbhandari et al., arXiv:1910.02054) cuts every layer over the p data ranks. Each rank updates one cut with the
summed gradients of this cut. ZeRO's stages, and similar methods, differ only in the sharding degrees d_p | d_g | d_o of
parameters, gradients and optimizer state. Each degree divides the next, and d_o divides p (see `cuts`):

    zero1   (1, 1, p)    zero2   (1, p, p)    zero3   (p, p, p)
    MiCS (Zhang et al., arXiv:2205.00119)                     (d, d, d)   d ranks hold a model; the others are replicas
    hpZ of ZeRO++ (Wang et al., arXiv:2306.10209)             (d, p, p)   gathers stay among the d ranks of a node
    hybrid sharding of FSDP (Zhao et al., arXiv:2304.11277)   (d, d, d)
    AMSP (Chen et al., arXiv:2311.00257)                      any

With Psi bytes of parameters on this rank and m micro-batches per step, each rank sends on the ring, in bytes,

    gradients    m Psi (1 - 1/d_g)       after each micro-batch if d_g > 1; then they are freed
                 Psi (1/d_g - 1/d_o)     once per step, to the cuts of the optimizer
                 2 Psi/d_o (1 - d_o/p)   once per step, over the p/d_o owners of the same cut
    parameters   Psi (1/d_p - 1/d_o)     once per step, the updated cuts to all ranks that keep them
                 2 m Psi (1 - 1/d_p)     for each use, once forward and once backward; consecutive uses of a layer are
                                         one use; up to 3 m if a pipeline computes forward passes again

so zero1 sends 2 Psi (p-1)/p, zero2 (1 + m) and zero3 3 m times Psi (p-1)/p. Two keys of `ZeroConfig` send fewer bytes
for Psi more memory each: ``zero.keep_gradients`` reduces once per step, ``zero.keep_parameters`` gathers once per step.
With both keys, zero3 sends as many bytes as zero1. The state takes Psi/d_p + Psi/d_g + K Psi/d_o bytes, with K = 2 for
Adam. If d_p or d_g is above 1, one or two whole layers are also in memory.

A layer with tied tensors stays gathered from its first use in a micro-batch to its last. A layer of fewer than
``zero.persistent_below`` elements always stays gathered. With S bytes per layer, a rank sends S (1 - 1/d_o) after the
update, and nothing for each use. A layer with a tensor that is tied to another pipeline rank also stays gathered.

Path of a gradient after the backward pass. `operation_list.insert_exchange` places the REDUCE. With the ring algorithm
(zero1), and with compressed messages (zero3):

    zero1                                                    zero3, compressed
    strategies/schedule/executor.py  `Executor._reduce`      strategies/schedule/executor.py  `Executor._reduce`
    strategies/data/exchange.py      `DataExchange`          strategies/data/exchange.py      `DataExchange`
    strategies/data/reducers.py      `Scatter.reduce`        strategies/data/reducers.py      `Scatter.reduce`
    strategies/data/cuts.py          `Cuts.sum`              strategies/data/coded_zero.py    `CompressedSums.sum`
    collectives/sharded.py           `Sharding`              strategies/compressed/reduction.py  `QuantisedReduction`
    collectives/algorithms/ring.py   `reduce_scatter`        comm/communicator.py             `Communicator`
    comm/communicator.py             `Communicator`

In both, the subclass `MpiCommunicator` then calls mpi4py, and `core.sharded_update` updates this rank's cut. The
parameters come back by the operation GATHER: `CutGatherer.gather`, `Cuts.gather`, and the all-gather of the ring, also
if gradients are compressed; `CompressedGathers` replaces `Cuts` only with ``compression.parameters``. Under zero1,
GATHER follows the update; under zero3, it precedes each use.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.registry import Compression
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Traits
from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.core.logical_shards import ALGORITHM, LogicalShards
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, counted
from hpcdist.strategies.core.tied import tied_tensors
from hpcdist.strategies.data.coded_allreduce import CodedSum, Dgc
from hpcdist.strategies.data.coded_zero import CompressedGathers, CompressedSums
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.data.cuts import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Cuts
from hpcdist.strategies.data.delayed import DelayedExchange
from hpcdist.strategies.data.exchange import DataExchange, saved_shares
from hpcdist.strategies.data.gatherers import CutGatherer, Gatherer, NodeParameters, NodeShared
from hpcdist.strategies.data.offload import Offload
from hpcdist.strategies.data.onebit import FROZEN, OneBit
from hpcdist.strategies.data.reducers import Reducer, Scatter, Sum, TreeScatter, TreeSum

NO_COMPRESSION: Final = Compression("none", CompressionConfig(), 0)


def allreduce(context: RankContext, shards: LogicalShards | None = None) -> DataExchange:
    """Return the strategy "allreduce", which sums gradients over all data ranks. Collective over the data axis.

    ``shards``: logical shards whose gradients are summed in a fixed order, or None for no fixed order.
    """
    background = _background(context)
    update = _whole_update(context, background, exactly=shards is not None)
    reducer = Sum(context, update, background) if shards is None else TreeSum(context, update, shards)
    return _replicated(context, update, reducer, background=background, shards=shards)


def delayed(context: RankContext) -> DelayedExchange:
    """Return the strategy that allreduces gradients and applies them one step late. Collective over the data axis."""
    background = _background(context)
    update = _whole_update(context, background)
    return DelayedExchange(context, update, _gradients(context, background), background)


def compressed(context: RankContext, compression: Compression) -> DataExchange:
    """Return the strategy that allreduces gradients with ``compression``. Collective over the data axis."""
    name, config, seed = compression.name, compression.config, compression.seed
    if name == "dgc":
        return dgc(context, config)
    if name == "onebit":
        return onebit(context, config, seed)
    update = _whole_update(context, None)
    return _replicated(context, update, CodedSum(context, update, name, config, seed))


def dgc(context: RankContext, config: CompressionConfig, *, masks_velocity: bool = True) -> DataExchange:
    """Return the strategy "dgc" (deep gradient compression). Collective over the data axis."""
    optimizer = replace(context.optimizer, momentum=0.0, nesterov=False)  # the compressor has the momentum
    update = _whole_update(replace(context, optimizer=optimizer), None)
    reducer = Dgc(context, update, config, masks_velocity=masks_velocity)
    return _replicated(context, update, reducer)


def onebit(context: RankContext, config: CompressionConfig, seed: int = 0) -> DataExchange:
    """Return the strategy "onebit" (1-bit Adam). Collective over the data axis.

    ``config``: compression options. ``seed``: seed of the compressor's random numbers.
    """
    optimizer = replace(context.optimizer, name="sgd", momentum=0.0)  # adds the decay and the learning rate
    update = _whole_update(replace(context, optimizer=optimizer), None)
    reducer = OneBit(context, update, config, seed)
    return _replicated(context, update, reducer, restores=(FROZEN,))


def _background(context: RankContext) -> BackgroundCollectives | None:
    overlaps = context.overlap != "none" and context.data.size > 1
    return BackgroundCollectives(context.data, context.overlap) if overlaps else None


def _gradients(context: RankContext, background: BackgroundCollectives | None) -> FlatStore:
    over = context.data if background is None else background.over
    return context.store("gradients", allocate=context.for_replicas("gradients", over))


def _whole_update(
    context: RankContext, background: BackgroundCollectives | None, *, exactly: bool = False
) -> ShardedUpdate:
    gradients = _gradients(context, background)
    return ShardedUpdate(
        context.store("parameters"),
        gradients,
        context.build_optimizer(context.parts),
        context.parts,
        None,
        context.agree_algorithm,
        exactly=exactly,
        tensor=context.tensor,
        experts=context.expert_norms,
    )


def _replicated(
    context: RankContext,
    update: ShardedUpdate,
    reducer: Reducer,
    *,
    background: BackgroundCollectives | None = None,
    shards: LogicalShards | None = None,
    restores: Collection[str] = (),
) -> DataExchange:
    return DataExchange(
        context,
        _traits(context, shards, identical=True, accumulates=shards is None, whole_state=True, restores=restores),
        update,
        reducer,
        Gatherer(update),
        saved_shares(context),
        background=background,
        shards=shards,
    )


def _traits(context: RankContext, shards: LogicalShards | None, **traits: Any) -> Traits:
    if shards is None:
        return Traits(algorithm=context.algorithm, **traits)
    sums = f"{shards.count} logical shards, arithmetic {shards.arithmetic}"
    return Traits(algorithm=ALGORITHM, sums=sums, **traits)


def zero(
    context: RankContext,
    stage: int,
    config: ZeroConfig = ZeroConfig(),  # noqa: B008 - frozen
    shards: LogicalShards | None = None,
    compression: Compression = NO_COMPRESSION,
) -> DataExchange:
    """Return the ZeRO strategy of ``stage`` 1, 2 or 3, or raise ConfigurationError. Collective over the world.

    ``shards``: logical shards whose gradients are summed in a fixed order, or None for any order.
    """
    return _Zero(context, config.degrees(stage, context.data.size), config, shards, compression).exchange()


class _Zero:
    def __init__(
        self,
        context: RankContext,
        degrees: ShardingDegrees,
        config: ZeroConfig,
        shards: LogicalShards | None,
        compression: Compression,
    ) -> None:
        self.context, self.degrees, self.config = context, degrees, config
        self.shards, self.compression = shards, compression
        self.memory = Offload(context, config)
        self.cuts = Cuts(context, degrees)
        self.background = self._background()
        # Shards that are offloaded are read into memory for each use, even if nothing is cut.
        self.is_transient = degrees.parameters > 1 or not self.memory.is_resident
        self.cut_units = self._cut_units()
        self.keeps_gradients = (
            (degrees.gradients == 1 or config.keep_gradients)
            and self.memory.is_resident
            and not context.every_microbatch
        )

    def exchange(self) -> DataExchange:
        context, cuts = self.context, self.cuts
        whole_parameters = self._transient("parameters", self.cut_units, PARAMETERS)
        whole_gradients = None if self.keeps_gradients else self._transient("gradients", context.units, GRADIENTS)
        owned = [layer_cuts[OPTIMIZER] for layer_cuts in cuts.cuts.values()]
        make_gatherer, parameters = self._parameters(owned, whole_parameters)
        update = ShardedUpdate(
            parameters,
            self._gradients(),
            self.memory.optimizer(owned),
            owned,
            cuts.sharers,
            context.agree_algorithm,
            exactly=self.shards is not None,
            tensor=context.tensor,
            experts=context.expert_norms,
        )
        saved = counted(context.layout, cuts.of_replicas(update.parts), context.tensor)
        reducer = self._reducer(update, whole_gradients)
        return DataExchange(
            context,
            self._traits(),
            update,
            reducer,
            make_gatherer(update),
            saved,
            background=self.background,
            shards=self.shards,
        )

    def _background(self) -> BackgroundCollectives | None:
        context = self.context
        if context.overlap != "none" and context.data.size > 1 and not self.cuts.at_once:
            raise ConfigurationError(
                f"communication.overlap = {context.overlap!r} is not supported for ZeRO with several "
                "sharding degrees: collectives overlap computation only if every sharded state is divided over all "
                f"{context.data.size} data ranks; set zero.parameters, zero.gradients and zero.optimizer to 0, or "
                "communication.overlap = 'none'"
            )
        # Before any store: memory that background collectives use is shared over their communicator.
        return _background(context)

    def _cut_units(self) -> list[int]:
        # Indices of the model stages whose parameters are gathered before each use.
        context = self.context
        copied = {tie.unit for tie in tied_tensors(context.model, context.placed)}  # sent whole, so kept whole
        ranges = context.ranges if self.is_transient else {}
        sizes = {unit: sum(part.size for _, part in context.layout.within(whole)) for unit, whole in ranges.items()}
        return [unit for unit, size in sizes.items() if size >= self.config.persistent_below and unit not in copied]

    def _traits(self) -> Traits:
        context, degrees, needs = self.context, self.degrees, self.context.model.needs
        cut = set(self.cut_units)
        if self.shards is not None:  # each REDUCE is over all replicas
            degrees = replace(degrees, gradients=context.data.size)
        return _traits(
            context,
            self.shards,
            identical=not self.is_transient,
            accumulates=self.keeps_gradients and self.shards is None,
            degrees=degrees,
            gathers={unit: [used for used in uses if used in cut] for unit, uses in needs.items()} if cut else {},
            keeps_parameters=self.config.keep_parameters,
            ahead=self.config.prefetch if self.background is not None else 0,
        )

    def _transient(self, category: str, units: Sequence[int], cut: int) -> TransientLayers:
        context, background = self.context, self.background
        if background is not None and (category == "gradients" or self.config.prefetch):
            return TransientLayers(context, category, units, background.over, background.drain)
        return TransientLayers(context, category, units, self.cuts.first(WHOLE, cut))

    def _parameters(
        self, owned: list[Range], whole: TransientLayers
    ) -> tuple[Callable[[ShardedUpdate], Gatherer], FlatStore]:
        context, cuts = self.context, self.cuts
        if self.config.shared_parameters:
            node = NodeParameters(context, [*map(cuts.of_all, cuts.cuts)])
            return (lambda update: NodeShared(update, cuts, node)), node.front
        parameters = self._shards()
        name, across_nodes = self.compression.config.parameters, self.compression.config.across_nodes
        compressed = decoded = None
        if name != "none" and self.degrees.parameters == 1 < context.data.size:
            raise ConfigurationError(
                f"compression.parameters = {name!r} with zero.parameters = 1: each of the {context.data.size} data "
                "ranks keeps all parameters, and compression would round them; set zero.parameters to 0 or to the "
                "number of ranks of a node, or compression.parameters = 'none'"
            )
        if name != "none":
            compressed = CompressedGathers(context, cuts, name, across_nodes=across_nodes)
            if compressed.keeps_decoded and context.working is None:
                decoded, parameters = parameters, context.store("parameters", owned)  # owners update exact weights
        make = partial(
            CutGatherer,
            context,
            cuts=cuts,
            cut_units=self.cut_units,
            whole=whole,
            background=self.background if self.config.prefetch else None,
            compressed=compressed,
            decoded=decoded,
        )
        return make, parameters

    def _shards(self) -> FlatStore:
        context, cuts = self.context, self.cuts
        if not self.cut_units:  # only whole parameters are gathered in place, so the node's memory may hold them
            over = cuts.first(PARAMETERS, OPTIMIZER)
            return context.store("parameters", allocate=context.for_replicas("parameters", over))
        cut_layers = {context.model.stages[unit].layer for unit in self.cut_units}
        parts = [rows[PARAMETERS if layer in cut_layers else WHOLE] for layer, rows in cuts.cuts.items()]
        return self.memory.shards("parameters", parts)

    def _gradients(self) -> FlatStore:
        if self.keeps_gradients:
            over = self.cuts.first(WHOLE, OPTIMIZER) or self.cuts.replicas
            over = over if self.background is None else self.background.over
            return self.context.store("gradients", allocate=self.context.for_replicas("gradients", over))
        # A tree ends at the owners of the optimizer's cuts, whatever the degree of gradients.
        cut = GRADIENTS if self.shards is None else OPTIMIZER
        return self.memory.shards("gradients", [rows[cut] for rows in self.cuts.cuts.values()])

    def _reducer(self, update: ShardedUpdate, whole: TransientLayers | None) -> Reducer:
        if self.shards is not None:
            return TreeScatter(self.context, update, self.cuts, whole, self.shards)
        compressed = None
        if self.compression.name != "none":
            name, config, seed = self.compression.name, self.compression.config, self.compression.seed
            compressed = CompressedSums(self.context, update, self.cuts, name, config, seed)
        return Scatter(self.context, update, self.cuts, whole, self.background, compressed)
