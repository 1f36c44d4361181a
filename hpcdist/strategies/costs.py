"""What the units of a model cost: work, memory and messages, in closed form and without a run.

Work counts the multiplications and additions of matrix products, 2 for each pair, for s tokens a sample:

    dense(i, o)        forward 2 i o, gradient of the input 2 i o, of the weight 2 i o a token
    gpt block          24 h^2 s + 4 h A forward, 48 h^2 s + 10 h A backward; A = sum over blocks of queries of
                       (queries x keys that are computed), s (s + 64) / 2 for long samples, s^2 up to 64 tokens
    gpt head           2 h v s forward, twice that backward
    gpt embedding      no product: h s additions forward, 2 h s back into the tables

That is section 5.1 of Megatron-LM (arXiv:2104.04473), but for attention: it has A = s^2, as it computes scores of the
future too, which `hpcdist.models.attention` does not. The backward of attention, 10 h A as it computes scores again,
belongs to the gradient of the input: it has no weights. Norms, activations and the loss are not counted, and neither is
that a GPU, or a cache, likes large products better: what they take is seen by `hpcdist.strategies.partition_measured`
only.

Memory is that of the arena (`hpcdist.models.arena`): what the forward of a micro-batch leaves for its backward, what a
backward that is split leaves for its second pass, and scratch that all units of a rank share. In elements a sample,
with a heads, of which tensor parallelism over t ranks leaves a / t, as of all that is in brackets:

    gpt block          kept 4 s h + 4 s + [12 s h + 2 a s], between two passes 5 s h + [11 s h]
    gpt head           kept s h + 2 s + [s v] + s, between two passes the same without the statistics
    gpt embedding      kept s h, between two passes s h
    dense              kept its output, twice where an activation follows; between two passes input and output

Activations outside of brackets are cut over t as well where the tokens are (sequence parallelism).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hpcdist.arrays.layout import TensorSpec
from hpcdist.models.attention_tiles import QUERY_BLOCK
from hpcdist.models.gpt import Block, Embed, Head
from hpcdist.models.mlp import Dense
from hpcdist.models.model import Model
from hpcdist.models.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the tensor axis cuts a unit: over how many ranks, and whether tokens between the products too."""

    ranks: int = 1
    by_tokens: bool = False

    def of(self, elements: int) -> int:
        """Return the most that one rank has of ``elements`` that are cut."""
        return -(-elements // self.ranks)

    def between(self, elements: int) -> int:
        """Return the most that one rank has of activations between the parallel parts."""
        return self.of(elements) if self.by_tokens else elements

    def size(self, spec: TensorSpec) -> int:
        """Return the most elements that one rank has of a tensor of the whole model."""
        if spec.cut is None:
            return spec.padded
        return spec.padded if self.ranks == 1 else spec.size // spec.shape[spec.cut] * self.of(spec.shape[spec.cut])


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One unit, for a micro-batch: of all tensor ranks together in operations, of one of them in bytes.

    ``kept_bytes`` are its activations from forward to backward, ``held_bytes`` those between the two passes of a split
    backward, ``scratch`` bytes by name: units of a rank share what has the same name. ``input_bytes`` and
    ``output_bytes`` go over its borders, where those are borders of ranks.
    """

    parameters: int
    forward_flop: int = 0
    input_flop: int = 0
    weight_flop: int = 0
    kept_bytes: int = 0
    held_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    scratch: Mapping[str, int] = field(default_factory=dict)

    @property
    def flop(self) -> int:
        """Return the operations forward and back."""
        return self.forward_flop + self.input_flop + self.weight_flop


def unit_costs(model: Model, samples: int, split: Split = Split()) -> tuple[UnitCost, ...]:
    """Return the costs of all units of the whole ``model`` for a micro-batch of ``samples`` (local)."""
    found: list[UnitCost] = []
    itemsize, last = model.dtype.itemsize, len(model.stages) - 1
    for unit, stage in enumerate(model.stages):
        whole = _COSTS.get(type(stage), _matrices)(model, stage, split)
        before = 0 if unit == 0 else found[-1].output_bytes
        # What is behind the last unit are logits: no message, and their memory is counted with the unit.
        after = 0 if unit == last else split.between(_per_sample(stage)) * itemsize * samples
        found.append(
            UnitCost(
                parameters=sum(split.size(spec) for spec in stage.tensors()),
                forward_flop=whole.forward_flop * samples,
                input_flop=0 if unit == 0 else whole.input_flop * samples,
                weight_flop=whole.weight_flop * samples,
                kept_bytes=whole.kept_bytes * itemsize * samples,
                held_bytes=whole.held_bytes * itemsize * samples,
                input_bytes=before,
                output_bytes=after,
                scratch={name: size * itemsize * samples for name, size in whole.scratch.items()}
                | {"linear.dweight": itemsize * max((split.size(spec) for spec in _products(model, stage)), default=0)},
            )
        )
    return tuple(found)


def attended(context: int) -> int:
    """Return how many scores attention computes for a sample and head: blocks of queries times the keys they see."""
    return sum(
        (min(first + QUERY_BLOCK, context) - first) * min(first + QUERY_BLOCK, context)
        for first in range(0, context, QUERY_BLOCK)
    )


def _per_sample(stage: Stage) -> int:
    size = 1
    for extent in stage.output_shape(1):
        size *= extent
    return size


def _products(model: Model, stage: Stage) -> list[TensorSpec]:
    """Return the matrices that the unit multiplies with, tied ones included."""
    if isinstance(stage, Embed):
        return []
    tied = [model.layout.by_key[key].spec for key in stage.tied.values()]
    return [spec for spec in (*stage.tensors(), *tied) if spec.adapted and len(spec.shape) > 1]


def _matrices(model: Model, stage: Stage, split: Split) -> UnitCost:
    """Return the cost for a sample of one linear after the other, each with an output that is kept: elements."""
    shape = stage.output_shape(1)
    tokens = shape[1] if len(shape) > 2 else 1
    matrices = _products(model, stage)
    flop = sum(2 * spec.size * tokens for spec in matrices)
    outputs = sum(spec.size // spec.shape[-1] for spec in matrices) * tokens
    inputs = sum(spec.shape[-1] for spec in matrices) * tokens
    active = isinstance(stage, Dense) and stage.activation
    return UnitCost(
        parameters=0,
        forward_flop=flop,
        input_flop=flop,
        weight_flop=flop,
        kept_bytes=outputs * (2 if active else 1),
        held_bytes=outputs + (inputs if stage is not model.stages[0] else 0),  # the data itself is not counted
        scratch={"linear.dx": inputs},
    )


def _embedding(model: Model, stage: Stage, split: Split) -> UnitCost:
    size = _per_sample(stage)
    own = split.between(size)
    return UnitCost(parameters=0, forward_flop=size, weight_flop=2 * size, kept_bytes=own, held_bytes=own)


def _block(model: Model, stage: Stage, split: Split) -> UnitCost:
    assert isinstance(stage, Block)
    _, context, hidden = stage.output_shape(1)
    heads = hidden // stage.head_size
    wide, rows = context * hidden, heads * context  # tiles of scores are small, and the same for all samples
    linears = 24 * hidden * wide
    products = 4 * hidden * attended(context)
    return UnitCost(
        parameters=0,
        forward_flop=linears + products,
        input_flop=linears + 5 * products // 2,
        weight_flop=linears,
        kept_bytes=split.between(4 * wide + 4 * context) + split.of(12 * wide + 2 * rows),
        held_bytes=split.between(4 * wide) + split.of(12 * wide),
        scratch={
            "linear.dx": split.of(4 * wide),
            "attention.dots": split.of(rows),
            "attention.dqkv": split.of(3 * wide),
        },
    )


def _head(model: Model, stage: Stage, split: Split) -> UnitCost:
    _, context, vocabulary = stage.output_shape(1)
    hidden = stage.tensors()[0].shape[0]
    wide, logits = context * hidden, split.of(context * vocabulary)
    flop = 2 * hidden * vocabulary * context
    return UnitCost(
        parameters=0,
        forward_flop=flop,
        input_flop=flop,
        weight_flop=flop,
        kept_bytes=split.between(wide + 2 * context) + logits + context,
        held_bytes=split.between(wide) + logits,
        scratch={"linear.dx": wide, "norm.dx": split.between(wide)},
    )


_COSTS: Final = {Embed: _embedding, Block: _block, Head: _head}
