"""ZeRO with compressed messages, as in ZeRO++ (Wang et al., arXiv:2306.10209): gradients, parameters, or both.

    qgZ    gradients travel as payloads to those who own them: communication.compression, see `zero_sums`
    qwZ    parameters that are cut are gathered as payloads: compression.parameters, see `zero_gathers`
    hpZ    gathers within a node: zero.parameters = its data ranks, see `hpcdist.strategies.zero.exchange`

Any of them goes without the others. Gradients are summed as float32 and in unscaled units, as those of
`hpcdist.strategies.compressed.exchange` are, also where a level of them is dense. Error feedback takes 4 bytes for each
parameter of the stages of a rank, 8 where its working copies are 16-bit floats, whatever is cut: the residuals of what
it sends to all others. ZeRO++ has none; without it memory is that of ZeRO.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.owing import Owing
from hpcdist.strategies.compressed.zero_gathers import LevelGathers
from hpcdist.strategies.compressed.zero_sums import LevelSums
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero.exchange import ZeroExchange
from hpcdist.strategies.zero.levels import OPTIMIZER
from hpcdist.strategies.zero_config import ZeroConfig


class CompressedZero(Owing, ZeroExchange):
    """ZeRO whose gradients are summed as ``name`` compresses them, "none" for not at all. Collective as ZeRO is.

    ``config.parameters`` says how those that are cut are gathered. ``seed`` is that of the run.
    """

    def __init__(
        self, seat: Seat, stage: int, zero: ZeroConfig, name: str, config: CompressionConfig, seed: int
    ) -> None:
        self._shards: FlatStore | None = None  # what is decoded, where owners step their cuts elsewhere
        self._asked, self._loss_scale = config, 1.0
        self.gathered: LevelGathers | None = None
        self._is_stale = False  # shards are not yet what is decoded of the own cuts
        super().__init__(seat, stage, zero)
        self.sums = None if name == "none" else LevelSums(seat, self.levels, name, config, seed)
        self.residuals = self._fed_back = None if self.sums is None else self.sums.residuals

    def _stepped(self, own: Sequence[Range]) -> FlatStore:
        """Return what the owners step: the own cuts alone, where shards are decoded and are no master's copies."""
        kept = super()._stepped(own)
        if self._asked.parameters == "none":
            return kept
        if self._over.parameters == 1 < self.seat.data.size:
            raise ConfigurationError(
                f"compression.parameters = {self._asked.parameters!r} with parameters that each of the "
                f"{self.seat.data.size} data ranks keeps whole (zero.parameters = 1): what is kept would be rounded; "
                "set zero.parameters to 0 or to the ranks of a node, or compression.parameters = 'none'"
            )
        across = self._asked.across_nodes
        self.gathered = LevelGathers(self.seat, self.levels, self._asked.parameters, across_nodes=across)
        if not self.gathered.keeps_decoded or self.seat.working is not None:
            return kept
        self._shards = kept
        return self.seat.store("parameters", own)

    @property
    def parameters(self) -> FlatStore:
        """What this rank computes with, or gathers: what is decoded, where the weights themselves are elsewhere."""
        return super().parameters if self._shards is None else self._shards

    @property
    def weights(self) -> FlatStore:
        """What a checkpoint keeps of the parameters: never a rounded copy."""
        return super().weights if self._shards is None else self.owner.parameters

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        if self.sums is None or self.owner.optimizer.count < self._asked.warmup_steps:
            return False
        return self.seat.data.size > 1 or (self._fed_back is not None and self._fed_back.are_owed)

    def begin(self, operations: Sequence[Operation]) -> None:
        """Forget a step that was given up; after `take` or `restore`, bring what is decoded to its shards."""
        self._give_up()
        if self.sums is not None:
            self.sums.begin(self.owner.optimizer.count)
        if self._is_stale:
            self._is_stale = False
            self.spread()
        super().begin(operations)

    def scaled_by(self, loss_scale: float) -> None:
        """Take note of the loss scale of the step that begins (local)."""
        self._loss_scale = loss_scale

    def _sum(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        if self.sums is None or not (self._is_open or self.is_compressing):
            super()._sum(store, layer, start, stop)
            return
        self._is_open = True  # to the end of the step
        self.sums.sum(store, layer, start, stop, self._loss_scale)

    def _bring(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        if self.gathered is None:
            super()._bring(store, layer, start, stop)
        else:
            self.gathered.gather(store, layer, start, stop)

    def gather(self, op: Operation) -> None:
        """Bring a layer together; one that is kept whole from the new cuts, as they are."""
        layer = self.seat.model.stages[op.unit].layer
        if layer not in self._cut_layers:
            self._fetch(layer)
        super().gather(op)

    def refresh(self, op: Operation) -> None:
        """Bring the shard of a layer together from the new cuts, as what is decoded of them."""
        self._fetch(self.seat.model.stages[op.unit].layer)
        super().refresh(op)

    def _fetch(self, layer: int) -> None:
        """Take the own cut of a layer that is kept, in full or as a shard, from where it was stepped (local)."""
        if self._shards is not None:
            own = self.levels.cuts[layer][OPTIMIZER]
            self._shards.range(own)[...] = self.owner.parameters.range(own)

    def take(self, initial: FlatStore) -> None:
        """Take over the initial values (local)."""
        super().take(initial)
        self._is_stale = self.gathered is not None and self.gathered.keeps_decoded

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, once the pieces are there. Collective over the data axis."""
        super().restore(state)
        self._is_stale = self._shards is not None  # working copies were made anew, and brought together
