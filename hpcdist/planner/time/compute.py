"""Seconds of one micro-batch in one unit on one device: products, attention, elementwise operations, kernels.

A product of (m, k) and (k, n) has 2 m k n operations forward, as many for the gradient of its input and for that of
its weight; all three have the same three extents, so the same place on the curve of the device (`cluster.Curve`),
after the tensor axis has cut its weight and the context axis its rows. No product is faster than its operands are
read and its result is written. Where micro-batches are added up, two gradients are read and one is written, beside
the product or, in Megatron-LM since the end of 2021, while it computes.

Attention with scores in tiles (T. Dao, arXiv:2307.08691), as ours: 4 h P operations forward for P pairs of tokens,
and 10 h P back, where scores are computed again, at `Device.attention_share` of the peak. With scores in memory
(arXiv:2205.05198, section 4.1): two products over all s^2 pairs, small ones of one head each, twice as many back, and
what a softmax and a dropout of a s^2 scores read and write at the speed of the memory.

Elementwise operations take what moving their numbers takes; back they read a gradient and a number that was kept, and
write a gradient, where forward read and wrote one each. Between any two kernels are `Device.kernel_s`. Gradients of
inputs and of weights are separate, since zero-bubble schedules run them separately.
"""

from math import log
from operator import attrgetter
from typing import Any, Final, NamedTuple
from weakref import finalize

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, EfficiencyCurve
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import context_share
from hpcdist.planner.model.description import AttentionShape, ModelUnit, ProductShape
from hpcdist.strategies.context.passes import pairs, pieces

TILED_BACK: Final = 2.5  # five products instead of two: the scores are computed again
MOVED_BACK: Final = 1.5  # a gradient and what was kept are read, a gradient is written, where one read and one written
# What goes over a score in memory, in numbers, and as bytes of the mask of a dropout. Forward: a softmax reads and
# writes, a dropout too; back: a dropout reads and writes, a softmax reads two and writes one.
SCORES_FORWARD: Final = (4, 1)
SCORES_BACK: Final = (5, 1)
# What Megatron-LM's loss moves for a logit, in float32 (its vocab_parallel_cross_entropy): cast (6 bytes), maximum (4),
# difference (8), exponential (8), sum (4), quotient (8); back: a factor (8), cast (6).
LOSS_BYTES: Final = (38, 14)
SCORE_KERNELS: Final = 4  # two products, a softmax, a dropout; back twice as many
_KNOWN: Final[dict[int, dict[str, dict[Any, Any]]]] = {}  # by cluster


class UnitSeconds(NamedTuple):
    """Seconds of a micro-batch in one unit.

    ``again_s`` is what recomputation repeats before the backward, ``add_s`` what adding weight gradients to those of
    the micro-batches before takes beside ``weight_s``; ``cover_s`` is the part of the backward that does not wait for
    the messages of the tensor axis (`hpcdist.planner.time.stage_load`). ``attention_s`` is that of attention, forward
    and back.
    """

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float
    flags: tuple[str, ...] = ()
    add_s: float = 0.0
    cover_s: float = 0.0
    attention_s: tuple[float, float] = (0.0, 0.0)


def cached(cluster: Cluster, what: str) -> dict[Any, Any]:
    """Return the results ``what`` that are known for this very ``cluster``, which holds mappings and so has no hash.

    They go when the cluster does.
    """
    own = _KNOWN.get(id(cluster))
    if own is None:
        own = _KNOWN[id(cluster)] = {}
        finalize(cluster, _KNOWN.pop, id(cluster)).atexit = False
    return own.setdefault(what, {})


# The fields of a layout that the seconds of a unit depend on.
timed_fields: Final = attrgetter(
    *("microbatch", "tensor", "context", "expert", "sequence_parallel", "precision", "activations", "main_gradients"),
    *("recompute", "implementation", "gradient_fusion"),
)


def unit_seconds(unit: ModelUnit, layout: ParallelLayout, cluster: Cluster) -> UnitSeconds:
    """Return the times of one of the units ``unit`` on one device (local).

    Raises ConfigurationError where nothing is known of the device with numbers of this precision.
    """
    key = (unit, *timed_fields(layout))
    known = cached(cluster, "unit_seconds")
    times: UnitSeconds | None = known.get(key)
    if times is None:
        times = known[key] = _Unit(unit, layout, cluster).seconds()
    return times


def main_bytes(layout: ParallelLayout) -> int:
    """Return the bytes of a number of the gradients in which micro-batches are added up (local)."""
    item = ITEM_BYTES[layout.precision]
    return 4 if item == 2 and layout.implementation == "megatron" and layout.main_gradients == "float32" else item


def peak_share_of(curve: EfficiencyCurve, size: float) -> tuple[float, str]:
    """Return the share of the peak for a product of ``size``, and what to say where that was not measured (local).

    Below the smallest size the share falls with the size; beyond the largest one it stays.
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
    """One unit on one device."""

    def __init__(self, unit: ModelUnit, layout: ParallelLayout, cluster: Cluster) -> None:
        device = cluster.device
        self.unit, self.layout, self.device = unit, layout, device
        kind = layout.computes_in
        if kind not in device.peak_flops or kind not in device.matmul:
            known = sorted(set(device.peak_flops) & set(device.matmul))
            raise ConfigurationError(
                f"numbers of type {kind}, and cluster {cluster.name!r} has a peak and a curve of {device.name} for "
                f"{', '.join(known) or 'none'} only; choose one of these, or add [device.flops] {kind} and "
                f"[device.matmul.{kind}]"
            )
        self.peak, self.curve = device.peak_flops[kind], device.matmul[kind]
        self.item = ITEM_BYTES[kind]
        self.moves = device.memory_bytes_per_s * device.memory_share
        self.flags: set[str] = set()

    def seconds(self) -> UnitSeconds:
        unit, layout = self.unit, self.layout
        products = [self._product(product) for product in unit.products]
        linear = sum(products)
        begin = sum(took for took, product in zip(products, unit.products, strict=True) if product.cut == "columns")
        forward, back = self._attention(unit.attention) if unit.attention else (0.0, 0.0)
        moved, moved_back = self._moved()
        kernels = unit.kernels * self.device.kernel_s
        whole = linear + forward + moved + kernels
        into, weight = linear + back + moved_back + kernels, linear + (kernels if unit.products else 0.0)
        if unit.first:  # nobody asks for the gradient of its input: what is left belongs to the weights
            into, weight = 0.0, linear + back + moved_back + kernels
        again = 0.0
        if layout.recompute == "full":
            again = whole
        elif layout.recompute == "selective" and layout.implementation == "megatron":
            again = forward  # tiles compute their scores again anyway
        cover = (2 if layout.sequence_parallel else 1) * begin
        flags = tuple(sorted(self.flags))
        return UnitSeconds(whole, into, weight, again, flags, self._add(), cover, (forward, back))

    def _extents(self, product: ProductShape) -> tuple[float, float, float, float]:
        """Return rows, inner and columns of a product on this device, and of how many experts it is."""
        layout = self.layout
        rows = layout.microbatch * product.rows / layout.context
        inner, columns, here = float(product.inner), float(product.columns), 1.0
        if product.cut == "columns":
            columns /= layout.tensor
        elif product.cut == "inner":
            inner /= layout.tensor
        elif layout.sequence_parallel:
            rows /= layout.tensor
        if product.experts > 1:
            # Tokens of all ranks of the expert axis meet in the experts that are here, the same share in each.
            here, rows = product.experts / layout.expert, rows * product.share * layout.expert
        return rows, inner, columns, here

    def _product(self, product: ProductShape) -> float:
        """Return the seconds of a product with a weight, of all experts that are here."""
        rows, inner, columns, here = self._extents(product)
        computed = 2 * rows * inner * columns / self._speed(rows, inner, columns)
        return here * max(computed, self._operands(rows, inner, columns))

    def _operands(self, rows: float, inner: float, columns: float) -> float:
        """Return the seconds in which a product reads its operands and writes its result."""
        return (rows * inner + inner * columns + rows * columns) * self.item / self.moves

    def _speed(self, *extents: float) -> float:
        """Return the operations a second in a product of these extents."""
        size = 3 / sum(1 / extent for extent in extents)
        share, beyond = peak_share_of(self.curve, size)
        if beyond:
            self.flags.add(f"{self.layout.computes_in} products {beyond}: extrapolated")
        return self.peak * share

    def _attention(self, attention: AttentionShape) -> tuple[float, float]:
        """Return the seconds forward and back."""
        layout = self.layout
        samples = layout.microbatch / layout.context
        heads = attention.heads / layout.tensor
        wide = samples * attention.context * attention.size
        ends = (
            2 * wide * (heads + attention.kv_heads / layout.tensor) * self.item / self.moves
        )  # q, k, v and the output
        peak = self.peak * self.device.attention_share
        if layout.implementation == "hpcdist":
            forward = 4 * samples * heads * attention.size * self._pairs(attention) / peak
            return max(forward, ends), max(TILED_BACK * forward, 2 * ends)
        scores = samples * heads * attention.every_pair
        # A batch of products, each of one head, and so small ones.
        keys = attention.every_pair / attention.context
        extents = attention.context / layout.context, float(attention.size), keys
        products = max(4 * scores * attention.size / self._speed(*extents), 2 * scores * self.item / self.moves)
        kernels = SCORE_KERNELS * self.device.kernel_s
        forward = products + (SCORES_FORWARD[0] * self.item + SCORES_FORWARD[1]) * scores / self.moves
        back = 2 * products + (SCORES_BACK[0] * self.item + SCORES_BACK[1]) * scores / self.moves
        return forward + kernels, back + 2 * kernels

    def _pairs(self, attention: AttentionShape) -> float:
        """Return the pairs of a head and sample: on a ring, those of the rank that has most, times the ranks.

        Without a window all ranks have as many; of packed samples, too, as where documents lie is not known.
        """
        layout, ranks = self.layout, self.layout.context
        if not attention.window or attention.within or ranks == 1:
            return attention.pairs
        if context_share(self.unit, layout, layout.microbatch)[1] != "ring":
            return attention.pairs
        placed = pieces(attention.context, ranks)
        return ranks * max(pairs(placed, rank, causal=True, window=attention.window) for rank in range(ranks))

    def _moved(self) -> tuple[float, float]:
        """Return the seconds of elementwise operations forward and back."""
        unit, layout = self.unit, self.layout
        samples = layout.microbatch / layout.context
        rest = samples * (unit.moved - unit.moved_cut) / (layout.tensor if layout.sequence_parallel else 1)
        if layout.implementation == "megatron" and unit.products and unit.products[-1].cut == "columns":  # logits
            logits = samples * unit.products[-1].rows * unit.products[-1].columns / layout.tensor
            there, back = (
                rest * self.item + LOSS_BYTES[0] * logits,
                MOVED_BACK * rest * self.item + LOSS_BYTES[1] * logits,
            )
            return there / self.moves, back / self.moves
        forward = (rest + samples * unit.moved_cut / layout.tensor) * self.item / self.moves
        return forward, MOVED_BACK * forward

    def _add(self) -> float:
        """Return the seconds of adding weight gradients to what is there: two reads and a write of each.

        A product that adds itself reads and writes the sum while it computes: only what takes longer counts.
        """
        each = main_bytes(self.layout) / self.moves
        beside, waits = local_parameters(self.unit, self.layout), 0.0
        if self.layout.implementation == "megatron" and self.layout.gradient_fusion:
            for product in self.unit.products:
                rows, inner, columns, here = self._extents(product)
                beside -= here * inner * columns
                moved = here * (self._operands(rows, inner, columns) + 2 * each * inner * columns)
                waits += max(0.0, moved - self._product(product))
        return waits + 3 * each * max(0.0, beside)


def local_parameters(unit: ModelUnit, layout: ParallelLayout) -> float:
    """Return how many parameters of one of the units ``unit`` are on a device, before ZeRO cuts them (local)."""
    experts = unit.expert_parameters / layout.tensor
    rest = unit.parameters - unit.cut_parameters + unit.cut_parameters / layout.tensor - experts
    return rest + local_experts(unit, layout)


def local_experts(unit: ModelUnit, layout: ParallelLayout) -> float:
    """Return how many of them belong to experts; what the tensor axis leaves whole of these is not counted (local)."""
    return unit.expert_parameters / layout.tensor / layout.expert
