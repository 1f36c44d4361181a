"""Parameters, operations and activation memory of a model, in closed form from its configuration.

Operations are those that the mathematics asks for, 2 for each multiplication and addition of a matrix product, of a
sample of s tokens. Norms, activations, embeddings and the loss are not counted, and neither is what an implementation
computes twice (recomputation) or needlessly (scores of tokens that a causal attention does not look at):

    linear (i to o)     2 i o a token forward, as much for the gradient of its input and for that of its weight
    attention           4 h P forward, 8 h P back, with P = s (s + 1) / 2 pairs of tokens where it is causal, less
                        (s - w) (s - w + 1) / 2 with a window of w < s, else s^2; of packed samples the sum of that
                        over documents of s tokens each
    block of width h    linears h -> h + 2 k (query, key and value; k columns of keys), h -> h, and a feed-forward of
                        width f: h -> f, twice for "swiglu", and f -> h
    experts             those of the m that see a token, of the shared ones, and of the router, h -> E
    gpt, encoder        L blocks, and the head h -> v
    convolution         a linear of 9 c -> o for every pixel of its output

The first layer of an mlp or a convnet has no gradient of its input. A step of a gpt is about 6 N operations a token for
N parameters of matrices (Kaplan et al., arXiv:2001.08361), and 6 L h s more for causal attention. PaLM
(arXiv:2204.02311, appendix B) counts attention as if it were not causal, 12 L h s: utilisations after it are higher.

Memory is that of the arena (`hpcdist.models.runtime.arena`): what forward leaves for backward, and scratch that all
stages share, each name as large as the largest of them. In numbers a sample, with a heads, f' = 2 f for "swiglu", and
n = 2 statistics of a row for the norm "layer", 1 for "rms":

    block               kept s (5 h + (h + 2 k) + f' + f + 2 a + 2 n), scratch s (max(f, h) + h + 2 k + a)
    experts, m a token  instead of f' + f: kept s (h + m (2 h + f' + f + 3) + E), scratch s (m (f + h + 1) + h), and
                        those of the shared ones, a feed-forward beside them; nothing is dropped
    head                kept s (h + v + n + 1), scratch 2 s h
    embedding           kept s h

With recomputation (`hpcdist.models.runtime.split_backward`) a block keeps s h, and one of them has the rest beside it.
Tiles of attention and unfolded pictures, a cache full of them, come on top; small integers that the data has, and what
a BLAS takes, are not counted.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import NamedTuple, TypedDict, Unpack

from hpcdist.models.attention.tiles import LONG, QUERY_BLOCK, TILE
from hpcdist.models.config import ModelConfig
from hpcdist.models.experts.router import capacity
from hpcdist.models.layers.convolution import CACHE_BYTES, SIZE, output_side
from hpcdist.models.runtime.arena import MAX_WASTE


class KeptArray(NamedTuple):
    """An array that a forward leaves for its backward: numbers a sample; what cuts it is as for `Scratch`."""

    size: int
    cut: bool = False
    whole: bool = False


class Scratch(NamedTuple):
    """Memory that stages share: numbers a sample, but no more than ``most`` for all of them (0: no limit).

    Tensor parallelism cuts it, or where it is ``whole``, nothing does: not even one by tokens.
    """

    each: int
    most: int = 0
    cut: bool = False
    whole: bool = False

    def of(self, samples: int) -> int:
        """Return the numbers for so many samples."""
        return min(self.each * samples, self.most) if self.most else self.each * samples


@dataclass(frozen=True, kw_only=True)
class UnitCounts:
    """One stage: its own parameters; operations, and numbers kept from forward to backward, for a sample.

    ``kept`` has the arrays in the order in which they are taken, the output last; ``scratch`` goes by name.
    """

    parameters: int
    linear: int = 0  # operations forward
    attention: int = 0
    first: bool = False  # its input is data: it has no gradient
    kept: tuple[KeptArray, ...] = ()
    scratch: Mapping[str, Scratch] = field(default_factory=dict)

    @property
    def forward(self) -> int:
        """Operations forward."""
        return self.linear + self.attention

    @property
    def backward(self) -> int:
        """Operations of both gradients: attention, which has no weights, does four products instead of two."""
        return (1 if self.first else 2) * self.linear + 2 * self.attention


def attention_pairs(context: int, *, causal: bool, window: int = 0) -> int:
    """Return how many pairs of tokens an attention over ``context`` tokens looks at; ``window`` 0: there is none."""
    hidden = max(0, context - window) if window else 0
    return (context * (context + 1) - hidden * (hidden + 1)) // 2 if causal else context * context


class DocumentPairs(NamedTuple):
    """Pairs of tokens within the documents of a packed sample, in the mean: all of them, and those looked at."""

    every: float
    seen: float


def embedding_counts(config: ModelConfig, context: int) -> UnitCounts:
    """Return the counts of the first stage of a transformer."""
    wide = context * config.hidden
    return UnitCounts(
        parameters=config.vocabulary * config.hidden + (wide if config.positions == "learned" else 0),
        kept=(KeptArray(wide),),
        scratch=_dropout_scratch(config, wide),
    )


def head_counts(config: ModelConfig, context: int) -> UnitCounts:
    """Return the counts of the last stage of a transformer, with the loss."""
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


def block_counts(config: ModelConfig, context: int, documents: DocumentPairs | None = None) -> UnitCounts:
    """Return the counts of a block of a transformer; attention stays within ``documents``, where samples are packed."""
    pairs = attention_pairs(context, causal=config.kind == "gpt", window=config.window)
    hidden, wide = config.hidden, config.hidden + 2 * config.kv_width
    grouped = config.kv_width != hidden
    half = _experts(config, context) if config.experts else _feed_forward(config, context, config.inner)
    matrices = hidden * wide + hidden * hidden
    biases = wide + hidden if config.bias else 0
    like = KeptArray(context * hidden)
    columns: tuple[int, ...] = (hidden, wide - hidden) if grouped else (wide,)
    normal = like, KeptArray(norm_statistics(config) * context)
    heads = *(KeptArray(context * width, cut=True) for width in columns), KeptArray(context * hidden, cut=True)
    sums = KeptArray(2 * config.heads * context, cut=True)
    return UnitCounts(
        parameters=matrices + biases + 2 * norm_statistics(config) * hidden + half.parameters,
        linear=2 * context * matrices + half.linear,
        attention=round(4 * hidden * (pairs if documents is None else documents.seen)),
        kept=(
            *(*normal, *heads, sums, like),
            *(*normal, *half.kept),
        ),
        scratch={
            "linear.dx": Scratch(context * hidden, cut=True),
            **half.scratch,
            "attention.dqkv": Scratch(context * columns[0], cut=True),
            **({"attention.dkv": Scratch(context * columns[1], cut=True)} if grouped else {}),
            **({"block.dquery": Scratch(context * hidden)} if grouped else {}),
            "attention.dots": Scratch(context * config.heads, cut=True),
            **_tile_scores(config, context),
            **_dropout_scratch(config, context * hidden),
        },
    )


def _feed_forward(config: ModelConfig, context: int, inner: int) -> UnitCounts:
    """Return the counts of a feed-forward of the width ``inner``, without the norm before it."""
    hidden, rises = config.hidden, 2 * inner if config.activation == "swiglu" else inner
    matrices = hidden * rises + inner * hidden
    return UnitCounts(
        parameters=matrices + (rises + hidden if config.bias else 0),
        linear=2 * context * matrices,
        kept=(
            *(KeptArray(context * width, cut=True) for width in (rises, inner)),
            KeptArray(context * hidden),
        ),
        scratch={"linear.dx": Scratch(context * max(inner, hidden), cut=True)},
    )


def expert_rows(config: ModelConfig, context: int) -> int:
    """Return the most rows that the experts multiply for a sample: choices of its tokens, without those dropped."""
    return min(context * config.experts_per_token, config.experts * capacity(config, context))


def _experts(config: ModelConfig, context: int) -> UnitCounts:
    """Return the counts of a mixture of experts with its router, and with the feed-forward that is shared."""
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
    """Return the operations forward of the router and the experts of a block for a sample; 0 without any."""
    if not config.experts:
        return 0
    each = _feed_forward(config, 1, config.expert_inner).linear
    return 2 * context * config.experts * config.hidden + expert_rows(config, context) * each


def _tile_scores(config: ModelConfig, context: int) -> dict[str, Scratch]:
    """Return the scores that attention has at a time, forward and back: samples, or heads of one, that fit a tile."""
    short, long = min(QUERY_BLOCK, context), min(LONG, context)
    shared = config.kv_heads or config.heads
    per_sample = config.heads * short * long
    at_a_time = (
        TILE // per_sample * per_sample or min(shared, max(1, TILE * shared // per_sample)) * per_sample // shared
    )
    size = config.hidden // config.heads
    return {
        "attention.scores": Scratch(per_sample, at_a_time),
        "attention.gradients": Scratch(per_sample, at_a_time),
        "attention.part": Scratch(per_sample // short * size, at_a_time // short * size),
        "attention.shrink": Scratch(per_sample // long, at_a_time // long),
    }


def norm_statistics(config: ModelConfig) -> int:
    """Return how many vectors a norm has, and how many numbers it keeps of a row."""
    return 1 if config.norm == "rms" else 2


def _dropout_scratch(config: ModelConfig, size: int) -> dict[str, Scratch]:
    return {"dropout.dx": Scratch(size)} if config.dropout else {}


def dense_counts(config: ModelConfig, inputs: int, outputs: int, *, first: bool, last: bool) -> UnitCounts:
    """Return the counts of a layer of an mlp: with an activation, or with the loss."""
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
    """Return the counts of a convolution between pictures (height, width, channels), with norm and activation."""
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
    """Return the counts of the head of a convnet: the mean over all pixels, and a linear, with the loss."""
    channels = picture[2]
    return UnitCounts(
        parameters=(channels + 1) * classes,
        linear=2 * channels * classes,
        kept=(KeptArray(channels), KeptArray(classes), KeptArray(1)),
        scratch={"linear.dx": Scratch(channels), "convnet.dx": Scratch(prod(picture))},
    )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A model in numbers: by stage, with properties for all of it. Operations are those for one sample."""

    units: tuple[UnitCounts, ...]

    @property
    def parameters(self) -> int:
        """Numbers that are trained; a tied tensor counts once."""
        return sum(unit.parameters for unit in self.units)

    @property
    def forward_flops(self) -> int:
        """Operations forward."""
        return sum(unit.forward for unit in self.units)

    @property
    def backward_flops(self) -> int:
        """Operations back."""
        return sum(unit.backward for unit in self.units)

    @property
    def flops(self) -> int:
        """Operations of a training step, without recomputation: the numerator of a utilisation."""
        return self.forward_flops + self.backward_flops

    def activation_bytes(self, samples: int, *, recompute: bool = False, itemsize: int = 4) -> int:
        """Return the most that activations of one micro-batch take, with numbers of ``itemsize`` bytes.

        ``recompute``: all but the first and the last stage are computed again in backward.
        """
        names = {name for unit in self.units for name in unit.scratch}
        scratch = sum(
            max(unit.scratch[name].of(samples) for unit in self.units if name in unit.scratch) for name in names
        )
        sizes = chain.from_iterable([array.size for array in unit.kept] for unit in self.units)
        return ((peak_with_recomputation(self.units) if recompute else sum(sizes)) * samples + scratch) * itemsize


def peak_with_recomputation(units: tuple[UnitCounts, ...]) -> int:
    """Return the most numbers a sample where stages between the first and the last keep a copy of their output only.

    Memory that one stage gives back serves the next, where it is no more than `MAX_WASTE` times too large, or grows to
    no more than that: as the arena does. A backward takes what the forward of its stage has given back.
    """
    free: list[int] = []
    total = 0

    def take(sizes: Iterable[int]) -> list[int]:
        nonlocal total
        taken = []
        for size in sizes:
            place = bisect_left(free, size)
            if place < len(free) and free[place] <= MAX_WASTE * size:
                taken.append(free.pop(place))
                continue
            grown = free.pop(place - 1) if place and size <= MAX_WASTE * free[place - 1] else 0
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
    """Sizes of the data of a model: ``context`` of a text, ``features`` of rows, the others of pictures; 0 for none."""

    context: int
    features: int
    height: int
    width: int
    channels: int
    classes: int


def counts(config: ModelConfig, *, documents: DocumentPairs | None = None, **sizes: Unpack[InputSizes]) -> Counts:
    """Return the numbers of the model that `hpcdist.models.build` makes of the same sizes (local, no model)."""
    if config.kind == "mlp":
        return Counts(units=_mlp(config, sizes.get("features", 0), sizes.get("classes", 0)))
    if config.kind == "convnet":
        picture = sizes.get("height", 0), sizes.get("width", 0), sizes.get("channels", 0)
        return Counts(units=_convnet(config, picture, sizes.get("classes", 0)))
    return Counts(units=_transformer(config, sizes.get("context", 0), documents))


def _transformer(config: ModelConfig, context: int, documents: DocumentPairs | None) -> tuple[UnitCounts, ...]:
    return (
        embedding_counts(config, context),
        *[block_counts(config, context, documents)] * config.layers,
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
