"""Parameters, FLOPs and activation memory of a model in closed form, from its configuration.

FLOPs are 2 per multiply-add of the matrix products. Not counted: norms, activations, embeddings, the loss,
recomputation, and scores that a causal mask hides. For a sample of s tokens, width h, k columns of keys, feed-forward
width f, m of E experts per token, v tokens in the vocabulary, and L blocks:

    linear (i to o)     2 i o per token forward; the same for each of the two gradients
    attention           4 h P forward, 8 h P backward, with P query-key pairs: s^2, or s (s + 1) / 2 if causal, minus
                        (s - w) (s - w + 1) / 2 with a window w < s; for packed samples, the sum over documents
    block               linears h -> h + 2 k and h -> h, and a feed-forward of width f
    experts             the m experts of a token, the shared ones, and the router h -> E
    gpt, encoder        L blocks, and the head h -> v
    convolution         a linear 9 c -> o for every output pixel, from c to o channels

Memory is the size of `hpcdist.models.arena`: activations kept for backward, and the largest scratch of each
name. In numbers per sample, with f' = 2 f for "swiglu" (else f), a heads, and n = 2 statistics per row (1 for "rms"):

    block               kept s (5 h + (h + 2 k) + f' + f + 2 a + 2 n), scratch s (max(f, h) + h + 2 k + a)
    experts             instead of f' + f: kept s (h + m (2 h + f' + f + 3) + E), scratch s (m (f + h + 1) + h), plus
                        the shared feed-forward; no dropped tokens
    head                kept s (h + v + n + 1), scratch 2 s h
    embedding           kept s h

With recomputation each block keeps s h, and one block at a time has the rest too.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple, TypedDict, Unpack

from hpcdist.models.arena import MAX_WASTE
from hpcdist.models.attention.tiles import LONG, QUERY_BLOCK, TILE
from hpcdist.models.config import ModelConfig
from hpcdist.models.experts.router import capacity
from hpcdist.models.layers.convolution import CACHE_BYTES, SIZE, output_side


class KeptArray(NamedTuple):
    """Size of an array that the forward pass keeps for the backward pass, in elements per sample."""

    # `cut`: sharded by tensor parallelism. `whole`: not sharded by sequence parallelism.

    size: int
    cut: bool = False
    whole: bool = False


class Scratch(NamedTuple):
    """Size of a scratch array of a model stage, in elements."""

    each: int  # per sample
    most: int = 0  # in total; 0: no limit
    cut: bool = False  # sharded by tensor parallelism
    whole: bool = False  # not sharded by sequence parallelism

    def of(self, samples: int) -> int:
        """Return the number of elements for a micro-batch of ``samples`` samples."""
        return min(self.each * samples, self.most) if self.most else self.each * samples


@dataclass(frozen=True, kw_only=True)
class UnitCounts:
    """Parameters, FLOPs per sample and activation elements per sample of one model stage."""

    parameters: int
    linear: int = 0  # forward FLOPs
    attention: int = 0
    first: bool = False  # the input is data and has no gradient
    kept: tuple[KeptArray, ...] = ()  # kept for the backward pass, in the order of allocation
    scratch: Mapping[str, Scratch] = field(default_factory=dict)  # by name; equal names in several stages share memory

    @property
    def forward(self) -> int:
        return self.linear + self.attention

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass per sample."""
        return (1 if self.first else 2) * self.linear + 2 * self.attention


def attention_pairs(context: int, *, causal: bool, window: int = 0) -> int:
    """Return the number of query-key pairs that attention computes for a sample of ``context`` tokens."""
    hidden = max(0, context - window) if window else 0
    return (context * (context + 1) - hidden * (hidden + 1)) // 2 if causal else context * context


class DocumentPairs(NamedTuple):
    """Mean number of query-key pairs per packed sample. Only pairs within a document are counted."""

    every: float
    seen: float  # pairs that a causal mask does not hide


def embedding_counts(config: ModelConfig, context: int) -> UnitCounts:
    """Return the `UnitCounts` of a transformer's embedding for samples of ``context`` tokens."""
    wide = context * config.hidden
    return UnitCounts(
        parameters=config.vocabulary * config.hidden + (wide if config.positions == "learned" else 0),
        kept=(KeptArray(wide),),
        scratch=_dropout_scratch(config, wide),
    )


def head_counts(config: ModelConfig, context: int) -> UnitCounts:
    """Return the `UnitCounts` of a transformer's head and loss for samples of ``context`` tokens."""
    wide, matrix = context * config.hidden, config.vocabulary * config.hidden
    rows = norm_statistics(config)
    return UnitCounts(
        parameters=rows * config.hidden + (0 if config.tied else matrix),
        linear=2 * context * matrix,
        kept=(
            KeptArray(wide),
            KeptArray(rows * context),
            KeptArray(context * config.vocabulary, cut=True),
            KeptArray(context, whole=True),
        ),
        scratch={"linear.dx": Scratch(wide, whole=True), "norm.dx": Scratch(wide)},
    )


def block_counts(
    config: ModelConfig, context: int, documents: DocumentPairs | None = None, block: int = 1
) -> UnitCounts:
    """Return the `UnitCounts` of a transformer block. ``documents``: query-key pairs of packed samples, or None.

    ``block``: number of the block, which selects its window.
    """
    pairs = attention_pairs(context, causal=config.kind == "gpt", window=config.window_of(block))
    hidden, query, keys = config.hidden, config.query_width, config.kv_width
    wide, grouped = query + 2 * keys, config.separates_query
    half = _experts(config, context) if config.experts else _feed_forward(config, context, config.inner)
    matrices = hidden * wide + query * hidden
    biases = wide * config.has_bias("qkv") + hidden * config.has_bias("projection")
    like = KeptArray(context * hidden)
    columns: tuple[int, ...] = (query, wide - query) if grouped else (wide,)
    normal = like, KeptArray(norm_statistics(config) * context)
    head_norms = _head_norms(config, context)
    sums = KeptArray(2 * config.heads * context, cut=True)
    return UnitCounts(
        parameters=matrices + biases + 2 * norm_statistics(config) * hidden + half.parameters + head_norms.parameters,
        linear=2 * context * matrices + half.linear,
        attention=round(4 * query * (pairs if documents is None else documents.seen)),
        kept=(
            *normal,
            *(KeptArray(context * width, cut=True) for width in columns),
            *head_norms.kept,
            *(KeptArray(context * query, cut=True), sums, like),
            *(*normal, *half.kept),
        ),
        scratch={
            "linear.dx": Scratch(context * max(query, hidden), cut=True),
            **half.scratch,
            "attention.dqkv": Scratch(context * columns[0], cut=True),
            **({"attention.dkv": Scratch(context * columns[1], cut=True)} if grouped else {}),
            **head_norms.scratch,
            **({"block.dquery": Scratch(context * hidden)} if grouped else {}),
            "attention.dots": Scratch(context * config.heads, cut=True),
            **_tile_scores(config, context),
            **_dropout_scratch(config, context * hidden),
        },
    )


def _head_norms(config: ModelConfig, context: int) -> UnitCounts:
    # Norms of query and key heads.
    if config.query_key_norm == "none":
        return UnitCounts(parameters=0)
    query, keys, size = config.query_width, config.kv_width, config.head_width
    widths = query, query // size, keys, keys, keys // size  # y and statistics; a copy of the keys first
    return UnitCounts(
        parameters=2 * size,
        kept=tuple(KeptArray(context * width, cut=True) for width in widths),
        scratch={
            "query_norm.dx": Scratch(context * query, cut=True),
            **{name: Scratch(context * keys, cut=True) for name in ("key_norm.dx", "block.dkeys")},
        },
    )


def _feed_forward(config: ModelConfig, context: int, inner: int) -> UnitCounts:
    hidden, rises = config.hidden, 2 * inner if config.activation == "swiglu" else inner
    matrices = hidden * rises + inner * hidden
    return UnitCounts(
        parameters=matrices + (rises + hidden if config.has_bias("feed_forward") else 0),
        linear=2 * context * matrices,
        kept=(
            *(KeptArray(context * width, cut=True) for width in (rises, inner)),
            KeptArray(context * hidden),
        ),
        scratch={"linear.dx": Scratch(context * max(inner, hidden), cut=True)},
    )


def expert_rows(config: ModelConfig, context: int) -> int:
    """Return the largest number of (token, expert) pairs in a sample of ``context`` tokens, after capacity drops."""
    return min(context * config.experts_per_token, config.experts * capacity(config, context))


def _experts(config: ModelConfig, context: int) -> UnitCounts:
    hidden, inner, rows = config.hidden, config.expert_inner, expert_rows(config, context)
    one, router = _feed_forward(config, 1, inner), config.experts * hidden
    shared = _feed_forward(config, context, config.shared_experts * inner) if config.shared_experts else None
    choices = KeptArray(context * config.experts_per_token, whole=True)
    travelling = KeptArray(rows * hidden, whole=True)
    rises, falls, _ = (KeptArray(rows * array.size, cut=array.cut) for array in one.kept)
    return UnitCounts(
        parameters=router + config.experts * one.parameters + (shared.parameters if shared else 0),
        linear=2 * context * router + rows * one.linear + (shared.linear if shared else 0),
        kept=(
            *(KeptArray(context * config.experts, whole=True), choices, choices, choices),
            *(travelling, rises, falls, travelling, KeptArray(context * hidden)),
            *(shared.kept if shared else ()),
        ),
        scratch={
            "experts.dgates": Scratch(choices.size, whole=True),
            "experts.down.dx": Scratch(rows * inner, cut=True),
            "experts.up.dx": Scratch(rows * hidden, whole=True),
            "experts.dx": Scratch(context * hidden, whole=True),
            **(shared.scratch if shared else {}),
        },
    )


def routed_flops(config: ModelConfig, context: int) -> int:
    """Return the forward FLOPs per sample of a block's router and experts, or 0 for a block without experts."""
    if not config.experts:
        return 0
    each = _feed_forward(config, 1, config.expert_inner).linear
    return 2 * context * config.experts * config.hidden + expert_rows(config, context) * each


def _tile_scores(config: ModelConfig, context: int) -> dict[str, Scratch]:
    short, long = min(QUERY_BLOCK, context), min(LONG, context)
    shared = config.kv_heads or config.heads
    per_sample = config.heads * short * long
    # A tile has whole samples, or heads of one sample.
    at_a_time = (
        TILE // per_sample * per_sample or min(shared, max(1, TILE * shared // per_sample)) * per_sample // shared
    )
    size = config.head_width
    return {
        "attention.scores": Scratch(per_sample, at_a_time),
        "attention.gradients": Scratch(per_sample, at_a_time),
        "attention.part": Scratch(per_sample // short * size, at_a_time // short * size),
        "attention.shrink": Scratch(per_sample // long, at_a_time // long),
    }


def norm_statistics(config: ModelConfig) -> int:
    """Return the number of statistics per row of the model's norms: 1 for RMS norm, 2 for layer norm."""
    return 1 if config.norm == "rms" else 2


def _dropout_scratch(config: ModelConfig, size: int) -> dict[str, Scratch]:
    return {"dropout.dx": Scratch(size)} if config.dropout else {}


def dense_counts(config: ModelConfig, inputs: int, outputs: int, *, first: bool, last: bool) -> UnitCounts:
    """Return the `UnitCounts` of an mlp layer with ``inputs`` inputs and ``outputs`` outputs."""
    return UnitCounts(
        parameters=(inputs + 1) * outputs,
        linear=2 * inputs * outputs,
        first=first,
        kept=(KeptArray(outputs), KeptArray(1 if last else outputs)),
        scratch={"linear.dx": Scratch(0 if first else inputs), **({} if last else _dropout_scratch(config, outputs))},
    )


def convolution_counts(
    before: tuple[int, int, int], after: tuple[int, int, int], statistics: int, *, first: bool
) -> UnitCounts:
    """Return the `UnitCounts` of a convolution and its norm, from shape ``before`` to shape ``after``."""
    pixels, weight = after[0] * after[1], SIZE * SIZE * before[2] * after[2]
    row = SIZE * SIZE * before[2] * pixels  # of unfolded neighbourhoods
    y = KeptArray(prod(after))
    return UnitCounts(
        parameters=weight + (1 + statistics) * after[2],
        linear=2 * weight * pixels,
        first=first,
        kept=(y, y, KeptArray(statistics * pixels), y),
        scratch={
            "convolution.rows": Scratch(row, max(row, CACHE_BYTES // 4 // row * row)),
            "convolution.dx": Scratch(0 if first else prod(before)),
            "convolution.dweight": Scratch(weight, weight),
            "norm.dx": Scratch(prod(after)),
        },
    )


def pooling_counts(picture: tuple[int, int, int], classes: int) -> UnitCounts:
    """Return the `UnitCounts` of a convnet's head and loss, for inputs of shape ``picture``."""
    channels = picture[2]
    return UnitCounts(
        parameters=(channels + 1) * classes,
        linear=2 * channels * classes,
        kept=(KeptArray(channels), KeptArray(classes), KeptArray(1)),
        scratch={"linear.dx": Scratch(channels), "convnet.dx": Scratch(prod(picture))},
    )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters, FLOPs and memory of a model, per stage and in total. FLOPs are per sample."""

    units: tuple[UnitCounts, ...]

    @property
    def parameters(self) -> int:
        """Number of trained parameters. A tied tensor counts once."""
        return sum(unit.parameters for unit in self.units)

    @property
    def forward_flops(self) -> int:
        return sum(unit.forward for unit in self.units)

    @property
    def backward_flops(self) -> int:
        return sum(unit.backward for unit in self.units)

    @property
    def flops(self) -> int:
        """FLOPs of a training step per sample, without recomputation, as used for the MFU."""
        return self.forward_flops + self.backward_flops

    def activation_bytes(self, samples: int, *, recompute: bool = False, itemsize: int = 4) -> int:
        """Return the peak activation memory of a micro-batch of ``samples`` samples, in bytes."""
        names = {name for unit in self.units for name in unit.scratch}
        scratch = sum(
            max(unit.scratch[name].of(samples) for unit in self.units if name in unit.scratch) for name in names
        )
        sizes = chain.from_iterable([array.size for array in unit.kept] for unit in self.units)
        return ((peak_with_recomputation(self.units) if recompute else sum(sizes)) * samples + scratch) * itemsize


def peak_with_recomputation(units: tuple[UnitCounts, ...]) -> int:
    """Return the peak number of activation elements per sample, if all stages but the first and last are recomputed."""
    free: list[int] = []
    total = 0

    def take(sizes: Iterable[int]) -> list[int]:
        nonlocal total
        taken = []
        for size in sizes:
            index = bisect_left(free, size)
            if index < len(free) and free[index] <= MAX_WASTE * size:
                taken.append(free.pop(index))
                continue
            grown = free.pop(index - 1) if index and size <= MAX_WASTE * free[index - 1] else 0
            total += size - grown
            taken.append(size)
        return taken

    first, *between, last = ([array.size for array in unit.kept] for unit in units)
    take(first)
    for sizes in between:
        within = take(sizes)
        take(sizes[-1:])  # its copy
        for size in within:
            insort(free, size)
    take(last)
    return total


class InputSizes(TypedDict, total=False):
    """Sizes of one sample, which is a text, a table row or a picture. Sizes that do not apply are 0."""

    context: int
    features: int
    height: int
    width: int
    channels: int
    classes: int


def counts(config: ModelConfig, *, documents: DocumentPairs | None = None, **sizes: Unpack[InputSizes]) -> Counts:
    """Return the `Counts` of a model: parameters, FLOPs and memory. For the keyword arguments, see `InputSizes`."""
    if config.kind == "mlp":
        return Counts(units=_mlp(config, sizes.get("features", 0), sizes.get("classes", 0)))
    if config.kind == "convnet":
        picture = sizes.get("height", 0), sizes.get("width", 0), sizes.get("channels", 0)
        return Counts(units=_convnet(config, picture, sizes.get("classes", 0)))
    return Counts(units=_transformer(config, sizes.get("context", 0), documents))


def _transformer(config: ModelConfig, context: int, documents: DocumentPairs | None) -> tuple[UnitCounts, ...]:
    return (
        embedding_counts(config, context),
        *(block_counts(config, context, documents, block) for block in range(1, config.layers + 1)),
        head_counts(config, context),
    )


def _mlp(config: ModelConfig, features: int, classes: int) -> tuple[UnitCounts, ...]:
    widths = [features] + [config.hidden] * config.layers + [classes]
    layers = enumerate(zip(widths, widths[1:], strict=False))
    return tuple(dense_counts(config, *sizes, first=not layer, last=layer == config.layers) for layer, sizes in layers)


def _convnet(config: ModelConfig, picture: tuple[int, int, int], classes: int) -> tuple[UnitCounts, ...]:
    shape, units = picture, []
    for layer in range(config.layers):
        outputs, stride = config.hidden << layer // 2, 2 if layer and layer % 2 == 0 else 1
        before, shape = shape, (output_side(shape[0], stride), output_side(shape[1], stride), outputs)
        units.append(convolution_counts(before, shape, norm_statistics(config), first=not layer))
    return (*units, pooling_counts(shape, classes))
