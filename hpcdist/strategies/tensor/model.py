"""The tensor-parallel model of one rank: the stages of the whole model with this rank's tensor shards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.layout import TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.models.arena import Arena
from hpcdist.models.experts.mixture import LocalExperts, WholeExperts
from hpcdist.models.layers.dropout import LocalDropout, mask
from hpcdist.models.layers.linear import (
    add_to_rows,
    affine,
    as_matrix,
    begin_backward,
    gradient_of_bias,
    gradient_of_input,
    gradient_of_weight,
)
from hpcdist.models.layers.low_rank import KEPT, LowRank
from hpcdist.models.model import Model
from hpcdist.models.stage import (
    AttentionOperation,
    AttentionOptions,
    Gradients,
    Operations,
    Parameters,
    Saved,
    Stage,
    StreamOf,
    WrappedStage,
)
from hpcdist.models.transformer import TokenEmbedding
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.tensor.axis import Borders, SequenceBorders, TensorAxis
from hpcdist.strategies.tensor.vocabulary import RowPositions, VocabularyCrossEntropy, VocabularyEmbedding


class ColumnLinear:
    """Column-parallel linear layer: each rank computes a part of the outputs. Collective over the tensor axis."""

    def __init__(self, borders: Borders, low_rank: LowRank | None) -> None:
        self.borders, self.low_rank = borders, low_rank
        self.weight_reads = ("whole" if borders.by_rows else "x", *(() if low_rank is None else (KEPT,)))

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        saved.keep(f"{prefix}.x", x)
        return affine(parameters, prefix, self.borders.enter(x, saved), saved, self.low_rank, biased=biased)

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        begin_backward(parameters, prefix, dy, saved, self.low_rank)
        whole = self.borders.enter(saved[f"{prefix}.x"], saved)
        gradient_of_weight(gradients, prefix, dy, whole, saved, self.low_rank)
        gradient_of_bias(gradients, prefix, dy)
        return self._input_gradient(parameters, prefix, dy, saved)

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        begin_backward(parameters, prefix, dy, saved, self.low_rank)
        if self.borders.by_rows:
            whole = self.borders.enter(saved[f"{prefix}.x"], saved)
            saved.empty(f"{prefix}.whole", whole.shape, whole.dtype)[...] = whole
        return self._input_gradient(parameters, prefix, dy, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        gradient_of_weight(gradients, prefix, dy, saved[f"{prefix}.{self.weight_reads[0]}"], saved, self.low_rank)
        gradient_of_bias(gradients, prefix, dy)

    def _input_gradient(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        return self.borders.enter_backward(gradient_of_input(parameters, prefix, dy, saved, self.low_rank), saved)


class RowLinear:
    """Row-parallel linear layer: each rank multiplies a part of the inputs. Collective over the tensor axis."""

    def __init__(self, borders: Borders, low_rank: LowRank | None) -> None:
        self.borders, self.low_rank = borders, low_rank
        kept = () if low_rank is None else (KEPT,)
        self.weight_reads = ("x", *(("whole",) if borders.by_rows else ()), *kept)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        weight = as_matrix(parameters[f"{prefix}.weight"])
        outputs, inputs = weight.shape
        saved.keep(f"{prefix}.x", x)
        partial = self.borders.partial((*x.shape[:-1], outputs), x.dtype, f"{prefix}.y", saved)
        namespace(x).matmul(x.reshape(-1, inputs), weight.T, out=partial.reshape(-1, outputs))
        if self.low_rank is not None:
            self.low_rank.forward(parameters, prefix, x, partial.reshape(-1, outputs), saved)
        y = self.borders.leave(partial, f"{prefix}.y", saved)
        bias = parameters.get(f"{prefix}.bias")
        if bias is not None and biased:
            add_to_rows(y.reshape(-1, outputs), bias)
        return y

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        whole = self.borders.leave_backward(dy, saved)
        begin_backward(parameters, prefix, whole, saved, self.low_rank)
        gradient_of_bias(gradients, prefix, dy)
        gradient_of_weight(gradients, prefix, whole, saved[f"{prefix}.x"], saved, self.low_rank)
        return gradient_of_input(parameters, prefix, whole, saved, self.low_rank)

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        whole = self.borders.leave_backward(dy, saved)
        begin_backward(parameters, prefix, whole, saved, self.low_rank)
        if self.borders.by_rows:
            saved.empty(f"{prefix}.whole", whole.shape, whole.dtype)[...] = whole
        return gradient_of_input(parameters, prefix, whole, saved, self.low_rank)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        gradient_of_bias(gradients, prefix, dy)
        whole = saved[f"{prefix}.whole"] if self.borders.by_rows else dy
        gradient_of_weight(gradients, prefix, whole, saved[f"{prefix}.x"], saved, self.low_rank)


class ParallelExperts(WholeExperts):
    """Mixture of experts. Feed-forward columns are sharded over the tensor axis. Collective over the tensor axis."""

    # All ranks have the whole router and output biases. If activations are sharded by tokens, only rank 0 stores their
    # gradients, because a later step sums these gradients over the ranks.
    def __init__(self, borders: Borders) -> None:
        self._borders, self.first = borders, borders.axis.rank == 0
        self.writes_whole = self.first or not borders.by_rows

    def enter(self, x: Array, saved: Saved) -> Array:
        whole = self._borders.enter(x, saved)
        if self._borders.by_rows:
            gathered, whole = whole, saved.empty("experts.whole", whole.shape, whole.dtype)
            whole[...] = gathered
        return whole

    def partial(self, shape: tuple[int, ...], dtype: Any, saved: Saved) -> Array:
        return self._borders.partial(shape, dtype, "experts.y", saved)

    def leave(self, partial: Array, saved: Saved) -> Array:
        return self._borders.leave(partial, "experts.y", saved)

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        return self._borders.leave_backward(dy, saved)

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        return self._borders.enter_backward(dx, saved)

    def sum_gates(self, dgates: Array) -> Array:
        self._borders.axis.allreduce(dgates.reshape(-1))
        return dgates


class HeadParallelAttention:
    """Attention over this rank's heads, computed by ``inner``. All tensor-parallel ranks have equally many heads."""

    def __init__(self, axis: TensorAxis, inner: AttentionOperation) -> None:
        self._axis, self._inner = axis, inner

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        heads = qkv.shape[-1] // head_size // (3 if options.get("kv") is None else 1)
        options["part"] = options.get("part") or (self._axis.rank * heads, self._axis.size * heads)
        return self._inner.forward(qkv, head_size, saved, **options)

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        return self._inner.backward(dy, saved, keep=keep)


class RowDropout(LocalDropout):
    """Dropout of elements of this rank's tokens, for activations that are sharded by tokens."""

    def __init__(self, borders: SequenceBorders) -> None:
        self._borders = borders

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        whole, columns = self._borders.whole, x.shape[-1]
        dropped = mask(saved, rate, site, rows_per_sample=whole, columns=columns)
        if dropped is None:
            return x
        for rows, sample, position in self._borders.stretches(x):
            above = sample * whole + position - rows.start
            dropped.drop(x.reshape(1, -1, columns), rows.start, rows.stop, columns, above=above)
        return x


def local_part(spec: TensorSpec, comm: Communicator) -> TensorSpec:
    """Return the spec of this rank's shard of the tensor ``spec``. Shard lengths differ by at most 1. Local."""
    if spec.cut is None or comm.size == 1:
        return spec
    parts = split(spec.shape[spec.cut], comm.size, itemsize=1, align_bytes=1)
    return spec.shard(parts[comm.rank], parts[0].size)


def cut_model(
    model: Model,
    comm: Communicator,
    algorithm: str = "native",
    *,
    sequence_parallel: bool = False,
    context: ContextAxis | None = None,
) -> Model:
    """Return this rank's shard of the transformer ``model`` on the tensor axis. Collective over ``comm``.

    ``algorithm``: name of the allreduce algorithm for activations.
    """
    if comm.size == 1:
        return model
    if not isinstance(model.stages[0], TokenEmbedding):
        raise ConfigurationError(
            f"parallel.tensor = {comm.size}, but this model is not a transformer, and only transformers support tensor "
            "parallelism; set parallel.tensor = 1, and shard the model with parallel.pipeline or with "
            "parallel.strategy = 'zero1', 'zero2' or 'zero3'"
        )
    axis = TensorAxis(comm, algorithm, None if context is None else context.watch)
    borders = Borders(axis)
    classes = split(model.layout.by_key["0.tokens.weight"].spec.shape[0], comm.size, itemsize=1, align_bytes=1)
    operations = sampling = _operations(model.operations, borders, classes)
    if sequence_parallel:
        cut_by_context = () if context is None else (context.own, context.context)
        borders = by_rows = SequenceBorders(axis, model.stages[-1].output_shape(1)[1], *cut_by_context)
        operations = _operations(model.operations, borders, classes)
        operations = replace(operations, positions=RowPositions(by_rows), dropout=RowDropout(by_rows))
    last = len(model.stages) - 1
    logits = classes[comm.rank]
    stages = [CutStage(stage, borders, logits if unit == last else None) for unit, stage in enumerate(model.stages)]
    cut = CutModel(stages, model.dtype.name, tokens_per_sample=model.tokens_per_sample, operations=operations)
    cut.axis, cut.classes, cut.sampling = axis, classes, sampling
    cut.clocks, cut.watch = (*model.clocks, axis.taken_s), axis.watch
    return cut


def _operations(whole: Operations, borders: Borders, classes: Sequence[Range]) -> Operations:
    local_classes, vocabulary, experts = classes[borders.axis.rank], classes[-1].stop, whole.experts
    low_rank, comm = getattr(whole.linear_row, "low_rank", None), borders.axis.comm
    if low_rank is not None:
        parts = {prefix: split(width, comm.size, 1, 1) for prefix, (_, width) in low_rank.inputs.items()}
        inputs = {prefix: (ranges[comm.rank].start, ranges[-1].stop) for prefix, ranges in parts.items()}
        low_rank = replace(low_rank, inputs=inputs)
    return replace(
        whole,
        linear_column=ColumnLinear(borders, low_rank),
        linear_row=RowLinear(borders, low_rank),
        embed=VocabularyEmbedding(borders, local_classes, vocabulary),
        attention=HeadParallelAttention(borders.axis, whole.attention),
        cross_entropy=VocabularyCrossEntropy(borders, local_classes, vocabulary),
        experts=replace(experts, borders=ParallelExperts(borders)) if isinstance(experts, LocalExperts) else None,
    )


class CutModel(Model):
    """This rank's tensor-parallel shard of a model. Collective over the tensor axis."""

    axis: TensorAxis
    classes: Sequence[Range]  # vocabulary range of each rank
    sampling: Operations  # for texts of any length

    def logits(self, parameters: Sequence[Parameters], x: Array, arena: Arena) -> Array:
        local_logits = self.outputs(parameters, x, arena, self.sampling)
        tokens = local_logits.size // local_logits.shape[-1]
        parts = [Range(tokens * part.start, tokens * part.stop) for part in self.classes]
        buffer = namespace(local_logits).empty(parts[-1].stop, local_logits.dtype)
        buffer[parts[self.axis.rank].slice] = local_logits.reshape(-1)
        self.axis.all_gather(buffer, parts)
        columns = [buffer[part.slice].reshape(*local_logits.shape[:-1], -1) for part in parts]
        whole: Array = namespace(local_logits).concatenate(columns, axis=-1)
        return whole


class CutStage(WrappedStage):
    """Pipeline stage with this rank's tensor-parallel shards. Collective over the tensor axis."""

    # If activations are sharded by tokens, gradients of unsharded tensors are partial until `sum_gradients`.
    def __init__(self, inner: Stage, borders: Borders, classes: Range | None) -> None:
        specs = [
            replace(local_part(spec, borders.axis.comm), partial=spec.partial or (borders.by_rows and spec.cut is None))
            for spec in inner.tensors()
        ]
        super().__init__(inner, specs)
        self._borders, self._classes = borders, classes

    def output_shape(self, samples: int) -> tuple[int, ...]:
        whole = self.inner.output_shape(samples)
        return self._borders.shape(whole) if self._classes is None else (*whole[:-1], self._classes.size)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        boxes = {spec.name: _Box(parameters[spec.name], spec) for spec in self._specs}
        self.inner.initialise(cast(Parameters, boxes), rng_of)


class _Box:
    # Receives an unsharded tensor's values, and stores only this rank's shard.
    def __init__(self, part: Array, spec: TensorSpec) -> None:
        self._part = part
        self._inside = tuple(slice(start, stop) for start, stop in spec.box)

    def __setitem__(self, key: Any, values: np.ndarray | float) -> None:
        assert key is Ellipsis
        self._part[...] = values[self._inside] if isinstance(values, np.ndarray) else values
