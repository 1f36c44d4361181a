"""Sums of gradients to those who own them, as payloads: the reduce-scatter of qgZ (ZeRO++, arXiv:2306.10209).

Payloads go straight to the owner of a cut, who adds them to its own gradients in float32. The sum is not encoded: in
ZeRO nobody else gets it. So one error of the compressor for each level of the cuts, and with p ranks, c the bytes of a
payload of one value, (p-1)/p c n bytes of n values from each rank where a layer is cut in one step. Sparse payloads go
the same way: each has indices of its own cut, and they are never gathered. Where several ranks own the same cut, its
sum over them is that of an allreduce of compressed gradients (see `hpcdist.strategies.compressed.ways`).
"""

from collections import Counter
from collections.abc import Sequence

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.compressed.catalogue import compressor
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.config import QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.owing import scaled, unscaled
from hpcdist.strategies.compressed.ways import Gathered, Quantised, Way
from hpcdist.strategies.compressed.zero_levels import FLOAT32, REPLICAS, coded, widened
from hpcdist.strategies.compressed.zero_residuals import StepResiduals
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero.levels import OPTIMIZER, WHOLE, Levels

_ROUND = 1 << 24  # steps are numbered below it, and how often a layer was summed before in the same step above


class LevelSums:
    """Sums along ``levels``. Collective over the data axis, but where it says local; see `CompressedZero`."""

    def __init__(self, seat: Seat, levels: Levels, name: str, config: CompressionConfig, seed: int) -> None:
        self._levels, self._step = levels, 0
        self._coded = coded(seat.data, levels, across_nodes=config.across_nodes)
        # Payloads of SUMMED are read as those of rank 0, whoever wrote them.
        self.coder = Coder(seat.layout, compressor(name, config), seed, 0 if name in SUMMED else seat.data.rank)
        self._ways = {
            level: Quantised(comm, self.coder)
            for level, comm in enumerate(levels.comms)
            if comm is not None and self._coded[level]
        }
        self._of_replicas: Way | None = None
        if levels.replicas is not None and self._coded[REPLICAS]:
            self._of_replicas = (Quantised if name in QUANTISED else Gathered)(levels.replicas, self.coder)
        self._summed = Counter[int]()  # by layer, in this step
        self.residuals: StepResiduals | None = None
        if config.error_feedback:
            whole = {layer: cuts[WHOLE] for layer, cuts in levels.cuts.items()}
            plain = {layer: self._plain(cuts) for layer, cuts in levels.cuts.items()}
            self.residuals = StepResiduals(seat, whole, plain, can_roll_back=seat.working is not None)
            self.coder.feedback = self.residuals.feedback

    def _plain(self, cuts: Sequence[Range]) -> list[Range]:
        """Return what this rank never encodes of a layer (local)."""
        found = [cuts[OPTIMIZER]] if self._of_replicas is None else []
        for level in range(OPTIMIZER):
            if level not in self._ways:
                outer, inner = cuts[level], cuts[level + 1]
                found += [Range(outer.start, inner.start), Range(inner.stop, outer.stop)]
        return [part for part in found if part]

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
            values = widened(store, layer, start, self._levels)
            unscaled(store.range(part), loss_scale, values.array)
        self._sum(values, layer, start, stop)
        if values is not store:
            scaled(values.range(own), store.range(own), loss_scale)

    def _sum(self, values: FlatStore, layer: int, start: int, stop: int) -> None:
        cuts = self._levels.cuts[layer]
        if start == WHOLE:
            self.coder.step = self._step + _ROUND * self._summed[layer]
            self._summed[layer] += 1
            if self.residuals is not None:
                self.residuals.open(layer, values)
        for level in range(start, stop):
            part = cuts[level]
            if level not in self._ways:
                self._levels.reduce(values, layer, level, level + 1)
            elif part:
                self._ways[level].reduce_scatter(values.range(part), part, self._levels.shares_at(layer, level))
        own = cuts[OPTIMIZER]
        if stop == OPTIMIZER and self._of_replicas is None:
            self._levels.sum_replicas(values, layer)
        elif stop == OPTIMIZER and self._of_replicas is not None and own:
            self._of_replicas.allreduce(values.range(own), own)
