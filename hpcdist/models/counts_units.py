"""The stages of a model in closed form; see `hpcdist.models.counts` for what is counted, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from hpcdist.models.attention_tiles import LONG, QUERY_BLOCK, TILE
from hpcdist.models.config import ModelConfig
from hpcdist.models.convolution import CACHE_BYTES, SIZE


class Kept(NamedTuple):
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
class Unit:
    """One stage: its own parameters; operations, and numbers kept from forward to backward, for a sample.

    ``kept`` has the arrays in the order in which they are taken, the output last; ``scratch`` goes by name.
    """

    parameters: int
    linear: int = 0  # operations forward
    attention: int = 0
    first: bool = False  # its input is data: it has no gradient
    kept: tuple[Kept, ...] = ()
    scratch: Mapping[str, Scratch] = field(default_factory=dict)

    @property
    def forward(self) -> int:
        """Operations forward."""
        return self.linear + self.attention

    @property
    def backward(self) -> int:
        """Operations of both gradients: attention, which has no weights, does four products instead of two."""
        return (1 if self.first else 2) * self.linear + 2 * self.attention


def pairs(context: int, *, causal: bool) -> int:
    """Return how many pairs of tokens an attention over ``context`` tokens looks at."""
    return context * (context + 1) // 2 if causal else context * context


def embedding(config: ModelConfig, context: int) -> Unit:
    """Return the first stage of a transformer."""
    wide = context * config.hidden
    return Unit(
        parameters=config.vocabulary * config.hidden + (wide if config.positions == "learned" else 0),
        kept=(Kept(wide),),
        scratch=_dropped(config, wide),
    )


def head(config: ModelConfig, context: int) -> Unit:
    """Return the last stage of a transformer, with the loss."""
    wide, matrix = context * config.hidden, config.vocabulary * config.hidden
    rows = statistics_of(config)
    return Unit(
        parameters=rows * config.hidden + (0 if config.tied else matrix),
        linear=2 * context * matrix,
        kept=(Kept(wide), Kept(rows * context), Kept(context * config.vocabulary, cut=True), Kept(context, whole=True)),
        scratch={"linear.dx": Scratch(wide, whole=True), "norm.dx": Scratch(wide)},
    )


def block(config: ModelConfig, context: int) -> Unit:
    """Return one of the blocks of a transformer."""
    hidden, wide, inner = config.hidden, config.hidden + 2 * config.kv_width, config.inner
    grouped = config.kv_width != hidden
    rises = 2 * inner if config.activation == "swiglu" else inner
    matrices = hidden * wide + hidden * hidden + hidden * rises + inner * hidden
    biases = wide + hidden + rises + hidden if config.bias else 0
    like = Kept(context * hidden)
    columns: tuple[int, ...] = (hidden, wide - hidden) if grouped else (wide,)
    normal = like, Kept(statistics_of(config) * context)
    heads = *(Kept(context * each, cut=True) for each in columns), Kept(context * hidden, cut=True)
    sums = Kept(2 * config.heads * context, cut=True)
    return Unit(
        parameters=matrices + biases + 2 * statistics_of(config) * hidden,
        linear=2 * context * matrices,
        attention=4 * hidden * pairs(context, causal=config.kind == "gpt"),
        kept=(
            *(*normal, *heads, sums, like),
            *(*normal, Kept(context * rises, cut=True), Kept(context * inner, cut=True), like),
        ),
        scratch={
            "linear.dx": Scratch(context * max(inner, hidden), cut=True),
            "attention.dqkv": Scratch(context * columns[0], cut=True),
            **({"attention.dkv": Scratch(context * columns[1], cut=True)} if grouped else {}),
            **({"block.dquery": Scratch(context * hidden)} if grouped else {}),
            "attention.dots": Scratch(context * config.heads, cut=True),
            **_tiles(config, context),
            **_dropped(config, context * hidden),
        },
    )


def _tiles(config: ModelConfig, context: int) -> dict[str, Scratch]:
    """Return the scores that attention has at a time, forward and back: samples, or heads of one, that fit a tile."""
    short, long = min(QUERY_BLOCK, context), min(LONG, context)
    shared = config.kv_heads or config.heads
    each = config.heads * short * long
    some = TILE // each * each or min(shared, max(1, TILE * shared // each)) * each // shared
    size = config.hidden // config.heads
    return {
        "attention.scores": Scratch(each, some),
        "attention.gradients": Scratch(each, some),
        "attention.part": Scratch(each // short * size, some // short * size),
        "attention.shrink": Scratch(each // long, some // long),
    }


def statistics_of(config: ModelConfig) -> int:
    """Return how many vectors a norm has, and how many numbers it keeps of a row."""
    return 1 if config.norm == "rms" else 2


def _dropped(config: ModelConfig, size: int) -> dict[str, Scratch]:
    return {"dropout.dx": Scratch(size)} if config.dropout else {}


def dense(config: ModelConfig, inputs: int, outputs: int, *, first: bool, last: bool) -> Unit:
    """Return a layer of an mlp: with an activation, or with the loss."""
    return Unit(
        parameters=(inputs + 1) * outputs,
        linear=2 * inputs * outputs,
        first=first,
        kept=(Kept(outputs), Kept(1 if last else outputs)),
        scratch={"linear.dx": Scratch(0 if first else inputs), **({} if last else _dropped(config, outputs))},
    )


def convolution(before: tuple[int, int, int], after: tuple[int, int, int], statistics: int, *, first: bool) -> Unit:
    """Return a convolution from pictures (height, width, channels) to others, with its norm and activation."""
    pixels, weight = after[0] * after[1], SIZE * SIZE * before[2] * after[2]
    row = SIZE * SIZE * before[2] * pixels  # of unfolded neighbourhoods
    y = Kept(prod(after))
    return Unit(
        parameters=weight + (1 + statistics) * after[2],
        linear=2 * weight * pixels,
        first=first,
        kept=(y, y, Kept(statistics * pixels), y),
        scratch={
            "convolution.rows": Scratch(row, max(row, CACHE_BYTES // 4 // row * row)),
            "convolution.dx": Scratch(0 if first else prod(before)),
            "convolution.dweight": Scratch(weight, weight),
            "norm.dx": Scratch(prod(after)),
        },
    )


def pooled(picture: tuple[int, int, int], classes: int) -> Unit:
    """Return the head of a convnet: the mean over all pixels, and a linear, with the loss."""
    channels = picture[2]
    return Unit(
        parameters=(channels + 1) * classes,
        linear=2 * channels * classes,
        kept=(Kept(channels), Kept(classes), Kept(1)),
        scratch={"linear.dx": Scratch(channels), "convnet.dx": Scratch(prod(picture))},
    )
