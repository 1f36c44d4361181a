"""Costs of the units of a model: operations, memory and messages in closed form, and measured seconds.

Operations are multiplications and additions of matrix products, 2 per pair. Let a sample have s tokens, width h,
vocabulary v and A computed attention scores (section 5.1 of Megatron-LM, arXiv:2104.04473, has A = s^2):

    dense(i, o)        per token: forward 2 i o, input gradient 2 i o, weight gradient 2 i o
    gpt block          24 h^2 s + 4 h A forward, 48 h^2 s + 10 h A backward
    gpt head           2 h v s forward, twice as many backward
    gpt embedding      no product: h s additions forward, 2 h s backward

A is s (s + 64) / 2 for long causal samples and s^2 up to 64 tokens; for packed samples, the mean number of visible
pairs within documents. Norms, activations and the loss are not counted.

Memory in elements per sample, with a heads: kept by the forward pass, and held between the halves of a split backward
pass. Tensor parallelism divides the terms in brackets, and sequence parallelism divides all terms.

    gpt block          kept 4 s h + 4 s + [12 s h + 2 a s], held 4 s h + [12 s h]
    gpt head           kept s h + 2 s + [s v] + s, held the same without the statistics
    gpt embedding      kept s h, held s h
    dense              kept its output, twice with an activation; held input and output
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
from hpcdist.models.arena import Arena
from hpcdist.models.attention.tiles import QUERY_BLOCK
from hpcdist.models.classifiers import Convolution, Dense
from hpcdist.models.classifiers import PoolingHead as PooledHead
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import DocumentPairs, KeptArray, Scratch, UnitCounts
from hpcdist.models.model import Model
from hpcdist.models.split_backward import split_operations, weight_gradients
from hpcdist.models.stage import Draw, Stage
from hpcdist.models.transformer import LanguageModelHead, TokenEmbedding, TransformerBlock

WARM: Final = 2
TURNS: Final = 7
VALUE: Final = 0.01  # of all parameters: products neither overflow nor underflow


@dataclass(frozen=True)
class PassSeconds:
    """Run times in seconds of the forward and backward pass of one model layer for a micro-batch."""

    forward: float
    backward: float  # unsplit backward pass
    input: float  # input-gradient half of a split backward pass
    weight: float  # weight-gradient half


def measure(model: Model, samples: int, on: str = "cpu") -> tuple[PassSeconds, ...]:
    """Measure the layers of ``model``. Return a tuple of one `PassSeconds` per layer. Collective over the tensor axis.

    ``samples``: samples per micro-batch. ``on``: device, "cpu" or "gpu".
    """
    by_kind: dict[object, PassSeconds] = {}
    seconds = []
    for unit in range(len(model.stages)):
        kind = _kind(model, unit)
        if kind not in by_kind:
            by_kind[kind] = _Probe(model, unit, samples, on).run()
        seconds.append(by_kind[kind])
    return tuple(seconds)


def agree(comm: Communicator, seconds: Sequence[PassSeconds], speed: float = 1.0) -> tuple[PassSeconds, ...]:
    """Return a tuple of one `PassSeconds` per layer: the median over the ranks of ``comm``. Collective over ``comm``.

    ``seconds``: this rank's times. ``speed``: this rank's relative speed. The result holds for a device of speed 1.
    """
    rows = np.array([[unit.forward, unit.backward, unit.input, unit.weight] for unit in seconds]) * speed
    middle = np.median(np.array(comm.allgather_object(rows)), axis=0)
    return tuple(PassSeconds(*map(float, row)) for row in middle)


def _kind(model: Model, unit: int) -> object:
    # Equal for model units of equal run time, so that only one such unit is measured.
    stage = model.stages[unit]
    tensors = tuple((spec.name, spec.shape) for spec in stage.tensors())
    enters = model.stages[unit - 1].output_shape(1) if unit else None
    ends = unit == len(model.stages) - 1
    return type(stage), tensors, tuple(stage.tied), enters, stage.output_shape(1), ends


class _Probe:
    # Measures the pass times of one model unit, with random inputs and temporary memory.
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
        self._saved.narrow()
        start_s = self._clock()
        weight_gradients(self._parameters, self._gradients, self._model.operations, self._saved)
        weight = self._clock() - start_s
        self._saved.release()
        return first, second, joint, halves, weight

    def _forward(self) -> float:
        self._saved = self._arena.saved(self._stage.layer)
        self._saved.draw = Draw(seed=0, step=1, first_sample=0)
        operations = self._model.operations
        start_s = self._clock()
        y = self._stage.forward(self._parameters, self._x, operations, self._saved)
        if self._ends:
            self._model.loss.forward(y, self._targets, operations, self._saved)
        return self._clock() - start_s

    def _backward(self, *, split: bool) -> float:
        dy = self._dy.copy()  # a stage may write over it
        operations = self._split if split else self._model.operations
        start_s = self._clock()
        if self._ends:
            dy = self._model.loss.backward(1.0, self._model.operations, self._saved)
        self._stage.backward(self._parameters, self._gradients, dy, operations, self._saved)
        return self._clock() - start_s

    def _clock(self) -> float:
        backend.synchronise(self._x)
        return time.perf_counter()


def _targets(model: Model, samples: int) -> np.ndarray:
    if hasattr(model.loss, "example_targets"):  # the loss of a user's own model
        targets: np.ndarray = model.loss.example_targets(samples)
        return targets
    return np.zeros(model.stages[-1].output_shape(samples)[:-1], np.int64)


def _input(model: Model, unit: int, samples: int, draw: np.random.Generator) -> np.ndarray:
    if unit and not getattr(model.stages[unit], "takes_several", False):
        return draw.standard_normal(model.stages[unit - 1].output_shape(samples)).astype(model.dtype)
    first = model.stages[unit]
    if hasattr(first, "example_input"):  # a user's own model
        example: np.ndarray = first.example_input(samples)
        return example
    if isinstance(first, Convolution):
        return draw.random(first.input_shape(samples)).astype(model.dtype)
    table = first.tensors()[0]
    rows, columns = table.whole or table.shape
    if table.name.startswith("tokens"):  # one token per row of logits
        return draw.integers(0, rows, model.stages[-1].output_shape(samples)[:-1])
    return draw.random((samples, columns)).astype(model.dtype)


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """Sharding of a layer's arrays over ``ranks`` tensor-parallel ranks."""

    ranks: int = 1
    by_tokens: bool = False  # sequence parallelism: activations between these layers are split by tokens

    def of(self, elements: int) -> int:
        """Return the number of elements per rank, rounded up, of a sharded array of ``elements`` elements."""
        return -(-elements // self.ranks)

    def between(self, elements: int) -> int:
        """Return the number of elements per rank of a layer input or output of ``elements`` elements in total."""
        return self.of(elements) if self.by_tokens else elements

    def elements(self, array: KeptArray) -> int:
        """Return the number of elements per sample that a tensor-parallel rank stores of the activation ``array``."""
        return array.size if array.whole else self.of(array.size) if array.cut else self.between(array.size)

    def scratch(self, buffer: Scratch, samples: int) -> int:
        """Return the number of elements of the scratch buffer ``buffer`` on one rank, for ``samples`` samples."""
        if buffer.most:  # bounded by a tile or a cache
            return buffer.of(samples)
        return samples * self.elements(KeptArray(buffer.each, buffer.cut, buffer.whole))

    def size(self, spec: TensorSpec) -> int:
        """Return the largest number of elements that any tensor-parallel rank stores of the tensor ``spec``."""
        if spec.cut is None:
            return spec.padded
        return spec.padded if self.ranks == 1 else spec.size // spec.shape[spec.cut] * self.of(spec.shape[spec.cut])


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """FLOPs and memory of one model layer for a micro-batch.

    FLOPs are totals over all tensor-parallel ranks. Byte counts are per rank.
    """

    parameters: int
    forward_flop: int = 0
    input_flop: int = 0  # for input gradients
    weight_flop: int = 0  # for weight gradients
    kept_bytes: int = 0  # activations kept for the backward pass
    held_bytes: int = 0  # kept between the input-gradient and weight-gradient pass of a split backward pass
    input_bytes: int = 0  # size of a pipeline message, like ``output_bytes``
    output_bytes: int = 0
    # Bytes of each scratch buffer by name. A rank's units share buffers of equal name.
    scratch: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """FLOPs and array sizes of one model layer for one sample."""

    unit: UnitCounts  # parameters, FLOPs of linear layers, and sizes of kept and scratch arrays
    held: tuple[KeptArray, ...] = ()  # kept between the two passes of a split backward pass
    products: int = 0  # forward FLOPs of attention products, masked scores included
    additions: int = 0  # forward FLOPs of an embedding, which only adds vectors
    joint: bool = False  # no weight-gradient pass: the input-gradient pass computes all weight gradients
    joint_linear: int = 0  # forward FLOPs of the linear layers without weight-gradient pass; 0 if ``joint``

    @property
    def input_flop(self) -> int:
        """FLOPs per sample of the input-gradient pass, including recomputed attention scores."""
        return (2 if self.joint else 1) * self.unit.linear + self.joint_linear + 5 * self.products // 2

    @property
    def weight_flop(self) -> int:
        """FLOPs per sample of the weight-gradient pass."""
        return (0 if self.joint else self.unit.linear - self.joint_linear) + 2 * self.additions


def unit_costs(
    model: Model, samples: int, split: TensorSplit = TensorSplit(), documents: DocumentPairs | None = None
) -> tuple[UnitCost, ...]:
    """Return a tuple of one `UnitCost` per model layer, for a micro-batch of ``samples`` samples. Local.

    ``split``: sharding over tensor-parallel ranks. ``documents``: query-key pairs per packed sample, or None.
    """
    costs: list[UnitCost] = []
    itemsize, last = model.dtype.itemsize, len(model.stages) - 1
    for unit, stage in enumerate(model.stages):
        forms = _FORMS.get(type(stage), _matrices)(model, stage)
        if documents is not None and isinstance(stage, TransformerBlock):
            forms = replace(forms, products=round(4 * stage.config.hidden * documents.seen))
        # documents.seen: query-key pairs within packed documents
        whole = forms.unit
        before = 0 if unit == 0 else costs[-1].output_bytes
        # After the last unit come logits: no message, and their memory is counted with the unit.
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
    """Return the number of attention scores, including masked scores, that a head computes per sample.

    ``context``: tokens per sample. ``window``: size of the sliding window in tokens, or 0 for no window.
    """
    # A tile of `QUERY_BLOCK` queries and keys is computed if the causal mask leaves any of its scores visible.
    blocks, rest = divmod(context, QUERY_BLOCK)
    before = -(-(window - 1) // QUERY_BLOCK) if window else blocks  # visible key blocks before the query block
    rising = min(blocks, before)
    whole = rising * (rising + 1) // 2 + (blocks - rising) * (before + 1)
    return QUERY_BLOCK**2 * whole + rest * (QUERY_BLOCK * rising + rest)


def _product_size(spec: TensorSpec, split: TensorSplit) -> int:
    return split.size(spec) // (spec.shape[0] if spec.expert else 1)  # one product per expert


def _products(model: Model, stage: Stage) -> list[TensorSpec]:
    if isinstance(stage, TokenEmbedding):
        return []
    tied = [model.layout.by_key[key].spec for key in stage.tied.values()]
    return [spec for spec in (*stage.tensors(), *tied) if spec.adapted and len(spec.shape) > 1]


def _matrices(model: Model, stage: Stage) -> SampleCounts:
    shape = stage.output_shape(1)
    tokens = shape[1] if len(shape) > 2 else 1
    matrices = _products(model, stage)
    outputs = sum(spec.size // spec.shape[-1] for spec in matrices) * tokens
    inputs = sum(spec.shape[-1] for spec in matrices) * tokens
    active = isinstance(stage, Dense) and stage.activation
    counted = getattr(stage, "forward_flops", None)  # a user's own modules have a joint backward pass
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
    output = KeptArray(math.prod(stage.output_shape(1)))
    return SampleCounts(unit=UnitCounts(parameters=0, kept=(output,)), held=(output,), additions=output.size)


def _block(model: Model, stage: Stage) -> SampleCounts:
    assert isinstance(stage, TransformerBlock)
    _, context, hidden = stage.output_shape(1)
    unit = counts.block_counts(stage.config, context, block=stage.layer)
    experts = counts.routed_flops(stage.config, context)  # experts and router have one backward pass
    # Inputs of its linear layers and gradients of their outputs: four along the residual (two if the second half has
    # experts only), and the arrays between the sharded layers.
    rest = (unit.linear - experts) // (2 * context * hidden)  # columns of matrices that are not on the residual
    along = 2 if stage.mixed and not stage.shared else 4
    held = KeptArray(along * context * hidden), KeptArray(context * rest, cut=True)
    scores = attention_scores(context, stage.window) if stage.causal else context * context
    return SampleCounts(unit=unit, held=held, products=4 * stage.config.query_width * scores, joint_linear=experts)


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
