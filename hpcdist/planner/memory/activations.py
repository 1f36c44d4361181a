"""Activation bytes that a unit stores for its backward, per sample on one device.

**Published** (arXiv:2205.05198, section 4 and table 2): A block of width h with a heads, s tokens and t tensor ranks
stores, in 16 bits and with dropout:

    no option                           s h (10 + 24 / t + 5 a s / (h t))
    sequence parallelism                s h / t (34 + 5 a s / h)
    selective recomputation             s h (10 + 24 / t)
    both                                34 s h / t
    full recomputation                  2 s h, and 2 s h / t with sequence parallelism

The embedding stores s h / t, the head 4 s h / t (1 + v / h). `_published_block` adds float32, grouped keys, gated
feed-forwards and experts. Fused attention (arXiv:2205.14135) counts as "selective". The context axis shards tokens. A
split backward keeps 32 s h (arXiv:2401.10241, table 1).

**hpcdist**: arrays of `hpcdist.models.counts`. No scores are stored, so "selective" saves nothing. The context axis
does not shard attention tiles.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.models.counts import KeptArray, peak_with_recomputation
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription, ModelUnit, TransformerShape
from hpcdist.planner.model.transformer import inner
from hpcdist.strategies.config import resolve_context_method
from hpcdist.strategies.context.costs import AttentionShare, kept_elements, scratch_elements
from hpcdist.strategies.pipeline.costs import TensorSplit

MASK: Final = 1  # bytes per element
LOGITS: Final = 4  # bytes: float32
HALF_BYTES: Final = 2


class UnitActivations(NamedTuple):
    """Activation bytes per sample of one model layer, such as embedding, transformer block or head, on a device."""

    kept: float  # stored from forward to backward
    held: float = 0.0  # stored until a separate weight-gradient pass
    again: float = 0.0  # more bytes during recomputation
    border: float = 0.0  # the unit's input


class BlockActivations(NamedTuple):
    """Activation bytes of a transformer block per sample, before tensor parallelism shards them."""

    between: float  # replicated by tensor ranks
    cut: float  # sharded by tensor ranks
    scores: float  # attention scores
    held_between: float  # replicated, kept by a split backward for the weight gradients
    held_cut: float  # sharded, kept by a split backward for the weight gradients


def itemsize(layout: ParallelLayout) -> int:
    """Return the bytes per element of the activations that one model layer passes to the next layer."""
    if layout.precision == "float64":
        return 8
    is_wide = layout.precision == "float32" or layout.activations == "float32"
    return 4 if is_wide else 2


def unit_activations(description: ModelDescription, layout: ParallelLayout) -> tuple[UnitActivations, ...]:
    """Return a tuple with the activation bytes of one layer of each group in ``description.units``."""
    size, by_tokens = itemsize(layout), layout.sequence_parallel
    if not layout.kernels.measures_arrays and description.shape is not None:
        shape = description.shape
        kernels = layout.kernels
        keeps_operations = layout.recompute == "selective" and kernels.again_share > 0
        return _published(
            shape,
            layout.tensor,
            layout.context,
            size,
            "operations" if keeps_operations else layout.recompute,
            by_tokens,
            kernels.tiles_attention,
        )
    return _ours(description, layout.tensor, layout.context, size, by_tokens, layout.expert)


def is_mostly_scores(description: ModelDescription, layout: ParallelLayout) -> bool:
    """Return True if stored attention scores take over half of the activation memory of a transformer block."""
    if layout.kernels.tiles_attention or description.shape is None or layout.recompute != "none":
        return False
    block = _published_block(description.shape, description.shape.context / layout.context, itemsize(layout))
    around = layout.tensor if layout.sequence_parallel else 1
    return block.scores / layout.tensor > block.between / around + block.cut / layout.tensor


def context_share(unit: ModelUnit, layout: ParallelLayout, samples: int) -> tuple[AttentionShare, str]:
    """Return (sizes of the attention of layer ``unit`` on one rank, name of the context-parallel method).

    ``samples``: number of samples per micro-batch.
    """
    return _share(unit, layout.tensor, layout.context, itemsize(layout), samples)


def _share(unit: ModelUnit, tensor: int, context: int, size: int, samples: int) -> tuple[AttentionShare, str]:
    attention = unit.attention
    assert attention is not None
    heads, shared = attention.heads // tensor, max(1, attention.kv_heads // tensor)
    share = AttentionShare(
        ranks=context,
        samples=samples,
        tokens=attention.context,
        heads=heads,
        shared=shared,
        size=attention.size,
        itemsize=size,
        window=attention.window,
    )
    # 16-bit tiles support only the head exchange, not the ring.
    return share, resolve_context_method("auto", context, heads, shared, ring=size != HALF_BYTES)


@lru_cache(maxsize=4096)
def _published(
    shape: TransformerShape, tensor: int, context: int, size: int, recompute: str, by_tokens: bool, is_tiled: bool
) -> tuple[UnitActivations, ...]:
    around = tensor if by_tokens else 1  # tensor ranks that shard activations between products
    tokens, wide = shape.context / context, shape.hidden / around
    border = size * tokens * wide
    mask = MASK * tokens * wide if shape.dropout else 0.0
    block = _published_block(shape, tokens, size)
    if is_tiled:
        block = block._replace(scores=0.0)
    whole = block.between / around + (block.cut + block.scores) / tensor
    saved = {
        "none": whole,
        "selective": whole - block.scores / tensor,
        "operations": border + block.cut / tensor / 2,  # attention and every second product
        "full": border,
    }[recompute]
    held = block.held_between / around + block.held_cut / tensor
    logits = LOGITS * tokens * shape.vocabulary / tensor
    return (
        UnitActivations(kept=mask),
        UnitActivations(kept=saved, held=held, again=whole - saved),
        UnitActivations(kept=2 * border + logits, held=border + logits),
    )


def _published_block(shape: TransformerShape, tokens: float, size: int) -> BlockActivations:
    # The formulas of arXiv:2205.05198. ``size``: bytes per element.
    hidden, wide, often = shape.hidden, inner(shape), shape.experts_per_token
    width = shape.head_size or hidden // shape.heads
    query, kv = shape.heads * width, (shape.kv_heads or shape.heads) * width
    rises = 2 * wide if shape.gated else wide
    masks = 2 * MASK * hidden if shape.dropout else 0  # after attention and feed-forward
    routed = 1 + often if shape.experts > 1 else 1  # the router's input, and a copy per expert
    norms, inputs = 2 * size * hidden, (1 + routed) * size * hidden
    heads = size * (query + 2 * kv) + size * query  # query, key and value; input of the projection
    forward = often * size * (rises + wide)  # inputs of the activation and of the second linear
    dropped = MASK + size if shape.dropout else 0
    scores = shape.heads * shape.context * (size + dropped)  # per token: softmax, mask, dropped softmax
    return BlockActivations(
        between=tokens * (norms + inputs + masks),
        cut=tokens * (heads + forward),
        scores=tokens * scores,
        # Gradients of outputs: sharded for query, key, value and first linear; replicated for both residual branches.
        held_between=tokens * (inputs + 2 * size * hidden),
        held_cut=tokens * (2 * size * query + 2 * size * kv + often * size * (wide + rises)),
    )


@lru_cache(maxsize=1024)
def _ours(
    description: ModelDescription, tensor: int, context: int, itemsize: int, by_tokens: bool, expert: int
) -> tuple[UnitActivations, ...]:
    split, size = TensorSplit(ranks=tensor, by_tokens=by_tokens), itemsize / context
    per_unit: list[UnitActivations] = []
    for number, unit in enumerate(description.units):
        assert unit.counted is not None, f"{description.name} was made without counts; use `planner.model.transformer`"
        saved = sum(map(split.elements, (*unit.counted.kept, *_received(unit, expert))))
        held = sum(map(split.elements, _held(unit)))
        border = 0
        if number:
            before = description.units[number - 1].counted
            assert before is not None
            border = split.between(before.kept[-1].size if description.shape is None else before.kept[0].size)
        kept = size * saved
        if context > 1 and unit.attention is not None:
            kept += itemsize * kept_elements(*_share(unit, tensor, context, itemsize, 1))
        per_unit.append(UnitActivations(kept=kept, held=size * held, border=size * border))
    return tuple(per_unit)


def _held(unit: ModelUnit) -> tuple[KeptArray, ...]:
    # These arrays are kept between the input-gradient and the weight-gradient pass of a split backward.
    assert unit.counted is not None
    if unit.name == "embedding":
        return unit.counted.kept[:1]
    if unit.attention is not None:
        tokens, hidden = unit.products[0].rows, unit.products[0].inner
        # The router and its experts have an unsplit backward.
        split = [product for product in unit.products if product.cut and product.experts == 1]
        columns = sum(product.inner * product.columns for product in split) // hidden
        return KeptArray(len(split) * tokens * hidden), KeptArray(tokens * columns, cut=True)
    product = unit.products[-1]
    outputs = KeptArray(product.rows * product.columns, cut=bool(product.cut))
    inputs = KeptArray(0 if unit.first else product.rows * product.inner)
    return inputs, outputs


def _received(unit: ModelUnit, expert: int) -> tuple[KeptArray, ...]:
    sizes = [round(p.rows * p.experts * p.share) * p.inner for p in unit.products if p.experts > 1]
    rows = [KeptArray(size, whole=True) for size in sizes]
    return tuple(rows[:1]) if expert > 1 else ()


def row_bytes(description: ModelDescription, layout: ParallelLayout, unit_indices: tuple[int, ...]) -> float:
    """Return the bytes of tokens that a rank sends to experts per micro-batch, in the layer with the most bytes.

    ``unit_indices``: layers of the rank, as indices in ``description.units``.
    """
    if layout.expert == 1:
        return 0.0
    rows = [array.size for place in unit_indices for array in _received(description.units[place], layout.expert)]
    return float(itemsize(layout) * layout.microbatch * -(-max(rows, default=0) // layout.context))


def recomputed_one_by_one(description: ModelDescription, layout: ParallelLayout) -> float:
    """Return the peak activation bytes per sample if backward recomputes the activations of one block at a time."""
    size = itemsize(layout)
    peak = _again(description, layout.tensor, layout.sequence_parallel, layout.expert) * size / layout.context
    if layout.context == 1:
        return peak
    shares = [context_share(unit, layout, 1) for unit in description.units if unit.attention is not None]
    return peak + size * max((kept_elements(*share) for share in shares), default=0)  # of the current block


@lru_cache(maxsize=1024)
def _again(description: ModelDescription, tensor: int, by_tokens: bool, expert: int) -> int:
    split = TensorSplit(ranks=tensor, by_tokens=by_tokens)
    units = []
    for unit in description.units:
        assert unit.counted is not None
        kept = *_received(unit, expert), *unit.counted.kept  # the output is last
        split_unit = replace(unit.counted, kept=tuple(KeptArray(split.elements(array)) for array in kept))
        units += [split_unit] * unit.count
    return peak_with_recomputation(tuple(units))


def scratch_of(
    description: ModelDescription, layout: ParallelLayout, unit_indices: tuple[int, ...], *, accumulates: bool
) -> float:
    """Return the bytes of temporary arrays that hpcdist's kernels need on a device for the layers ``unit_indices``.

    ``unit_indices``: indices in ``description.units``. ``accumulates``: True if a step sums the gradients of several
    micro-batches.
    """
    # Temporary arrays of the same name share memory. Accumulation adds a temporary weight gradient. Float32 copies of
    # 16-bit parameters and gradients are not included.
    adds = accumulates and layout.computes_in == layout.precision
    sizes = layout.tensor, layout.context, itemsize(layout), layout.sequence_parallel, layout.microbatch
    return _scratch(description, unit_indices, *sizes, adds, layout.expert)


@lru_cache(maxsize=8192)
def _scratch(
    description: ModelDescription,
    unit_indices: tuple[int, ...],
    tensor: int,
    context: int,
    size: int,
    by_tokens: bool,
    samples: int,
    adds: bool,
    expert: int,
) -> float:
    split = TensorSplit(ranks=tensor, by_tokens=by_tokens)
    largest: dict[str, int] = {}
    for number in unit_indices:
        unit = description.units[number]
        assert unit.counted is not None
        by_name = {
            # The context axis does not shard tiles.
            name: split.scratch(array if array.most else array._replace(each=-(-array.each // context)), samples)
            for name, array in unit.counted.scratch.items()
        }
        if context > 1 and unit.attention is not None:
            by_name |= scratch_elements(*_share(unit, tensor, context, size, samples))
        for array in _received(unit, expert):
            names = ("arrived", "dout", "drows", "down.y")
            by_name |= {f"experts.{name}": samples * -(-array.size // context) for name in names}
        if adds and unit.products:
            by_name["linear.dweight"] = split.of(max(product.inner * product.columns for product in unit.products))
        for name, elements in by_name.items():
            largest[name] = max(largest.get(name, 0), elements)
    return float(size * sum(largest.values()))
