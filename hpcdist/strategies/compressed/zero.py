"""ZeRO with compressed messages, as in ZeRO++ (Wang et al., arXiv:2306.10209): gradients, parameters, or both.

    qgZ    gradients travel as payloads to those who own them: communication.compression, `CompressedReduceScatters`
    qwZ    parameters that are cut are gathered as payloads: compression.parameters, `CompressedGathers`
    hpZ    gathers within a node: zero.parameters = its data ranks, see `hpcdist.strategies.zero.exchange`

Any of them goes without the others. Gradients are summed as float32 and in unscaled units, as those of
`hpcdist.strategies.compressed.exchange` are, also where a level of them is dense. Error feedback takes 4 bytes for
each parameter of the stages of a rank, 8 where its working copies are 16-bit floats, whatever is cut: the residuals
of what it sends to all others. ZeRO++ has none; without it memory is that of ZeRO.

Levels that carry payloads: all of them or, across nodes only, those between the nodes. Sums and gathers within a node
then are dense: a level whose ranks share a node has fast links. A level that has several ranks of several nodes is
neither, and is refused: with the ranks of a node as one of the degrees the levels on either side of it are one or the
other.

qgZ: payloads go straight to the owner of a cut, who adds them to its own gradients in float32. The sum is not
encoded: in ZeRO nobody else gets it. So one error of the compressor for each level of the cuts, and with p ranks, c
the bytes of a payload of one value, (p-1)/p c n bytes of n values from each rank where a layer is cut in one step.
Sparse payloads go the same way: each has indices of its own cut, and they are never gathered. Where several ranks own
the same cut, its sum over them is that of an allreduce of compressed gradients
(`hpcdist.strategies.compressed.reduction`).

Residuals (`StepResiduals`) of gradients that are summed after each micro-batch: what one micro-batch leaves is added
to the next one's. A step that is given up must not have happened, so the copy that brings residuals back is that of
before its first micro-batch: 4 bytes for an element, and 4 more where steps may be given up. Every rank has residuals
for all of its stages, whatever is cut: it encodes the cuts of all others. A rank never encodes what it owns, nor what
travels as it is. Residuals of such places come of a checkpoint whose cuts were others. They are owed all the same:
they are added to the gradient, and are paid.

qwZ: every owner encodes its cut, tensor by tensor, and everybody computes with what is decoded, the owner too:
replicas have the same weights to the bit. What is updated, and what a checkpoint keeps, are the weights of the
owners, which nobody rounds. An evaluation in training gathers as a step does, so it sees the weights that training
computes with; one of a checkpoint sees the exact ones. Rounding is to nearest, without feedback: the same weights
give the same bits. A layer is encoded once for each level that carries payloads: at one level n values on p ranks
take (p-1)/p c n bytes from each rank. Where shards are of more than the own cuts (hpZ) they are brought together once
a step, and what is decoded is kept; in float32 that takes memory beside the own cuts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.optim.update import kernels
from hpcdist.strategies.compressed.config import QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.error_feedback import (
    ErrorFeedbackExchange,
    Residuals,
    with_loss_scale,
    without_loss_scale,
)
from hpcdist.strategies.compressed.reduction import (
    CompressedReduction,
    GatheredReduction,
    GradientCoder,
    QuantisedReduction,
)
from hpcdist.strategies.compressed.registry import compressor
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.zero.config import ZeroConfig
from hpcdist.strategies.zero.exchange import ZeroExchange
from hpcdist.strategies.zero.levels import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Levels

FLOAT32: Final = np.dtype(np.float32)
REPLICAS: Final = OPTIMIZER  # the index, behind those of the levels, of those who own the same cuts
_NAMES: Final = {
    WHOLE: "zero.parameters",
    PARAMETERS: "zero.gradients within those of zero.parameters",
    GRADIENTS: "zero.optimizer within those of zero.gradients",
    REPLICAS: "the replicas of zero.optimizer",
}


def compressed_levels(data: Communicator, levels: Levels, *, across_nodes: bool) -> list[bool]:
    """Return whether each level and, last, the replicas exchange payloads. Collective over ``data``.

    Raises ConfigurationError, on every rank, where a level is neither within nodes nor between them.
    """
    comms = [*levels.comms, levels.replicas]
    if not across_nodes:
        return [comm is not None for comm in comms]
    own = [_kind(comm) for comm in comms]
    for index, kinds in enumerate(zip(*data.allgather_object(own), strict=True)):
        if "mixed" in kinds or len(set(kinds)) > 1:
            raise ConfigurationError(
                f"compression.across_nodes = true, but the ranks of {_NAMES[index]} are neither all on one node nor "
                "all on nodes of their own: set zero.parameters or zero.gradients to the data ranks of a node, so that "
                "one level lies within nodes and the next between them, or compression.across_nodes = false"
            )
    return [kind == "between" for kind in own]


def _kind(comm: Communicator | None) -> str:
    """Return whether the ranks of a level share a node, are on nodes of their own, or both. Collective."""
    if comm is None:
        return "alone"
    nodes = comm.nodes()
    if nodes.count == 1:
        return "within"
    return "between" if all(len(members) == 1 for members in nodes.members) else "mixed"


def float32_scratch(store: FlatStore, layer: int, cut: int, levels: Levels) -> FlatStore:
    """Return float32 memory for cut ``cut`` of a layer of the 16-bit ``store``; the next call takes it back (local)."""
    like = store.array
    return FlatStore(
        store.layout,
        FLOAT32,
        levels.cuts[layer][cut],
        allocate=lambda size, dtype: scratch("compressed.widened", size, dtype, like),
    )


class StepResiduals(Residuals):
    """Residuals of ``layers``, ranges of the flat space by layer; ``plain`` are those that are not encoded here.

    All of it is local.
    """

    def __init__(
        self,
        context: RankContext,
        layers: Mapping[int, Range],
        plain: Mapping[int, Sequence[Range]],
        *,
        can_roll_back: bool,
    ) -> None:
        parts = sorted(layers.values(), key=lambda part: part.start)
        super().__init__(context, context.data.rank, context.data.size, parts, can_roll_back=False)
        self._layers, self._plain = layers, plain
        self._saved: FlatStore | None = None
        if can_roll_back:
            self._saved = FlatStore(
                context.layout, FLOAT32, parts, on=context.on, category="optimizer", ledger=context.ledger
            )
        self._open: set[int] = set()  # layers that were encoded in this step
        self._due: set[int] = set()  # layers with residuals that may be owed in plain places
        self._paid: set[int] = set()  # of them in this step

    @property
    def are_owed(self) -> bool:
        """Whether residuals may have to be added to gradients that are not encoded."""
        return bool(self._due)

    def open(self, layer: int, gradients: FlatStore) -> None:
        """Begin to encode the float32 ``gradients`` of a layer; residuals of its plain parts are added to them."""
        self.feedback.keep()  # what was encoded of it for an earlier micro-batch is done with
        if layer not in self._open:
            self._open.add(layer)
            if self._saved is not None:
                part = self._layers[layer]
                self._saved.range(part)[...] = self._store.range(part)
        if layer in self._due:
            self._due.discard(layer)
            self._paid.add(layer)
            self._pay(layer, gradients)

    def _pay(self, layer: int, gradients: FlatStore) -> None:
        for part in self._plain[layer]:
            residual = self._store.range(part)
            if residual.any():  # else the bits of the gradient stay as they are
                total = gradients.range(part)
                total += residual
                residual[...] = 0

    def keep(self) -> None:
        """End a step that is applied."""
        self.feedback.keep()
        self._open.clear()
        self._paid.clear()

    def settle(self) -> None:
        """Restore, where it can be, the residuals of before a step that was given up, if there was one."""
        if self._saved is not None:
            for layer in self._open:
                part = self._layers[layer]
                self._store.range(part)[...] = self._saved.range(part)
            self._due |= self._paid
        self.keep()

    def restored(self) -> None:
        """End a restore: residuals may be of another number of ranks, and of other cuts."""
        super().restored()
        self._due = set(self._layers)


_NEAREST = CompressionConfig(error_feedback=True)  # how the catalogue is asked for rounding to nearest


class CompressedGathers:
    """All-gathers along ``levels``, compressed by ``name``. Construction is collective over the data axis."""

    def __init__(self, context: RankContext, levels: Levels, name: str, *, across_nodes: bool) -> None:
        self._levels = levels
        carries = compressed_levels(context.data, levels, across_nodes=across_nodes)
        coder = GradientCoder(context.layout, compressor(name, _NEAREST), 0, 0)
        self._reductions = {
            level: QuantisedReduction(comm, coder)
            for level, comm in enumerate(levels.comms)
            if comm is not None and carries[level]
        }
        # Whether shards hold what is decoded, and not the weights of their owners.
        self.keeps_decoded = any(level in self._reductions for level in range(PARAMETERS, OPTIMIZER))

    def gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Fill cut ``start`` of a layer from the cuts ``stop`` of the ranks that have them. Collective over them."""
        for level in reversed(range(start, stop)):
            if level in self._reductions:
                self._decode(store, layer, level)
            else:
                self._levels.gather(store, layer, level, level + 1)

    def _decode(self, store: FlatStore, layer: int, level: int) -> None:
        part, own = (self._levels.cuts[layer][cut] for cut in (level, level + 1))
        if not part:
            return
        values = store
        if store.dtype != FLOAT32:
            values = float32_scratch(store, layer, level, self._levels)
            kernels.widen(store.range(own), values.range(own))
        self._reductions[level].all_gather(values.range(part), part, self._levels.shares_at(layer, level))
        if values is not store:
            for _, where in store.layout.within(part):
                kernels.round_into(values.range(where), store.range(where))


_ROUND = 1 << 24  # steps are numbered below it, and how often a layer was summed before in the same step above


class CompressedReduceScatters:
    """Compressed reduce-scatters along ``levels``. Collective over the data axis, but where it says local."""

    def __init__(self, context: RankContext, levels: Levels, name: str, config: CompressionConfig, seed: int) -> None:
        self._levels, self._step = levels, 0
        self._coded = compressed_levels(context.data, levels, across_nodes=config.across_nodes)
        # Payloads of SUMMED compressors are decoded as those of rank 0 on all ranks.
        self.coder = GradientCoder(
            context.layout, compressor(name, config), seed, 0 if name in SUMMED else context.data.rank
        )
        self._reductions = {
            level: QuantisedReduction(comm, self.coder)
            for level, comm in enumerate(levels.comms)
            if comm is not None and self._coded[level]
        }
        self._of_replicas: CompressedReduction | None = None
        if levels.replicas is not None and self._coded[REPLICAS]:
            self._of_replicas = (QuantisedReduction if name in QUANTISED else GatheredReduction)(
                levels.replicas, self.coder
            )
        self._summed = Counter[int]()  # by layer, in this step
        self.residuals: StepResiduals | None = None
        if config.error_feedback:
            whole = {layer: cuts[WHOLE] for layer, cuts in levels.cuts.items()}
            plain = {layer: self._plain(cuts) for layer, cuts in levels.cuts.items()}
            self.residuals = StepResiduals(context, whole, plain, can_roll_back=context.working is not None)
            self.coder.feedback = self.residuals.feedback

    def _plain(self, cuts: Sequence[Range]) -> list[Range]:
        """Return the ranges of a layer that this rank never encodes (local)."""
        parts = [cuts[OPTIMIZER]] if self._of_replicas is None else []
        for level in range(OPTIMIZER):
            if level not in self._reductions:
                outer, inner = cuts[level], cuts[level + 1]
                parts += [Range(outer.start, inner.start), Range(inner.stop, outer.stop)]
        return [part for part in parts if part]

    def begin(self, step: int) -> None:
        """Begin the step that makes update number ``step`` (local)."""
        self._step = self.coder.step = step
        self._summed.clear()

    def sum(self, store: FlatStore, layer: int, start: int, stop: int, loss_scale: float) -> None:
        """Sum cut ``start`` of a layer of ``store`` to its cut ``stop``, the last one over the replicas too, in place.

        What ``store`` holds of cut ``start`` beyond cut ``stop`` is undefined afterwards.
        """
        part, own = self._levels.cuts[layer][start], self._levels.cuts[layer][stop]
        values = store
        if store.dtype != FLOAT32:
            values = float32_scratch(store, layer, start, self._levels)
            without_loss_scale(store.range(part), loss_scale, values.array)
        self._sum(values, layer, start, stop)
        if values is not store:
            with_loss_scale(values.range(own), store.range(own), loss_scale)

    def _sum(self, values: FlatStore, layer: int, start: int, stop: int) -> None:
        cuts = self._levels.cuts[layer]
        if start == WHOLE:
            self.coder.step = self._step + _ROUND * self._summed[layer]
            self._summed[layer] += 1
            if self.residuals is not None:
                self.residuals.open(layer, values)
        for level in range(start, stop):
            part = cuts[level]
            if level not in self._reductions:
                self._levels.reduce(values, layer, level, level + 1)
            elif part:
                self._reductions[level].reduce_scatter(values.range(part), part, self._levels.shares_at(layer, level))
        own = cuts[OPTIMIZER]
        if stop == OPTIMIZER and self._of_replicas is None:
            self._levels.sum_replicas(values, layer)
        elif stop == OPTIMIZER and self._of_replicas is not None and own:
            self._of_replicas.allreduce(values.range(own), own)


class CompressedZero(ErrorFeedbackExchange, ZeroExchange):
    """ZeRO with gradients compressed by ``name``, "none" for not at all. Collective as ZeRO is.

    ``config.parameters`` says how those that are cut are gathered. ``seed`` is that of the run.
    """

    def __init__(
        self, context: RankContext, stage: int, zero: ZeroConfig, name: str, config: CompressionConfig, seed: int
    ) -> None:
        self._shards: FlatStore | None = None  # what is decoded, where owners step their cuts elsewhere
        self._asked = config
        self.gathered: CompressedGathers | None = None
        self._is_stale = False  # shards are not yet what is decoded of the own cuts
        super().__init__(context, stage, zero)
        self.sums = None if name == "none" else CompressedReduceScatters(context, self.levels, name, config, seed)
        self.residuals = self._fed_back = None if self.sums is None else self.sums.residuals

    def _make_parameters(self, own: Sequence[Range]) -> FlatStore:
        """Return the parameters that owners update: the own cuts apart, where shards are decoded copies."""
        parameters = super()._make_parameters(own)
        if self._asked.parameters == "none":
            return parameters
        if self._degrees.parameters == 1 < self.context.data.size:
            raise ConfigurationError(
                f"compression.parameters = {self._asked.parameters!r} with parameters that each of the "
                f"{self.context.data.size} data ranks keeps whole (zero.parameters = 1): what is kept would be "
                "rounded; set zero.parameters to 0 or to the ranks of a node, or compression.parameters = 'none'"
            )
        across = self._asked.across_nodes
        self.gathered = CompressedGathers(self.context, self.levels, self._asked.parameters, across_nodes=across)
        if not self.gathered.keeps_decoded or self.context.working is not None:
            return parameters
        self._shards = parameters
        return self.context.store("parameters", own)

    @property
    def parameters(self) -> FlatStore:
        """Parameters that this rank computes with, or gathers: the decoded ones where the weights are elsewhere."""
        return super().parameters if self._shards is None else self._shards

    @property
    def weights(self) -> FlatStore:
        """The parameters that a checkpoint keeps: never a rounded copy."""
        return super().weights if self._shards is None else self.sharded_update.parameters

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        if self.sums is None or self.sharded_update.optimizer.count < self._asked.warmup_steps:
            return False
        return self.context.data.size > 1 or (self._fed_back is not None and self._fed_back.are_owed)

    def begin(self, operations: Sequence[Operation]) -> None:
        """Undo a step that was given up; after `load_initial` or `restore`, refresh the decoded shards."""
        self._give_up()
        if self.sums is not None:
            self.sums.begin(self.sharded_update.optimizer.count)
        if self._is_stale:
            self._is_stale = False
            self.spread()
        super().begin(operations)

    def _reduce_scatter(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        if self.sums is None or not (self._is_open or self.is_compressing):
            super()._reduce_scatter(store, layer, start, stop)
            return
        self._is_open = True  # to the end of the step
        self.sums.sum(store, layer, start, stop, self._loss_scale)

    def _all_gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        if self.gathered is None:
            super()._all_gather(store, layer, start, stop)
        else:
            self.gathered.gather(store, layer, start, stop)

    def gather(self, op: Operation) -> None:
        """All-gather a layer; one that is kept whole is gathered from the new cuts, uncompressed."""
        layer = self.context.model.stages[op.unit].layer
        if layer not in self._cut_layers:
            self._fetch(layer)
        super().gather(op)

    def refresh(self, op: Operation) -> None:
        """Gather the shard of a layer from the new cuts, decoded."""
        self._fetch(self.context.model.stages[op.unit].layer)
        super().refresh(op)

    def _fetch(self, layer: int) -> None:
        """Copy the updated own cut of a layer to where the layer, or its shard, is kept (local)."""
        if self._shards is not None:
            own = self.levels.cuts[layer][OPTIMIZER]
            self._shards.range(own)[...] = self.sharded_update.parameters.range(own)

    def load_initial(self, initial: FlatStore) -> None:
        """Load the initial values (local)."""
        super().load_initial(initial)
        self._is_stale = self.gathered is not None and self.gathered.keeps_decoded

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there. Collective over the data axis."""
        super().restore(state)
        self._is_stale = self._shards is not None  # working copies were made anew, and brought together
