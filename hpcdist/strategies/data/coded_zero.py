"""Compressed messages of ZeRO, with error feedback: ZeRO++ (Wang et al., arXiv:2306.10209).

    qgZ    gradients travel as payloads to the ranks that own them: communication.compression, `CompressedSums`
    qwZ    cut parameters are gathered as payloads: compression.parameters, `CompressedGathers`
    hpZ    gathers within a node: zero.parameters = the data ranks of a node, see `catalogue`

Gradients are summed as float32 without loss scale. If a step is given up, the previous step's residuals are restored.
On one data rank nothing is compressed: the residuals of a checkpoint are added to the gradients in full.

Next on the path of a gradient: `hpcdist.strategies.compressed.reduction`, which encodes, sends and adds the payloads.

qgZ: an owner adds the payloads to its own gradients in float32, and the sum is not encoded again. So there is one
compression error per level of the cuts. With c bytes of payload per value, a rank sends (p-1)/p c n bytes of n values
if a layer is cut at one level. Error feedback takes 4 bytes for each parameter of a rank's stages, and 8 bytes with
16-bit parameters. The sharding degrees do not change this.

qwZ: each owner encodes its cut, tensor by tensor, rounding to nearest. All ranks compute with the decoded values, the
owner too, so replicas have equal bits. The update and checkpoints use the owners' exact weights. An evaluation during
training uses the decoded weights, an evaluation of a checkpoint the exact ones. At one level, n values on p ranks take
(p-1)/p c n bytes from each rank. Shards that are larger than the cuts (hpZ) are decoded once per step and kept; with
float32 parameters this takes memory in addition to the cuts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.optim import kernels
from hpcdist.strategies.compressed.config import QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.reduction import (
    CompressedReduction,
    GatheredReduction,
    GradientCoder,
    QuantisedReduction,
)
from hpcdist.strategies.compressed.registry import compressor
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.cuts import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Cuts
from hpcdist.strategies.data.residuals import Feedback, StepResiduals, with_loss_scale, without_loss_scale

REPLICAS: Final = OPTIMIZER  # index, after the levels, of the ranks that own the same cut
_NAMES: Final = {
    WHOLE: "the parameters",
    PARAMETERS: "the gradients of a parameter shard",
    GRADIENTS: "the optimizer state of a gradient shard",
    REPLICAS: "the updates of the same optimizer state",
}


def compressed_levels(data: Communicator, cuts: Cuts, *, across_nodes: bool) -> list[bool]:
    """Return a list with one bool per communicator of ``cuts``: True if messages over this communicator are compressed.

    The order is by nesting level, with the communicator of replicas last. Collective over ``data``.
    """
    # With ``across_nodes``, only communicators with one rank per node compress messages.
    comms = [*cuts.comms, cuts.replicas]
    if not across_nodes:
        return [comm is not None for comm in comms]
    local_kinds = [_kind(comm) for comm in comms]
    for index, kinds in enumerate(zip(*data.allgather_object(local_kinds), strict=True)):
        if "mixed" in kinds or len(set(kinds)) > 1:
            raise ConfigurationError(
                f"compression.across_nodes = true, but the ranks that divide {_NAMES[index]} are neither all on one "
                "node nor each on a different node; set zero.parameters or zero.gradients to the number of data "
                "ranks of a node, or set compression.across_nodes = false"
            )
    return [kind == "between" for kind in local_kinds]


def _kind(comm: Communicator | None) -> str:
    if comm is None:
        return "alone"
    nodes = comm.nodes()
    if nodes.count == 1:
        return "within"
    return "between" if all(len(members) == 1 for members in nodes.members) else "mixed"


def float32_scratch(store: FlatStore, layer: int, cut: int, cuts: Cuts) -> FlatStore:
    """Return a float32 scratch store for the range of ``layer`` at nesting level ``cut`` of ``cuts``. Local.

    The scratch memory is on the device of ``store``.
    """
    return FlatStore(
        store.layout,
        FLOAT32,
        cuts.cuts[layer][cut],
        allocate=lambda size, dtype: scratch("compressed.widened", size, dtype, store.array),
    )


_ROUND = 1 << 24  # step numbers of the coder: update number + _ROUND * earlier sums of the layer in this step


class CompressedSums:
    """Reduce-scatters of ZeRO gradients in compressed messages. Construction is collective over the data axis."""

    def __init__(
        self, context: RankContext, update: ShardedUpdate, cuts: Cuts, name: str, config: CompressionConfig, seed: int
    ) -> None:
        self._update, self._cuts, self._alone = update, cuts, context.data.size == 1
        self._warmup_steps, self._step = config.warmup_steps, 0
        carries = compressed_levels(context.data, cuts, across_nodes=config.across_nodes)
        # Payloads of SUMMED compressors are decoded as payloads of rank 0 on all ranks.
        self.coder = GradientCoder(
            context.layout, compressor(name, config), seed, 0 if name in SUMMED else context.data.rank
        )
        self._reductions = {
            level: QuantisedReduction(comm, self.coder)
            for level, comm in enumerate(cuts.comms)
            if comm is not None and carries[level]
        }
        self._over_replicas: CompressedReduction | None = None
        if cuts.replicas is not None and carries[REPLICAS]:
            self._over_replicas = (QuantisedReduction if name in QUANTISED else GatheredReduction)(
                cuts.replicas, self.coder
            )
        self._sums = Counter[int]()  # sums of each layer in this step
        self._residuals: StepResiduals | None = None
        self.feedback = Feedback()
        if config.error_feedback:
            layers = {layer: layer_cuts[WHOLE] for layer, layer_cuts in cuts.cuts.items()}
            plain = {layer: self._plain(layer_cuts) for layer, layer_cuts in cuts.cuts.items()}
            self._residuals = StepResiduals(context, layers, plain, can_roll_back=context.working is not None)
            self.feedback = Feedback(self._residuals)
            self.coder.feedback = self._residuals.feedback

    def _plain(self, layer_cuts: Sequence[Range]) -> list[Range]:
        # The ranges of a layer that this rank never compresses.
        parts = [layer_cuts[OPTIMIZER]] if self._over_replicas is None else []
        for level in range(OPTIMIZER):
            if level not in self._reductions:
                outer, inner = layer_cuts[level], layer_cuts[level + 1]
                parts += [Range(outer.start, inner.start), Range(inner.stop, outer.stop)]
        return [part for part in parts if part]

    @property
    def is_compressing(self) -> bool:
        """True if the next update compresses gradients or adds restored residuals."""
        if self._update.optimizer.count < self._warmup_steps:
            return False
        return not self._alone or (self._residuals is not None and self._residuals.are_owed)

    def begin(self) -> None:
        self._step = self.coder.step = self._update.optimizer.count
        self._sums.clear()

    def sum(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Reduce-scatter the gradients of ``layer`` in ``store`` with compressed messages. Collective.

        ``start``: nesting level of the input range. ``stop``: nesting level of this rank's result. See `Cuts`.
        """
        if not (self.feedback.is_open or self.is_compressing):
            self._cuts.sum(store, layer, start, stop)
            return
        self.feedback.is_open = True  # to the end of the step
        part, result = self._cuts.cuts[layer][start], self._cuts.cuts[layer][stop]
        values = store
        if store.dtype != FLOAT32:
            values = float32_scratch(store, layer, start, self._cuts)
            without_loss_scale(store.range(part), self._update.loss_scale, values.array)
        self._sum_float32(values, layer, start, stop)
        if values is not store:
            with_loss_scale(values.range(result), store.range(result), self._update.loss_scale)

    def _sum_float32(self, values: FlatStore, layer: int, start: int, stop: int) -> None:
        cuts = self._cuts.cuts[layer]
        if start == WHOLE:
            self.coder.step = self._step + _ROUND * self._sums[layer]
            self._sums[layer] += 1
            if self._residuals is not None:
                self._residuals.open(layer, values)
        for level in range(start, stop):
            part = cuts[level]
            if level not in self._reductions:
                self._cuts.reduce_level(values, layer, level)
            elif part:
                self._reductions[level].reduce_scatter(values.range(part), part, self._cuts.shares_at(layer, level))
        if stop == OPTIMIZER and self._over_replicas is None:
            self._cuts.sum_replicas(values, layer)
        elif stop == OPTIMIZER and self._over_replicas is not None and cuts[OPTIMIZER]:
            self._over_replicas.allreduce(values.range(cuts[OPTIMIZER]), cuts[OPTIMIZER])


_NEAREST: Final = CompressionConfig(error_feedback=True)  # selects rounding to nearest; parameters have no feedback


class CompressedGathers:
    """All-gathers of sharded layers in compressed messages. Construction is collective over the data axis."""

    def __init__(self, context: RankContext, cuts: Cuts, name: str, *, across_nodes: bool) -> None:
        self._cuts = cuts
        carries = compressed_levels(context.data, cuts, across_nodes=across_nodes)
        coder = GradientCoder(context.layout, compressor(name, _NEAREST), 0, 0)
        self._reductions = {
            level: QuantisedReduction(comm, coder)
            for level, comm in enumerate(cuts.comms)
            if comm is not None and carries[level]
        }
        # Shards then hold decoded values, not the weights of their owners.
        self.keeps_decoded = any(level in self._reductions for level in range(PARAMETERS, OPTIMIZER))

    def gather(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """All-gather the parameters of ``layer`` in ``store`` with compressed messages. Collective.

        ``stop``: nesting level of this rank's input range. ``start``: nesting level of the result. See `Cuts`.
        """
        for level in reversed(range(start, stop)):
            if level in self._reductions:
                self._decode(store, layer, level)
            else:
                self._cuts.gather(store, layer, level, level + 1)

    def _decode(self, store: FlatStore, layer: int, level: int) -> None:
        # Collective: encodes and sends this rank's share, and decodes the shares of all ranks.
        part, local = (self._cuts.cuts[layer][cut] for cut in (level, level + 1))
        if not part:
            return
        values = store
        if store.dtype != FLOAT32:
            values = float32_scratch(store, layer, level, self._cuts)
            kernels.widen(store.range(local), values.range(local))
        self._reductions[level].all_gather(values.range(part), part, self._cuts.shares_at(layer, level))
        if values is not store:
            for _, where in store.layout.within(part):
                kernels.round_into(values.range(where), store.range(where))
