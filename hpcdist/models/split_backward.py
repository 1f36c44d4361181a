"""Activation recomputation, and a split backward: first the input gradients, later the weight gradients.

Recomputation (Chen et al., arXiv:1604.06174): a stage keeps only its input and output, and repeats its forward in
backward. Zero-bubble schedules (Qi et al., arXiv:2401.10241) fill idle time with the second pass of a split backward.
That pass has the weight gradients of linears, and the whole backward of embeddings and of the first layer of an mlp.
"""

import copy
from dataclasses import dataclass, replace
from typing import Final, Unpack, cast

from hpcdist.arrays.backend import Array
from hpcdist.models.model import Model
from hpcdist.models.stage import (
    AttentionOperation,
    AttentionOptions,
    EmbeddingOperation,
    Gradients,
    LinearOperation,
    MixedStage,
    Operations,
    Parameters,
    Saved,
    Stage,
    WrappedStage,
)


def with_recomputation(model: Model) -> Model:
    """Return a copy of ``model`` that recomputes all stages but the first, the last, and stages with skips."""
    recomputing = copy.copy(model)
    last, joined = len(model.stages) - 1, {unit for pair in model.skips for unit in pair}
    recomputing.stages = tuple(
        stage if unit in {0, last} | joined else RecomputedStage(stage) for unit, stage in enumerate(model.stages)
    )
    return recomputing


class RecomputedStage(WrappedStage):
    """Wrapper of a stage that keeps only input and output, and repeats the forward pass of the stage in backward."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner, inner.tensors())
        self.name = getattr(inner, "name", "")  # the user's name of the stage

    def with_tokens(self, tokens: int) -> "RecomputedStage":
        return RecomputedStage(self.inner.with_tokens(tokens))  # type: ignore[attr-defined]

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output of the wrapped stage. Keep only x, which must not change until backward, and the output."""
        within = saved.within()
        y = self.inner.forward(parameters, x, operations, within)
        output = saved.empty("recomputed.y", y.shape, y.dtype)
        output[...] = y
        saved.keep("recomputed.x", x)
        within.release()
        return output

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        within = saved.within()
        self.inner.forward(parameters, saved["recomputed.x"], operations, within)
        dx = self.inner.backward(parameters, gradients, dy, operations, within)
        assert not within.deferred, "a recomputed stage cannot defer weight gradients"
        assert dx is None or not within.owns(dx), "dx of a stage must be in scratch, or in the memory of dy"
        within.release()
        return dx

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        within = saved.within()
        cast(MixedStage, self.inner).attend(parameters, operations, within)
        within.release()

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        """On a rank without samples, call the collectives of the repeated forward pass and of the backward pass."""
        within, inner = saved.within(), cast(MixedStage, self.inner)
        inner.attend(parameters, operations, within)
        inner.attend_backward(parameters, gradients, operations, within)
        within.release()


_LINEARS: Final = ("linear_column", "linear_row")


def split_operations(operations: Operations) -> Operations:
    """Wrap ``operations`` so that backward computes only input gradients, and leaves the rest to `weight_gradients`."""
    return replace(
        operations,
        linear_column=SplitLinear("linear_column", operations.linear_column),
        linear_row=SplitLinear("linear_row", operations.linear_row),
        embed=SplitEmbedding(operations.embed),
        attention=SplitAttention(operations.attention),
    )


def weight_gradients(parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved) -> None:
    """Compute the weight gradients that the backward pass of a stage with `split_operations` has deferred. Local."""
    # The gradients are written, or added to earlier gradients of this step. `parameters` may be freed already. If two
    # stages share a tensor, the later stage comes first, and both come before the next micro-batch.
    for prefix, name in saved.deferred.items():
        dy = saved[f"{prefix}.dy"]
        if name in _LINEARS:
            linear: LinearOperation = getattr(operations, name)
            linear.backward_weight(parameters, gradients, prefix, dy, saved)
        else:
            operations.embed.backward(gradients, prefix, dy, saved)
    saved.deferred.clear()


@dataclass(frozen=True)
class SplitLinear:
    """Linear layer that defers the weight gradients of the wrapped layer ``inner`` to `weight_gradients`."""

    name: str  # field of the layer in `hpcdist.models.stage.Operations`
    inner: LinearOperation

    @property
    def weight_reads(self) -> tuple[str, ...]:
        return self.inner.weight_reads

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        return self.inner.forward(parameters, prefix, x, saved, biased=biased)

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        dx = self.inner.backward_input(parameters, prefix, dy, saved)
        _defer(self.name, prefix, dy, saved, self.weight_reads)
        return dx

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        return self.inner.backward_input(parameters, prefix, dy, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Store ``dy`` in ``saved``. `weight_gradients` will compute the weight gradients from ``dy``."""
        _defer(self.name, prefix, dy, saved, self.weight_reads)


@dataclass(frozen=True)
class SplitEmbedding:
    """Token embedding that defers the table gradient of the wrapped embedding ``inner`` to `weight_gradients`."""

    inner: EmbeddingOperation

    @property
    def weight_reads(self) -> tuple[str, ...]:
        return self.inner.weight_reads

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        return self.inner.forward(parameters, prefix, tokens, saved)

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        _defer("embed", prefix, dy, saved, self.weight_reads)


@dataclass(frozen=True)
class SplitAttention:
    """Attention that calls the wrapped ``inner``, and keeps the gradient of qkv for `weight_gradients`."""

    inner: AttentionOperation

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        return self.inner.forward(qkv, head_size, saved, **options)

    def backward(self, dy: Array, saved: Saved, *, keep: bool = True) -> Array | tuple[Array, Array]:
        return self.inner.backward(dy, saved, keep=keep)


def _defer(name: str, prefix: str, dy: Array, saved: Saved, reads: tuple[str, ...]) -> None:
    if saved.owns(dy):
        saved.keep(f"{prefix}.dy", dy)
    else:
        saved.empty(f"{prefix}.dy", dy.shape, dy.dtype)[...] = dy
    for entry in ("dy", *reads):
        saved.hold(f"{prefix}.{entry}")
    saved.deferred[prefix] = name
