"""Protocols of a stage, its operations, its gradients and its saved activations; the tensors that stages declare.

Every operation has an explicit ``forward`` and ``backward``. Operations with tensors take the whole mapping and the
prefix of their names, so that a replacement may own other shapes. What a backward needs is kept in ``saved`` under
that prefix. `hpcdist.models.model.LOCAL` is the table that computes everything on this rank.

Rules that every stage and operation keeps, so that no buffer is copied:
- forward returns an array that `Saved` owns; it stays valid until that `Saved` is released;
- an operation's backward leaves ``dy`` alone, and may overwrite what its forward saved;
- a stage's backward may overwrite ``dy`` and may return it as ``dx``.

The specs at the end (norm, column and row linear) say along which dim tensor parallelism cuts a tensor, and
`draw_normal` writes initial values. Tokens and classes are checked against the size of their table by `check_tokens`,
and made int64 for kernels by `as_indices`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeAlias, TypedDict, Unpack, cast

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import DataError
from hpcdist.models.documents import Documents
from hpcdist.models.experts.router import RouterState

Parameters: TypeAlias = Mapping[str, Array]  # local tensor name -> view, tied names included
StreamOf: TypeAlias = Callable[[TensorSpec], np.random.Generator]


@dataclass(frozen=True)
class Draw:
    """Key of the masks of a micro-batch: its first sample is the one at ``first_sample`` of the batch.

    ``words`` (2,) int64 on a GPU has ``first_sample`` and ``step`` for kernels, which then read them there when they
    run: those of a CUDA graph, which stays the same while both change.
    """

    seed: int
    step: int
    first_sample: int
    words: Array | None = field(default=None, compare=False, repr=False)


class Gradients(Protocol):
    """Destinations of the gradients of one stage."""

    def into(self, name: str) -> tuple[Array, bool]:
        """Return the view of tensor ``name`` and whether to add to it (False: this is the first write, overwrite)."""

    def begin_step(self) -> None:
        """Declare every tensor of the stage unwritten; call it on all stages before the first backward of a step."""

    def finish(self) -> None:
        """Zero the tensors that no backward of this step wrote."""


class Saved(Protocol):
    """Arrays that the forward of one stage on one micro-batch keeps for its backward."""

    layer: int  # the global one of the stage
    draw: Draw | None  # of what is dropped; None: nothing is, as in an evaluation
    documents: Documents | None  # of packed samples; None: each sample is one
    scale: float  # of the summed loss, in the gradient that a backward computes
    deferred: dict[
        str, str
    ]  # prefix of a tensor -> its operation, whose weight gradient is put off: see `models.runtime.split_backward`

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that is kept under ``name`` until `release`."""

    def keep(self, name: str, value: Any) -> None:
        """Keep ``value``, an array that somebody else owns or a plain object."""

    def __getitem__(self, name: str) -> Any:
        """Return what was kept under ``name``."""

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return uninitialised memory that any stage overwrites when it asks for the same ``name``."""

    def within(self) -> "Saved":
        """Return another one of the same stage, draw and documents, with own memory, that the caller releases."""

    def owns(self, array: Array) -> bool:
        """Whether ``array`` lies in memory that `empty` of this one gave."""

    def hold(self, name: str) -> None:
        """Keep what is under ``name`` through `narrow`, and its memory until `release`, whoever took it."""

    def narrow(self) -> None:
        """Give back all but what is held."""

    def release(self) -> None:
        """Give the memory back: after the backward, or once the output of the forward is no longer needed."""


class LinearOperation(Protocol):
    """``y = x weight^T + bias`` over the last dim; a tensor ``PREFIX.bias`` that does not exist is left out."""

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """The names, behind ``PREFIX.``, of what `backward_weight` reads in ``saved``."""

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        """Return y (..., outputs) for x (..., inputs); unless ``biased``, the caller adds the bias to it."""

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx, a scratch array that the next linear backward overwrites; write or add the other gradients.

        The same as the two that follow, one after the other.
        """

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return dx, as `backward` does; where a linear communicates, it is here."""

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Write or add the gradients of weight and bias.

        Local, and may come much later: of ``parameters`` it looks at the names alone.
        """


class EmbeddingOperation(Protocol):
    """Rows of a table by token."""

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """The names, behind ``PREFIX.``, of what `backward` reads in ``saved``."""

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return y (..., hidden) for integer tokens (...). Raises DataError on a token outside the table."""

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the rows of dy to the gradient of the table."""


class PositionsOperation(Protocol):
    """Rows of a table by the place in the sample."""

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add the rows of the first ``context`` positions to y (batch, context, hidden), in place; return y."""

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add dy, summed over samples, to the gradient of the table."""


class RotaryOperation(Protocol):
    """Positions as rotations of the heads of queries and keys; see `hpcdist.models.layers.embedding`."""

    def forward(self, x: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn the heads in columns [0, rotated) of x (batch, context, columns), in place; return x."""

    def backward(self, dx: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn columns [0, rotated) of the gradient back, in place; return it. Nothing of the forward is needed."""


class NormOperation(Protocol):
    """Normalisation over the last dim: "layer" with scale and bias, "rms" with a scale alone."""

    def forward(
        self,
        parameters: Parameters,
        prefix: str,
        x: Array,
        saved: Saved,
        kind: str = "layer",
        residual: Array | None = None,
    ) -> Array:
        """Return y of the shape of x, to which ``residual`` is added before, in place.

        x itself is kept and must stay unchanged until backward.
        """

    def backward(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved, residual: Array | None
    ) -> Array:
        """Return dx, a scratch array; with ``residual`` dx is added to that instead, and that is returned."""


class AttentionOptions(TypedDict, total=False):
    """Options of attention; see `hpcdist.models.attention.flash.LocalAttention`."""

    kv: Array | None  # (batch, context, 2 kv width) where qkv is the queries alone; kv width divides width
    dropout: float  # share of the probabilities that is dropped
    part: tuple[int, int] | None  # the first of these heads among those of the mask, and how many those are
    causal: bool  # whether rows see their past and themselves alone: so unless said otherwise
    window: int  # the most rows that a causal one sees, itself among them; 0: all of its past


class AttentionOperation(Protocol):
    """Attention of all heads that it is given; no square of the context is stored."""

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        """Return (batch, context, width) for qkv (batch, context, 3 width), ordered query, key, value."""

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        """Return dqkv, or (dq, dkv), scratch arrays; with ``keep`` they stay, and are what ``saved`` owns."""


class ActivationOperation(Protocol):
    """An elementwise function."""

    def forward(
        self, x: Array, kind: str, saved: Saved, *, name: str = "activation", bias: Array | None = None
    ) -> Array:
        """Return "gelu" (tanh form), "relu" or "swiglu" of x; x is kept and must stay unchanged until backward.

        A ``bias`` of the last dim of x is added to it before, in place. "swiglu" of x (..., 2 w), gates before values,
        is (..., w); the others have the shape of x. Several in one stage have a ``name`` each.
        """

    def backward(self, dy: Array, saved: Saved, *, name: str = "activation") -> Array:
        """Return dx, written over the x that was kept."""


class DropoutOperation(Protocol):
    """Dropout; the mask follows from ``saved.draw`` and the layer of ``saved``; see `hpcdist.models.layers.dropout`."""

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return x (samples, ..., columns) with elements dropped at ``rate``, in the memory of x."""

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return dx, a scratch array that the next dropout backward overwrites, or dy where nothing was dropped."""


class CrossEntropyOperation(Protocol):
    """Softmax and negative log likelihood."""

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the sum of the losses over all tokens in nats; logits (tokens, classes) are overwritten.

        Targets of -1 do not count: no loss, no gradient.
        """

    def backward(self, scale: float, saved: Saved) -> Array:
        """Return dlogits = (softmax - onehot) scale, written over the logits of the forward."""


class ExpertsOperation(Protocol):
    """Router and feed-forwards of a mixture of experts; see `hpcdist.models.experts.mixture.LocalExperts`."""

    @property
    def state(self) -> RouterState:
        """The biases, and what the routers did."""

    @property
    def attends(self) -> bool:
        """Whether ranks compute together, those without samples too: see `MixedStage`."""

    def begin(
        self, parameters: Parameters, x: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        """Begin the forward; return the call that ends it, and returns (batch, context, hidden) for x of that shape.

        x is kept and stays unchanged. What is computed between both hides the way of the tokens to their experts.
        """

    def begin_backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        """Begin the backward; return the call that ends it: it has gradients written or added, and returns dx.

        dx is a scratch array.
        """


@dataclass(frozen=True)
class Operations:
    """One implementation of each operation. Column and row name how a tensor-parallel one would cut the weight."""

    linear_column: LinearOperation
    linear_row: LinearOperation
    embed: EmbeddingOperation
    positions: PositionsOperation
    rotary: RotaryOperation
    norm: NormOperation
    attention: AttentionOperation
    activation: ActivationOperation
    dropout: DropoutOperation
    cross_entropy: CrossEntropyOperation
    experts: ExpertsOperation | None = None  # where blocks have some


class Stage(Protocol):
    """A unit of a model that can be cut off, gathered and freed."""

    layer: int
    tied: dict[str, str]  # local name -> key of a tensor that another layer owns

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the tensors that this stage owns, in the order of the layout."""

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of what `forward` gives for so many samples, each of the full length."""

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Write the initial values of the own tensors: float64 draws, rounded once."""

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output of the stage."""

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Write or add the gradients; return that of the input, None where the input is data."""


class MixedStage(Stage, Protocol):
    """A stage with experts, whose ranks compute together where they share those out: also those without samples."""

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        """Take part without samples in `forward`. Collective."""

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        """Take part without samples in `backward`, and write or add the gradients of the experts here. Collective."""


class DeclaredStage:
    """Base of stages that say at their construction what they own: the ``specs`` of their tensors.

    ``output`` is the shape of the output of a sample, and ``tied`` as in `Stage`.
    """

    def __init__(
        self, layer: int, specs: Iterable[TensorSpec], output: tuple[int, ...] = (), tied: dict[str, str] | None = None
    ) -> None:
        self.layer, self.tied = layer, tied or {}
        self._specs, self._output = tuple(specs), output

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the own tensors, in the order of the layout."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the output of so many samples."""
        return samples, *self._output

    def with_tokens(self, tokens: int) -> Self:
        """Return the same stage for so many tokens of each sample: the first dim of its output, behind samples."""
        other = copy.copy(self)
        other._output = (tokens, *self._output[1:])
        return other


class WrappedStage:
    """Base of stages that act as the stage ``inner``, with ``specs`` of the own tensors in the place of its own."""

    def __init__(self, inner: Stage, specs: Iterable[TensorSpec]) -> None:
        self.inner, self.layer, self.tied = inner, inner.layer, inner.tied
        self._specs = tuple(specs)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the own tensors, in the order of those of the inner one."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return that of the inner one."""
        return self.inner.output_shape(samples)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Draw the values of the inner one."""
        self.inner.initialise(parameters, rng_of)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output. Collective where an operation of ``operations`` is."""
        return self.inner.forward(parameters, x, operations, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Write or add the gradients of the own tensors; return that of the input. Collective as `forward`."""
        return self.inner.backward(parameters, gradients, dy, operations, saved)

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        """Take part without samples in `forward`. Collective."""
        cast(MixedStage, self.inner).attend(parameters, operations, saved)

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        """Take part without samples in `backward`. Collective."""
        cast(MixedStage, self.inner).attend_backward(parameters, gradients, operations, saved)


def draw_normal(parameters: Parameters, spec: TensorSpec, rng_of: StreamOf, deviation: float) -> None:
    """Write normal draws of so large a deviation, in float64 and rounded once."""
    parameters[spec.name][...] = rng_of(spec).standard_normal(spec.shape) * deviation


def norm_specs(layer: int, name: str, width: int, kind: str) -> tuple[TensorSpec, ...]:
    """Return the scale of a norm over ``width`` numbers and, of a "layer" norm, its bias."""
    scale = TensorSpec(layer, f"{name}.scale", (width,), False)
    return (scale,) if kind == "rms" else (scale, TensorSpec(layer, f"{name}.bias", (width,), False))


def column_specs(layer: int, name: str, inputs: int, *outputs: int, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return weight and bias that tensor parallelism cuts by outputs, along the last dim of those.

    ``outputs`` are those of one linear, or before them how many are stacked.
    """
    last = len(outputs) - 1
    stacked = outputs[0] if last else 1
    weight = TensorSpec(layer, f"{name}.weight", (*outputs, inputs), cut=last, stacked=stacked)
    return (weight, TensorSpec(layer, f"{name}.bias", outputs, False, cut=last, stacked=stacked)) if bias else (weight,)


def row_specs(layer: int, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return a weight that tensor parallelism cuts by inputs, and a bias that all ranks have."""
    weight = TensorSpec(layer, f"{name}.weight", (outputs, inputs), cut=1)
    return (weight, TensorSpec(layer, f"{name}.bias", (outputs,), False)) if bias else (weight,)


IGNORED: Final = -1  # as a target: no loss, no gradient


def check_tokens(tokens: Array, count: int, what: str, *, ignored: bool = False) -> None:
    """Raise DataError unless all ``tokens`` lie in [0, count), or are IGNORED where that is allowed.

    A GPU is not asked: it would wait.
    """
    if not is_device(tokens) and tokens.size:
        least, most = int(tokens.min()), int(tokens.max())
        if least < (IGNORED if ignored else 0) or most >= count:
            raise DataError(
                f"{what} {most if most >= count else least} is outside [0, {count}); the data does not fit the model: "
                "set model.vocabulary above its largest token, or give other data"
                + (f" ({IGNORED} marks a {what} that does not count)" if ignored else "")
            )


def as_indices(tokens: Array, saved: Saved) -> Array:
    """Return ``tokens`` as int64 (tokens,): kernels are compiled for one type. A scratch array on the CPU.

    So operations keep the tokens as they were given, by reference, and call this again in their backward.
    """
    if is_device(tokens):
        return tokens.reshape(-1).astype(np.int64)
    indices = saved.scratch("tokens.indices", tokens.shape, np.int64)
    indices[...] = tokens
    return indices.reshape(-1)
