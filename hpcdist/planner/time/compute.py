"""Seconds of one micro-batch in one unit on one device: products, attention, elementwise operations, kernels.

A product of (m, k) and (k, n) takes 2 m k n FLOPs in forward and for each gradient. A product is never faster than its
memory traffic.

Tiled attention (arXiv:2307.08691), as in hpcdist, takes 4 h P FLOPs in forward for width h and P pairs of tokens, and
10 h P in backward, at `Device.attention_share` of the peak. Attention with scores in memory (arXiv:2205.05198, section
4.1) takes two products per head over all s^2 pairs, four in backward, plus the traffic of a s^2 scores for a heads.

Elementwise operations take the time of their memory traffic; backward moves three elements per two in forward. Each
kernel adds `Device.kernel_s`.
"""

from math import log
from operator import attrgetter
from typing import Any, Final, NamedTuple
from weakref import finalize

from hpcdist.constants import HALVES
from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, EfficiencyCurve
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import context_share
from hpcdist.planner.memory.model_states import unsharded
from hpcdist.planner.model.description import AttentionShape, ModelUnit, ProductShape
from hpcdist.strategies.context.operations import pairs, pieces

TILED_BACK: Final = 2.5  # five products instead of two, because scores are recomputed
MOVED_BACK: Final = 1.5  # two reads and a write, instead of a read and a write
# Memory traffic per score: elements, and bytes of the dropout mask. Forward: softmax and dropout read and write.
# Backward: dropout reads and writes, softmax reads two and writes one.
SCORES_FORWARD: Final = (4, 1)
SCORES_BACK: Final = (5, 1)
SCORE_KERNELS: Final = 4  # two products, softmax, dropout; twice as many in backward
_KNOWN: Final[dict[int, dict[str, dict[Any, Any]]]] = {}  # cached results by id of the cluster


class UnitSeconds(NamedTuple):
    """Seconds that one device needs for a micro-batch in one model layer, such as a transformer block."""

    forward_s: float
    input_s: float  # gradients of inputs
    weight_s: float  # gradients of weights
    again_s: float  # recomputation before backward
    flags: tuple[str, ...] = ()
    add_s: float = 0.0  # gradient accumulation, not included in ``weight_s``
    cover_s: float = 0.0  # time in backward that can overlap messages of the tensor axis
    # (forward, backward) times of attention, included in the fields above
    attention_s: tuple[float, float] = (0.0, 0.0)


def cached(cluster: Cluster, kind: str) -> dict[Any, Any]:
    """Return the cache of ``cluster`` for one ``kind`` of results, such as "loads": a dict for the caller to fill."""
    results = _KNOWN.get(id(cluster))
    if results is None:
        results = _KNOWN[id(cluster)] = {}
        finalize(cluster, _KNOWN.pop, id(cluster)).atexit = False
    return results.setdefault(kind, {})


# Fields of a layout that determine the seconds of a unit.
timed_fields: Final = attrgetter(
    *("microbatch", "tensor", "context", "expert", "sequence_parallel", "precision", "activations", "main_gradients"),
    *("recompute", "implementation", "gradient_fusion"),
)


def unit_seconds(unit: ModelUnit, layout: ParallelLayout, cluster: Cluster) -> UnitSeconds:
    """Return the seconds that one device needs for a micro-batch in one layer of ``unit``.

    Raises ConfigurationError if the cluster has no speeds for the precision of ``layout``.
    """
    key = (unit, *timed_fields(layout))
    cache = cached(cluster, "unit_seconds")
    times: UnitSeconds | None = cache.get(key)
    if times is None:
        times = cache[key] = _Unit(unit, layout, cluster).seconds()
    return times


def peak_share_of(curve: EfficiencyCurve, size: float) -> tuple[float, str]:
    """Return (fraction of the peak FLOP rate that matrix products of ``size`` reach, warning or "").

    ``curve``: measured fractions by product size. The warning says that ``size`` is outside the measured sizes.
    """
    sizes, shares = curve.sizes, curve.shares
    if size < sizes[0]:
        return shares[0] * size / sizes[0], f"smaller than {sizes[0]:.6g}, the smallest on the curve"
    if size > sizes[-1]:
        return shares[-1], f"larger than {sizes[-1]:.6g}, the largest on the curve"
    for at in range(1, len(sizes)):
        if size <= sizes[at]:
            part = log(size / sizes[at - 1]) / log(sizes[at] / sizes[at - 1])
            return shares[at - 1] + part * (shares[at] - shares[at - 1]), ""
    return shares[-1], ""


class _Unit:
    def __init__(self, unit: ModelUnit, layout: ParallelLayout, cluster: Cluster) -> None:
        device = cluster.device
        self.unit, self.layout, self.device = unit, layout, device
        kind = layout.computes_in
        is_narrow = layout.kernels.products and unit.attention is not None and kind in HALVES
        product_kind = layout.kernels.products if is_narrow else kind
        if kind not in device.peak_flops or product_kind not in device.matmul:
            kind = product_kind
            available = sorted(set(device.peak_flops) & set(device.matmul))
            raise ConfigurationError(
                f"the precision {kind} needs a peak FLOP rate and an efficiency curve of the device {device.name}, "
                f"but the cluster {cluster.name!r} has both only for the precisions "
                f"{', '.join(available) or '(none)'}; change the precision, or add device.flops.{kind} and "
                f"[device.matmul.{kind}] to the cluster file"
            )
        self.peak = device.peak_flops[kind]
        self.product_peak, self.curve = device.peak_flops[product_kind], device.matmul[product_kind]
        self.fit = layout.kernels.fit(device.name)
        self.item = ITEM_BYTES[kind]
        self.moves = device.memory_bytes_per_s * device.memory_share
        self.flags: set[str] = set()

    def seconds(self) -> UnitSeconds:
        unit, layout = self.unit, self.layout
        products = [self._product(product) for product in unit.products]
        linear = sum(products)
        begin = sum(time_s for time_s, product in zip(products, unit.products, strict=True) if product.cut == "columns")
        forward, back = self._attention(unit.attention) if unit.attention else (0.0, 0.0)
        moved, moved_back = self._moved()
        kernels = unit.kernels * self.device.kernel_s
        whole = linear + forward + moved + kernels
        into, weight = linear + back + moved_back + kernels, linear + (kernels if unit.products else 0.0)
        if unit.first:  # the input needs no gradient
            into, weight = 0.0, linear + back + moved_back + kernels
        repeated = 0.0
        if layout.recompute == "full":
            repeated = whole - (products[-1] if layout.kernels.stops_early and unit.attention else 0.0)
        elif layout.recompute == "selective" and not layout.kernels.tiles_attention:
            repeated = forward  # tiled attention recomputes its scores in any case
        elif layout.recompute == "selective" and layout.kernels.again_share:
            repeated = layout.kernels.again_share * linear + moved + kernels
        cover = (2 if layout.sequence_parallel else 1) * begin
        flags = tuple(sorted(self.flags))
        return UnitSeconds(whole, into, weight, repeated, flags, self._add(), cover, (forward, back))

    def _extents(self, product: ProductShape) -> tuple[float, float, float, float]:
        layout = self.layout
        rows = layout.microbatch * product.rows / layout.context
        inner, columns, experts = float(product.inner), float(product.columns), 1.0
        if product.cut == "columns":
            columns /= layout.tensor
        elif product.cut == "inner":
            inner /= layout.tensor
        elif layout.sequence_parallel:
            rows /= layout.tensor
        if product.experts > 1:
            # Local experts process the tokens of all ranks of the expert axis, in equal shares.
            experts, rows = product.experts / layout.expert, rows * product.share * layout.expert
        return rows, inner, columns, experts

    def _product(self, product: ProductShape) -> float:
        rows, inner, columns, experts = self._extents(product)
        computed = 2 * rows * inner * columns / self._speed(rows, inner, columns)
        return experts * max(computed, self._operands(rows, inner, columns))

    def _operands(self, rows: float, inner: float, columns: float) -> float:
        return (rows * inner + inner * columns + rows * columns) * self.item / self.moves

    def _speed(self, *extents: float) -> float:
        size = 3 / sum(1 / extent for extent in extents)
        share, beyond = peak_share_of(self.curve, size)
        if beyond:
            self.flags.add(f"{self.layout.computes_in} products {beyond}: extrapolated")
        return self.product_peak * min(1.0, share * self.fit.matmul)

    def _attention(self, attention: AttentionShape) -> tuple[float, float]:
        layout = self.layout
        samples = layout.microbatch / layout.context
        heads = attention.heads / layout.tensor
        wide = samples * attention.context * attention.size
        ends = (
            2 * wide * (heads + attention.kv_heads / layout.tensor) * self.item / self.moves
        )  # q, k, v and the output
        peak = self.peak * (self.fit.attention or self.device.attention_share)
        if layout.kernels.tiles_attention:
            forward = 4 * samples * heads * attention.size * self._pairs(attention) / peak
            return max(forward, ends), max(TILED_BACK * forward, 2 * ends)
        scores = samples * heads * attention.every_pair
        # Batched products, one small product per head.
        keys = attention.every_pair / attention.context
        extents = attention.context / layout.context, float(attention.size), keys
        products = max(4 * scores * attention.size / self._speed(*extents), 2 * scores * self.item / self.moves)
        kernels = SCORE_KERNELS * self.device.kernel_s
        forward = products + (SCORES_FORWARD[0] * self.item + SCORES_FORWARD[1]) * scores / self.moves
        back = 2 * products + (SCORES_BACK[0] * self.item + SCORES_BACK[1]) * scores / self.moves
        return forward + kernels, back + 2 * kernels

    def _pairs(self, attention: AttentionShape) -> float:
        layout, ranks = self.layout, self.layout.context
        if not attention.window or attention.within or ranks == 1:
            return attention.pairs
        if context_share(self.unit, layout, layout.microbatch)[1] != "ring":
            return attention.pairs
        placed = pieces(attention.context, ranks)  # the busiest rank counts
        return ranks * max(pairs(placed, rank, causal=True, window=attention.window) for rank in range(ranks))

    def _moved(self) -> tuple[float, float]:
        unit, layout = self.unit, self.layout
        samples = layout.microbatch / layout.context
        products = unit.products
        is_gated = len(products) > 1 and products[-2].columns == 2 * products[-1].inner
        traffic, loss_bytes = layout.kernels.traffic[is_gated], layout.kernels.loss_bytes
        rest = traffic * samples * (unit.moved - unit.moved_cut) / (layout.tensor if layout.sequence_parallel else 1)
        if loss_bytes and unit.products and unit.products[-1].cut == "columns":  # logits
            logits = samples * unit.products[-1].rows * unit.products[-1].columns / layout.tensor
            there, back = (
                rest * self.item + loss_bytes[0] * logits,
                MOVED_BACK * rest * self.item + loss_bytes[1] * logits,
            )
            return there / self.moves, back / self.moves
        forward = (rest + traffic * samples * unit.moved_cut / layout.tensor) * self.item / self.moves
        return forward, MOVED_BACK * forward

    def _add(self) -> float:
        # Seconds to add a micro-batch's weight gradients to the accumulated gradients.
        each = unsharded(self.layout).gradient / self.moves
        separate, waits = local_parameters(self.unit, self.layout), 0.0
        if self.layout.kernels.fuses_gradients and self.layout.gradient_fusion:
            for product in self.unit.products:
                rows, inner, columns, experts = self._extents(product)
                separate -= experts * inner * columns
                moved = experts * (self._operands(rows, inner, columns) + 2 * each * inner * columns)
                waits += max(0.0, moved - self._product(product))
        return waits + 3 * each * max(0.0, separate)


def local_parameters(unit: ModelUnit, layout: ParallelLayout) -> float:
    """Return the number of parameters of one layer of ``unit`` on a device, before ZeRO shards the parameters."""
    experts = unit.expert_parameters / layout.tensor
    rest = unit.parameters - unit.cut_parameters + unit.cut_parameters / layout.tensor - experts
    return rest + local_experts(unit, layout)


def local_experts(unit: ModelUnit, layout: ParallelLayout) -> float:
    """Return the number of expert parameters of one layer of ``unit`` on a device."""
    return unit.expert_parameters / layout.tensor / layout.expert
