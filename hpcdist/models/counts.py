"""What a model has and does, in closed form from its configuration: parameters, operations, memory of activations.

Operations are those that the mathematics asks for, 2 for each multiplication and addition of a matrix product, of a
sample of s tokens. Norms, activations, embeddings and the loss are not counted, and neither is what an implementation
computes twice (recomputation) or needlessly (scores of tokens that a causal attention does not look at):

    linear (i to o)     2 i o a token forward, as much for the gradient of its input and for that of its weight
    attention           4 h P forward, 8 h P back, with P = s (s + 1) / 2 pairs of tokens where it is causal, else s^2
    block of width h    linears h -> h + 2 k (query, key and value; k columns of keys), h -> h, and a feed-forward of
                        width f: h -> f, twice for "swiglu", and f -> h
    gpt, encoder        L blocks, and the head h -> v
    convolution         a linear of 9 c -> o for every pixel of its output

The first layer of an mlp or a convnet has no gradient of its input. A step of a gpt is about 6 N operations a token for
N parameters of matrices (Kaplan et al., arXiv:2001.08361), and 6 L h s more for causal attention. PaLM
(arXiv:2204.02311, appendix B) counts attention as if it were not causal, 12 L h s: utilisations after it are higher.

Memory is that of the arena (`hpcdist.models.arena`): what forward leaves for backward, and scratch that all stages
share, each name as large as the largest of them. In numbers a sample, with a heads, f' = 2 f for "swiglu", and n = 2
statistics of a row for the norm "layer", 1 for "rms":

    block               kept s (5 h + (h + 2 k) + f' + f + 2 a + 2 n), scratch s (max(f, h) + h + 2 k + a)
    head                kept s (h + v + n + 1), scratch 2 s h
    embedding           kept s h

With recomputation (`hpcdist.models.recompute`) a block keeps s h, and one of them has the rest beside it. Tiles of
attention and unfolded pictures, of which there are a cache full, come on top; small integers that the data has, and
what a BLAS takes, are not counted.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from hpcdist.models.arena import WASTE
from hpcdist.models.config import ModelConfig
from hpcdist.models.convolution import output_side
from hpcdist.models.counts_units import Unit, block, convolution, dense, embedding, head, pooled, statistics_of


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A model in numbers: by stage, with properties for all of it. Operations are those for one sample."""

    units: tuple[Unit, ...]

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
        """Operations of a training step: what a utilisation is told of, however often a forward is repeated."""
        return self.forward_flops + self.backward_flops

    def activation_bytes(self, samples: int, *, recompute: bool = False, itemsize: int = 4) -> int:
        """Return the most that activations of one micro-batch take, with numbers of ``itemsize`` bytes.

        ``recompute``: all but the first and the last stage are computed again in backward.
        """
        names = {name for unit in self.units for name in unit.scratch}
        scratch = sum(
            max(unit.scratch[name].of(samples) for unit in self.units if name in unit.scratch) for name in names
        )
        kept = chain.from_iterable([array.size for array in unit.kept] for unit in self.units)
        return ((kept_again(self.units) if recompute else sum(kept)) * samples + scratch) * itemsize


def kept_again(units: tuple[Unit, ...]) -> int:
    """Return the most numbers a sample where stages between the first and the last keep a copy of their output only.

    Memory that one stage gives back serves the next, where it is no more than `WASTE` times too large: as the arena
    does. A backward takes what the forward of its stage has given back.
    """
    free: list[int] = []
    total = 0

    def take(sizes: Iterable[int]) -> list[int]:
        nonlocal total
        taken = []
        for size in sizes:
            place = bisect_left(free, size)
            if place < len(free) and free[place] <= WASTE * size:
                taken.append(free.pop(place))
            else:
                total += size
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


def counts(
    config: ModelConfig,
    *,
    context: int = 0,
    features: int = 0,
    height: int = 0,
    width: int = 0,
    channels: int = 0,
    classes: int = 0,
) -> Counts:
    """Return the numbers of the model that `hpcdist.models.build` makes of the same arguments (local, no model)."""
    if config.kind == "mlp":
        return Counts(units=_mlp(config, features, classes))
    if config.kind == "convnet":
        return Counts(units=_convnet(config, (height, width, channels), classes))
    return Counts(units=_transformer(config, context))


def _transformer(config: ModelConfig, context: int) -> tuple[Unit, ...]:
    return embedding(config, context), *[block(config, context)] * config.layers, head(config, context)


def _mlp(config: ModelConfig, features: int, classes: int) -> tuple[Unit, ...]:
    widths = [features] + [config.hidden] * config.layers + [classes]
    layers = enumerate(zip(widths, widths[1:], strict=False))
    return tuple(dense(config, *sizes, first=not layer, last=layer == config.layers) for layer, sizes in layers)


def _convnet(config: ModelConfig, picture: tuple[int, int, int], classes: int) -> tuple[Unit, ...]:
    shape, found = picture, []
    for layer in range(config.layers):
        outputs, stride = config.hidden << layer // 2, 2 if layer and layer % 2 == 0 else 1
        before, shape = shape, (output_side(shape[0], stride), output_side(shape[1], stride), outputs)
        found.append(convolution(before, shape, statistics_of(config), first=not layer))
    return (*found, pooled(shape, classes))
