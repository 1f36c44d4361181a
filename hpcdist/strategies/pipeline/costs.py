"""Costs of the units of a model: operations, memory and messages in closed form, and seconds that are measured.

`unit_costs` has the closed forms, `measure` runs each kind of unit a few times on random data, and `agree` takes the
median over the ranks. Operations are the multiplications and additions of matrix products, 2 for each pair, for s
tokens a sample:

    dense(i, o)        forward 2 i o, gradient of the input 2 i o, of the weight 2 i o a token
    gpt block          24 h^2 s + 4 h A forward, 48 h^2 s + 10 h A backward; A = sum over blocks of queries of
                       (queries x keys that are computed), s (s + 64) / 2 for long samples, s^2 up to 64 tokens; of
                       packed samples the pairs within documents that are looked at, in the mean
    gpt head           2 h v s forward, twice that backward
    gpt embedding      no product: h s additions forward, 2 h s back into the tables

That is section 5.1 of Megatron-LM (arXiv:2104.04473), but for attention: it has A = s^2, as it computes scores of the
future too, which `hpcdist.models.attention.flash` does not. The backward of attention, 10 h A as it computes scores
again, belongs to the gradient of the input: it has no weights. Norms, activations and the loss are not counted, and
neither is that a GPU, or a cache, likes large products better: only `measure` sees what they take.

Memory is that of the arena (`hpcdist.models.runtime.arena`): what the forward of a micro-batch leaves for its
backward, what a backward that is split leaves for its second pass, and scratch that all units of a rank share. In
elements a sample, with a heads, of which tensor parallelism over t ranks leaves a / t, as of all that is in brackets:

    gpt block          kept 4 s h + 4 s + [12 s h + 2 a s], between two passes 4 s h + [12 s h]
    gpt head           kept s h + 2 s + [s v] + s, between two passes the same without the statistics
    gpt embedding      kept s h, between two passes s h
    dense              kept its output, twice where an activation follows; between two passes input and output

Activations outside of brackets are cut over t as well where the tokens are (sequence parallelism). Those of other
norms, activations and heads, and of convolutions, are in `hpcdist.models.counts`, from which all of this is taken.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.models import counts
from hpcdist.models.attention.tiles import QUERY_BLOCK
from hpcdist.models.classifiers import Convolution, Dense
from hpcdist.models.classifiers import PoolingHead as PooledHead
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import DocumentPairs, KeptArray, Scratch, UnitCounts
from hpcdist.models.model import Model
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.runtime.split_backward import release_first_pass, split_operations, weight_gradients
from hpcdist.models.stage import Draw, Stage
from hpcdist.models.transformer import LanguageModelHead, TokenEmbedding, TransformerBlock

WARM: Final = 2
TURNS: Final = 7
VALUE: Final = 0.01  # of all parameters: no product of them over- or underflows


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one unit and micro-batch; ``input`` and ``weight`` are the halves of a split ``backward``."""

    forward: float
    backward: float
    input: float
    weight: float


def measure(model: Model, samples: int, on: str = "cpu") -> tuple[PassSeconds, ...]:
    """Return the measured seconds of each unit for a micro-batch of ``samples``. Collective over the tensor axis."""
    known: dict[object, PassSeconds] = {}
    seconds = []
    for unit in range(len(model.stages)):
        kind = _kind(model, unit)
        if kind not in known:
            known[kind] = _Probe(model, unit, samples, on).run()
        seconds.append(known[kind])
    return tuple(seconds)


def agree(comm: Communicator, own: Sequence[PassSeconds], speed: float = 1.0) -> tuple[PassSeconds, ...]:
    """Return the medians over ``comm`` of the seconds of a rank of speed 1, the same on all of them. Collective.

    ``own`` were measured on a rank of the relative speed ``speed``.
    """
    rows = np.array([[unit.forward, unit.backward, unit.input, unit.weight] for unit in own]) * speed
    middle = np.median(np.array(comm.allgather_object(rows)), axis=0)
    return tuple(PassSeconds(*map(float, row)) for row in middle)


def _kind(model: Model, unit: int) -> object:
    """Return a key that is equal for units that take equally long."""
    stage = model.stages[unit]
    tensors = tuple((spec.name, spec.shape) for spec in stage.tensors())
    enters = model.stages[unit - 1].output_shape(1) if unit else None
    ends = unit == len(model.stages) - 1
    return type(stage), tensors, tuple(stage.tied), enters, stage.output_shape(1), ends


class _Probe:
    """Measurement of one unit, in memory of its own."""

    def __init__(self, model: Model, unit: int, samples: int, on: str) -> None:
        self._model, self._stage, self._on = model, model.stages[unit], on
        self._arena = Arena(on=on)
        layers = sorted({model.stages[need].layer for need in model.needs[unit]})
        parts = [model.layout.units[layer] for layer in layers]
        values, gradients = (FlatStore(model.layout, model.dtype, parts, on=on) for _ in range(2))
        values.array[...] = VALUE
        self._parameters = model.bind_stage(unit, lambda layer: values)
        self._gradients = model.bind_stage_gradients(unit, lambda layer: gradients, set())
        self._ends = unit == len(model.stages) - 1
        draw = np.random.default_rng(0)
        self._x = self._place(_input(model, unit, samples, draw))
        self._dy = self._place(draw.standard_normal(self._stage.output_shape(samples)).astype(model.dtype))
        self._targets = self._place(_targets(model, samples))
        self._split = split_operations(model.operations)

    def _place(self, array: np.ndarray) -> Array:
        return backend.place(array, self._on)

    def run(self) -> PassSeconds:
        turns = [self._turn() for _ in range(WARM + TURNS)][WARM:]
        first, second, joint, halves, weight = zip(*turns, strict=True)
        return PassSeconds(median(first + second), median(joint), median(halves), median(weight))

    def _turn(self) -> tuple[float, float, float, float, float]:
        first = self._forward()
        joint = self._backward(split=False)
        self._saved.release()
        second = self._forward()
        halves = self._backward(split=True)
        release_first_pass(self._saved)
        begun = self._clock()
        weight_gradients(self._parameters, self._gradients, self._model.operations, self._saved)
        weight = self._clock() - begun
        self._saved.release()
        return first, second, joint, halves, weight

    def _forward(self) -> float:
        self._saved = self._arena.saved(self._stage.layer)
        self._saved.draw = Draw(seed=0, step=1, first_sample=0)
        operations = self._model.operations
        begun = self._clock()
        y = self._stage.forward(self._parameters, self._x, operations, self._saved)
        if self._ends:
            self._model.loss.forward(y, self._targets, operations, self._saved)
        return self._clock() - begun

    def _backward(self, *, split: bool) -> float:
        dy = self._dy.copy()  # a stage may write over it
        operations = self._split if split else self._model.operations
        begun = self._clock()
        if self._ends:
            dy = self._model.loss.backward(1.0, self._model.operations, self._saved)
        self._stage.backward(self._parameters, self._gradients, dy, operations, self._saved)
        return self._clock() - begun

    def _clock(self) -> float:
        backend.synchronise(self._x)
        return time.perf_counter()


def _targets(model: Model, samples: int) -> np.ndarray:
    """Return targets that the loss takes."""
    if hasattr(model.loss, "example_targets"):  # that of a user's own model
        targets: np.ndarray = model.loss.example_targets(samples)
        return targets
    return np.zeros(model.stages[-1].output_shape(samples)[:-1], np.int64)


def _input(model: Model, unit: int, samples: int, draw: np.random.Generator) -> np.ndarray:
    """Return random data, or activations, that ``unit`` takes."""
    if unit:
        return draw.standard_normal(model.stages[unit - 1].output_shape(samples)).astype(model.dtype)
    first = model.stages[0]
    if hasattr(first, "example_input"):  # that of a user's own model
        example: np.ndarray = first.example_input(samples)
        return example
    if isinstance(first, Convolution):
        return draw.random(first.input_shape(samples)).astype(model.dtype)
    table = first.tensors()[0]
    rows, columns = table.whole or table.shape
    if table.name.startswith("tokens"):  # a token for each of the last stage's logits
        return draw.integers(0, rows, model.stages[-1].output_shape(samples)[:-1])
    return draw.random((samples, columns)).astype(model.dtype)


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """Cut of a unit on the tensor axis: the number of ranks, and whether tokens between the products are cut too."""

    ranks: int = 1
    by_tokens: bool = False

    def of(self, elements: int) -> int:
        """Return the largest share of one rank of ``elements`` that are cut."""
        return -(-elements // self.ranks)

    def between(self, elements: int) -> int:
        """Return the largest share of one rank of activations between the parallel parts."""
        return self.of(elements) if self.by_tokens else elements

    def elements(self, of: KeptArray) -> int:
        """Return the largest share of one rank of an array, for a sample."""
        return of.size if of.whole else self.of(of.size) if of.cut else self.between(of.size)

    def scratch(self, of: Scratch, samples: int) -> int:
        """Return the largest share of one rank of a scratch buffer, for so many samples."""
        if of.most:  # a tile, or a cache full
            return of.of(samples)
        return samples * self.elements(KeptArray(of.each, of.cut, of.whole))

    def size(self, spec: TensorSpec) -> int:
        """Return the largest share of one rank, in elements, of a tensor of the whole model."""
        if spec.cut is None:
            return spec.padded
        return spec.padded if self.ranks == 1 else spec.size // spec.shape[spec.cut] * self.of(spec.shape[spec.cut])


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """Costs of one unit for a micro-batch: operations of all tensor ranks together, bytes of one of them.

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


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Counts of a stage for a sample: ``unit``, and ``held`` between the two passes of a split backward.

    ``products`` are the operations of attention forward, with scores that are computed needlessly; ``additions`` those
    of an embedding. ``joint``: all of its backward is in the first of two passes; ``joint_linear`` are operations
    forward of linears of which that is true.
    """

    unit: UnitCounts
    held: tuple[KeptArray, ...] = ()
    products: int = 0
    additions: int = 0
    joint: bool = False
    joint_linear: int = 0

    @property
    def input_flop(self) -> int:
        """Operations of the first pass; attention computes its scores again there."""
        return (2 if self.joint else 1) * self.unit.linear + self.joint_linear + 5 * self.products // 2

    @property
    def weight_flop(self) -> int:
        """Operations of the second pass."""
        return (0 if self.joint else self.unit.linear - self.joint_linear) + 2 * self.additions


def unit_costs(
    model: Model, samples: int, split: TensorSplit = TensorSplit(), documents: DocumentPairs | None = None
) -> tuple[UnitCost, ...]:
    """Return the costs of all units of the whole ``model`` for a micro-batch of ``samples`` (local).

    Attention stays within ``documents``, where samples are packed.
    """
    costs: list[UnitCost] = []
    itemsize, last = model.dtype.itemsize, len(model.stages) - 1
    for unit, stage in enumerate(model.stages):
        forms = _FORMS.get(type(stage), _matrices)(model, stage)
        if documents is not None and isinstance(stage, TransformerBlock):
            forms = replace(forms, products=round(4 * stage.config.hidden * documents.seen))
        whole = forms.unit
        before = 0 if unit == 0 else costs[-1].output_bytes
        # What is behind the last unit are logits: no message, and their memory is counted with the unit.
        after = 0 if unit == last else split.between(math.prod(stage.output_shape(1))) * itemsize * samples
        costs.append(
            UnitCost(
                parameters=sum(split.size(spec) for spec in stage.tensors()),
                forward_flop=samples * (whole.linear + forms.products + forms.additions),
                input_flop=0 if unit == 0 else samples * forms.input_flop,
                weight_flop=samples * forms.weight_flop,
                kept_bytes=sum(map(split.elements, whole.kept)) * itemsize * samples,
                held_bytes=sum(map(split.elements, forms.held)) * itemsize * samples,
                input_bytes=before,
                output_bytes=after,
                scratch={name: split.scratch(buffer, samples) * itemsize for name, buffer in whole.scratch.items()}
                | {
                    "linear.dweight": itemsize
                    * max((_product_size(spec, split) for spec in _products(model, stage)), default=0)
                },
            )
        )
    return tuple(costs)


def attention_scores(context: int, window: int = 0) -> int:
    """Return the number of attention scores of a sample and head: blocks of queries times the keys they see."""
    blocks, rest = divmod(context, QUERY_BLOCK)
    before = -(-(window - 1) // QUERY_BLOCK) if window else blocks  # blocks of keys in front of that of the queries
    rising = min(blocks, before)
    whole = rising * (rising + 1) // 2 + (blocks - rising) * (before + 1)
    return QUERY_BLOCK**2 * whole + rest * (QUERY_BLOCK * rising + rest)


def _product_size(spec: TensorSpec, split: TensorSplit) -> int:
    """Return the numbers of a matrix that is multiplied at once: experts are multiplied one by one."""
    return split.size(spec) // (spec.shape[0] if spec.expert else 1)


def _products(model: Model, stage: Stage) -> list[TensorSpec]:
    """Return the matrices that the unit multiplies with, tied ones included."""
    if isinstance(stage, TokenEmbedding):
        return []
    tied = [model.layout.by_key[key].spec for key in stage.tied.values()]
    return [spec for spec in (*stage.tensors(), *tied) if spec.adapted and len(spec.shape) > 1]


def _matrices(model: Model, stage: Stage) -> SampleCounts:
    """Return the counts of linears in sequence, each with an output that is kept."""
    shape = stage.output_shape(1)
    tokens = shape[1] if len(shape) > 2 else 1
    matrices = _products(model, stage)
    outputs = sum(spec.size // spec.shape[-1] for spec in matrices) * tokens
    inputs = sum(spec.shape[-1] for spec in matrices) * tokens
    active = isinstance(stage, Dense) and stage.activation
    counted = getattr(stage, "forward_flops", None)  # of a user's own modules, whose backward is one pass
    unit = UnitCounts(
        parameters=0,
        linear=sum(2 * spec.size * tokens for spec in matrices) if counted is None else round(counted),
        kept=(KeptArray(outputs * (2 if active else 1)),),
        scratch={"linear.dx": Scratch(inputs)},
    )
    # The data itself is not counted.
    held = KeptArray(outputs), KeptArray(inputs if stage is not model.stages[0] else 0)
    return SampleCounts(unit=unit, held=held, joint=counted is not None)


def _embedding(model: Model, stage: Stage) -> SampleCounts:
    own = KeptArray(math.prod(stage.output_shape(1)))
    return SampleCounts(unit=UnitCounts(parameters=0, kept=(own,)), held=(own,), additions=own.size)


def _block(model: Model, stage: Stage) -> SampleCounts:
    assert isinstance(stage, TransformerBlock)
    _, context, hidden = stage.output_shape(1)
    unit = counts.block_counts(stage.config, context)
    experts = counts.routed_flops(stage.config, context)  # experts and router have one backward pass
    # Inputs of its linears and gradients of their outputs: four along the residual, and what lies between the cut ones;
    # two where the second half has experts alone.
    rest = (unit.linear - experts) // (2 * context * hidden)  # so many columns of matrices are not of the residual
    along = 2 if stage.mixed and not stage.shared else 4
    held = KeptArray(along * context * hidden), KeptArray(context * rest, cut=True)
    scores = attention_scores(context, stage.config.window) if stage.causal else context * context
    return SampleCounts(unit=unit, held=held, products=4 * hidden * scores, joint_linear=experts)


def _head(model: Model, stage: Stage) -> SampleCounts:
    assert isinstance(stage, LanguageModelHead)
    _, context, vocabulary = stage.output_shape(1)
    config = ModelConfig(hidden=stage.tensors()[0].shape[0], heads=1, vocabulary=vocabulary, norm=stage.norm)
    return SampleCounts(
        unit=counts.head_counts(config, context),
        held=(KeptArray(context * config.hidden), KeptArray(context * vocabulary, cut=True)),
    )


def _convolution(model: Model, stage: Stage) -> SampleCounts:
    assert isinstance(stage, Convolution)
    statistics = len([spec for spec in stage.tensors() if spec.name.startswith("norm.")])
    first = stage is model.stages[0]
    return SampleCounts(
        unit=counts.convolution_counts(stage.picture, stage.shape, statistics, first=first), joint=not first
    )


def _pooled(model: Model, stage: Stage) -> SampleCounts:
    classes, channels = stage.tensors()[0].shape
    height, width, _ = model.stages[-2].output_shape(1)[1:]
    return SampleCounts(
        unit=counts.pooling_counts((height, width, channels), classes), held=(KeptArray(channels), KeptArray(classes))
    )


_FORMS: Final = {
    TokenEmbedding: _embedding,
    TransformerBlock: _block,
    LanguageModelHead: _head,
    Convolution: _convolution,
    PooledHead: _pooled,
}
