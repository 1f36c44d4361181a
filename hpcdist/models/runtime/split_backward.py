"""Activation recomputation, and a split backward: input gradients in a first pass, weight gradients in a second one.

Recomputation (Chen et al., arXiv:1604.06174): a stage keeps its input and its output alone and computes its forward
again in backward. For one more forward of the stages between the first and the last, activations of L alike stages
take the memory of one and of L outputs. The second forward is the same as the first, dropout included, so gradients
are the same bits.

Split backward: zero-bubble schedules (Qi et al., arXiv:2401.10241) fill idle time with the second pass, on which
nothing waits.

- Linears and embeddings are put off; all else (norms, positions: sums over what the first pass has in its cache) is
  done in the first pass. An embedding has no other gradient than that of its table, and the first layer of an mlp none
  than those of its weight and bias: their whole work is put off.
- A linear's second pass needs its input, which the forward has kept, and ``dy``. That is copied, a row of ``hidden`` a
  token, unless it lies in memory that this stage's `Saved` owns and nobody writes any more: as the logits, what an
  activation writes over its own input, and what attention is told to keep. A gpt copies two rows a token and block, on
  the way along its residual; both passes together take 1.02 to 1.04 times the joint backward (hidden 256 and 128).
- `release_first_pass` gives back all other memory between the passes.
- Bits: a tensor's gradient is a sum in the order in which micro-batches add to it. With second passes in the order of
  the micro-batches it is the same as that of a joint backward. A tensor that two stages use has one order more: where
  both add to the same memory, the second passes of both for a micro-batch have to come before those of the next one,
  the later stage's first. In any other order that tensor differs by rounding.
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
    """Return ``model`` with stages that are computed again in backward (local).

    Not the first, whose output is all that it keeps where it embeds; not the last, whose backward follows at once; and
    not those that take, or are taken by, skip connections: they stay as they are.
    """
    recomputing = copy.copy(model)
    last, joined = len(model.stages) - 1, {unit for pair in model.skips for unit in pair}
    recomputing.stages = tuple(
        stage if unit in {0, last} | joined else RecomputedStage(stage) for unit, stage in enumerate(model.stages)
    )
    return recomputing


class RecomputedStage(WrappedStage):
    """The stage ``inner``, of which only input and output are kept from its forward to its backward."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner, inner.tensors())
        self.name = getattr(inner, "name", "")  # what the user calls it

    def with_tokens(self, tokens: int) -> "RecomputedStage":
        """Return the same for so many tokens of each sample."""
        return RecomputedStage(self.inner.with_tokens(tokens))  # type: ignore[attr-defined]

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return a copy of the output; x must stay unchanged until backward."""
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
        """Run the forward of the stage again, then its backward; return dx."""
        within = saved.within()
        self.inner.forward(parameters, saved["recomputed.x"], operations, within)
        dx = self.inner.backward(parameters, gradients, dy, operations, within)
        assert not within.deferred, "a backward in two passes keeps what is to be computed again"
        assert dx is None or not within.owns(dx), "what a stage returns lies in scratch, or in the memory of dy"
        within.release()
        return dx

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        """Take part without samples in the forward, of which nothing is kept. Collective."""
        within = saved.within()
        cast(MixedStage, self.inner).attend(parameters, operations, within)
        within.release()

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        """Take part without samples in the second forward, and in the backward. Collective."""
        within, inner = saved.within(), cast(MixedStage, self.inner)
        inner.attend(parameters, operations, within)
        inner.attend_backward(parameters, gradients, operations, within)
        within.release()


_LINEARS: Final = ("linear_column", "linear_row")


def split_operations(operations: Operations) -> Operations:
    """Return ``operations`` whose backward puts off the gradients of weights; see `weight_gradients`."""
    return replace(
        operations,
        linear_column=SplitLinear("linear_column", operations.linear_column),
        linear_row=SplitLinear("linear_row", operations.linear_row),
        embed=SplitEmbedding(operations.embed),
        attention=SplitAttention(operations.attention),
    )


def release_first_pass(saved: Saved) -> None:
    """Give back what only the first pass needed, once a stage's backward with `split_operations` is done."""
    saved.narrow()


def weight_gradients(parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved) -> None:
    """Write or add the gradients that a backward with `split_operations` has put off; then ``saved`` can be released.

    Local. Of ``parameters`` only the names count: their memory may be freed.
    """
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
    """The linear ``inner``, which the table has under ``name``, without its second pass."""

    name: str
    inner: LinearOperation

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """As of the inner one."""
        return self.inner.weight_reads

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        """Return y."""
        return self.inner.forward(parameters, prefix, x, saved, biased=biased)

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx; no gradient is written."""
        dx = self.inner.backward_input(parameters, prefix, dy, saved)
        _defer(self.name, prefix, dy, saved, self.weight_reads)
        return dx

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx."""
        return self.inner.backward_input(parameters, prefix, dy, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Keep dy; no gradient is written."""
        _defer(self.name, prefix, dy, saved, self.weight_reads)


@dataclass(frozen=True)
class SplitEmbedding:
    """The embedding ``inner``, with its backward put off as a whole."""

    inner: EmbeddingOperation

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """As of the inner one."""
        return self.inner.weight_reads

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return the rows of the table."""
        return self.inner.forward(parameters, prefix, tokens, saved)

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Keep dy; no gradient is written."""
        _defer("embed", prefix, dy, saved, self.weight_reads)


@dataclass(frozen=True)
class SplitAttention:
    """The attention ``inner``, whose input gradient ``saved`` keeps for the second pass of the linear before it."""

    inner: AttentionOperation

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        """Return (batch, context, width)."""
        return self.inner.forward(qkv, head_size, saved, **options)

    def backward(self, dy: Array, saved: Saved, *, keep: bool = True) -> Array | tuple[Array, Array]:
        """Return dqkv, or (dq, dkv), which ``saved`` owns."""
        return self.inner.backward(dy, saved, keep=keep)


def _defer(name: str, prefix: str, dy: Array, saved: Saved, reads: tuple[str, ...]) -> None:
    """Keep what the second pass of ``prefix`` needs. Other memory may be written, or belong to others, by then."""
    if saved.owns(dy):
        saved.keep(f"{prefix}.dy", dy)
    else:
        saved.empty(f"{prefix}.dy", dy.shape, dy.dtype)[...] = dy
    for needed in ("dy", *reads):
        saved.hold(f"{prefix}.{needed}")
    saved.deferred[prefix] = name
