"""Protocols of a stage, its operations, its gradients and its saved activations; the tensors that stages declare.

Rules for stages and operations, so that no buffer is copied:
- A forward returns an array that `Saved` owns, valid until that `Saved` is released.
- An operation's backward does not change ``dy``, and may overwrite the data that its forward saved.
- A stage's backward may overwrite ``dy`` and may return it as ``dx``.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeAlias, TypedDict, Unpack, cast

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import DataError
from hpcdist.models.config import EPSILON, Rotation
from hpcdist.models.documents import Documents
from hpcdist.models.experts.router import RouterState

Parameters: TypeAlias = Mapping[str, Array]  # local tensor name -> view, tied names included
StreamOf: TypeAlias = Callable[[TensorSpec], np.random.Generator]


@dataclass(frozen=True)
class Draw:
    """Seed, step and first sample, which determine the dropout masks of a micro-batch."""

    seed: int
    step: int
    first_sample: int  # index in the batch
    # int64 GPU array (first sample, step), which kernels in CUDA graphs read
    words: Array | None = field(default=None, compare=False, repr=False)


class Gradients(Protocol):
    """Gradient arrays of one stage. The first gradient of a step overwrites an array, all others are added."""

    @property
    def views(self) -> Parameters:
        """The gradient arrays of the stage: {parameter name: array}."""

    def wants(self, name: str) -> bool:
        """Return True if the stage has a tensor ``name`` that is trained."""

    def into(self, name: str) -> tuple[Array, bool]:
        """Return (gradient array of the tensor ``name``, True if the caller must add to the array, else False).

        For a frozen tensor, the array is scratch memory that nobody reads.
        """

    def begin_step(self) -> None:
        """Mark all gradients of the stage as unwritten, before the first backward pass of a step."""

    def finish(self) -> None:
        """Set the gradient arrays to 0 that no backward pass of this step has written."""


class Saved(Protocol):
    """Activations that one stage keeps from its forward pass to its backward pass, for one micro-batch."""

    layer: int  # global layer of the stage
    draw: Draw | None  # key of the dropout masks; None: no dropout, as in an evaluation
    documents: Documents | None  # of packed samples; None: not packed
    scale: float  # factor of the summed loss in the gradient
    deferred: dict[str, str]  # tensor prefix -> operation with a deferred weight gradient; see `split_backward`

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new uninitialised array, which this object stores under ``name`` until `release`."""

    def keep(self, name: str, value: Any) -> None:
        """Store ``value``, an array or any other object, under ``name`` until `release`, without a copy."""

    def __getitem__(self, name: str) -> Any:
        """Return the array or object stored under ``name``."""

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array, whose memory the next call with the same ``name``, by any stage, reuses."""

    def within(self) -> "Saved":
        """Return a new, empty `Saved` object for the same stage and micro-batch. The caller must release it."""

    def owns(self, array: Array) -> bool:
        """Return True if `empty` of this object allocated the memory of ``array``."""

    def hold(self, name: str) -> None:
        """Mark the array ``name``, so that `narrow` does not free the array. `release` frees it."""

    def narrow(self) -> None:
        """Free all stored arrays and objects, except the arrays marked by `hold`."""

    def release(self) -> None:
        """Free all stored arrays and objects, after the backward pass or when the output is no longer needed."""


class LinearOperation(Protocol):
    """Interface of linear layers y = x weight^T + bias. Tensors: ``PREFIX.weight`` and, optionally, ``PREFIX.bias``."""

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """Names, without the prefix ``PREFIX.``, of the saved arrays that `backward_weight` needs."""

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        """Return ``x weight^T``, plus the bias if ``biased`` is True. Keep x in ``saved`` for backward."""

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        """Compute all parameter gradients. Return the gradient of x, an array that the next call overwrites."""

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        """Return the input gradient for the output gradient dy. Compute no parameter gradients."""

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        """Compute the gradients of weight and bias for the output gradient dy. Local."""


class EmbeddingOperation(Protocol):
    """Interface of token embeddings. A token is the index of a row in the embedding table."""

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """Names, without the prefix ``PREFIX.``, of the saved arrays that `backward` needs."""

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return embeddings (..., hidden) for ``tokens`` (...). Raises DataError for tokens outside the vocabulary."""

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add dy[i] to row ``tokens[i]`` of the gradient of ``PREFIX.weight``, with the ``tokens`` of `forward`."""


class PositionsOperation(Protocol):
    """Interface of learned position embeddings. A table has one row per token position."""

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add the embedding of each token's position to y, of shape (batch, context, hidden), in place. Return y."""

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the sum of dy over the samples to the gradient of the position table."""


class RotaryOperation(Protocol):
    """Interface of rotary position encodings of query and key heads; see `hpcdist.models.layers.rotary`."""

    def forward(self, x: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        """Rotate the heads in the first ``rotated`` columns of x, (batch, context, columns), in place. Return x."""

    def backward(self, dx: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        """Rotate the gradients dx of the heads back, in place. Return dx. Other arguments are as for `forward`."""


class NormOperation(Protocol):
    """Interface of norms over the last dimension: "layer" has a scale and a bias, "rms" only a scale."""

    def forward(
        self,
        parameters: Parameters,
        prefix: str,
        x: Array,
        saved: Saved,
        kind: str = "layer",
        epsilon: float = EPSILON,
        residual: Array | None = None,
    ) -> Array:
        """Add ``residual``, if any, to x in place. Return the norm ``kind`` of x. Do not change x before backward.

        ``epsilon``: number that is added to the variance or mean square.
        """

    def backward(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved, residual: Array | None
    ) -> Array:
        """Return the gradient of x. If ``residual`` is an array, add the gradient to it and return ``residual``."""


class AttentionOptions(TypedDict, total=False):
    """Options of the attention forward pass; see `hpcdist.models.attention.flash.LocalAttention`."""

    kv: Array | None  # (batch, context, 2 kv width), if qkv has only queries; kv width divides width
    dropout: float  # fraction of the probabilities to drop
    part: tuple[int, int] | None  # (index of the first local head, number of heads), for the dropout mask
    causal: bool  # True by default: a token sees itself and earlier tokens only
    window: int  # sliding window of causal attention in tokens, including the token itself; 0: no window


class AttentionOperation(Protocol):
    """Interface of multi-head attention that never stores an array of size context x context."""

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        """Return the attention, of shape (batch, context, width), for qkv of shape (batch, context, 3 width)."""

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        """Return the gradient of qkv, or of (queries, kv). Unless ``keep``, the next call overwrites the result."""


class ActivationOperation(Protocol):
    """Interface of elementwise activation functions."""

    def forward(
        self, x: Array, kind: str, saved: Saved, *, name: str = "activation", bias: Array | None = None
    ) -> Array:
        """Return the activation ``kind``, e.g. "gelu", of x + ``bias``. The caller must not change x until backward."""

    def backward(self, dy: Array, saved: Saved, *, name: str = "activation") -> Array:
        """Return the input gradient for the output gradient dy. The input gradient overwrites x in ``saved``."""


class DropoutOperation(Protocol):
    """Interface of dropout. The draw and layer of ``saved``, and the number ``site``, determine the masks."""

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Apply dropout with the given ``rate`` to x in place. ``site``: number of the call in the layer. Return x."""

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return the input gradient of dropout for dy. ``rate`` and ``site``: as for `forward`."""


class CrossEntropyOperation(Protocol):
    """Interface of the cross-entropy loss: softmax and negative log likelihood."""

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the summed loss in nats. A target of -1 has no loss. Overwrites ``logits`` (tokens, classes)."""

    def backward(self, scale: float, saved: Saved) -> Array:
        """Return (softmax - onehot) * ``scale``, the gradient of the logits. This gradient overwrites the logits."""


class ExpertsOperation(Protocol):
    """Interface of mixtures of experts: router and experts; see `hpcdist.models.experts.mixture.LocalExperts`."""

    @property
    def state(self) -> RouterState:
        """Load-balancing biases and load statistics of the routers of all layers."""

    @property
    def attends(self) -> bool:
        """True if a rank without samples must still call the collectives of each forward and backward pass."""

    def begin(
        self, parameters: Parameters, x: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        """Start the forward pass for x (batch, context, hidden). Return a function that waits for the output."""

    def begin_backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        """Start the backward pass for the output gradient dy. Return a function that waits for the input gradient."""


@dataclass(frozen=True)
class Operations:
    """Operations of a model. Tensor parallelism divides outputs of ``linear_column`` and inputs of ``linear_row``."""

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
    experts: ExpertsOperation | None = None  # if blocks have experts


class Stage(Protocol):
    """Consecutive layers of a model. Strategies assign whole stages to ranks."""

    layer: int
    tied: dict[str, str]  # local name -> key of a tensor that another layer owns

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the tensors that this stage owns, in the order of the flat parameter layout."""

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the output for ``samples`` samples of full context length."""

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Write the initial values of this stage's tensors to ``parameters``.

        ``rng_of(spec)``: random generator for the tensor of ``spec``. Values are drawn in float64, then rounded.
        """

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output of the stage for the input x. Store the activations for `backward` in ``saved``."""

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Return the input gradient, or None if the input is data. ``dy``: gradient of the stage's output."""


class MixedStage(Stage, Protocol):
    """Stage with experts. Ranks without samples call `attend` and `attend_backward` to take part in the exchanges."""

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        """On a rank without samples, call the collectives of `forward`. Collective over the expert-parallel ranks."""

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        """On a rank without samples, call the collectives of `backward`, and compute this rank's expert gradients."""


class DeclaredStage:
    """Base class of stages that pass the specs of their tensors to the constructor as ``specs``."""

    def __init__(
        self, layer: int, specs: Iterable[TensorSpec], output: tuple[int, ...] = (), tied: dict[str, str] | None = None
    ) -> None:
        self.layer = layer
        self.tied = tied or {}  # name in this stage -> key of another layer's tensor
        self._specs, self._output = tuple(specs), output  # the output shape is for one sample

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        return samples, *self._output

    def with_tokens(self, tokens: int) -> Self:
        """Return a copy of this stage for ``tokens`` tokens per sample, as a context-parallel rank has."""
        other = copy.copy(self)
        other._output = (tokens, *self._output[1:])
        return other


class WrappedStage:
    """Base class of stages that wrap a stage ``inner``, and own tensors of ``specs`` instead of its tensors."""

    def __init__(self, inner: Stage, specs: Iterable[TensorSpec]) -> None:
        self.inner, self.layer, self.tied = inner, inner.layer, inner.tied
        self._specs = tuple(specs)

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        return self.inner.output_shape(samples)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        self.inner.initialise(parameters, rng_of)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        return self.inner.forward(parameters, x, operations, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        return self.inner.backward(parameters, gradients, dy, operations, saved)

    def attend(self, parameters: Parameters, operations: Operations, saved: Saved) -> None:
        cast(MixedStage, self.inner).attend(parameters, operations, saved)

    def attend_backward(
        self, parameters: Parameters, gradients: Gradients, operations: Operations, saved: Saved
    ) -> None:
        cast(MixedStage, self.inner).attend_backward(parameters, gradients, operations, saved)


def draw_normal(parameters: Parameters, spec: TensorSpec, rng_of: StreamOf, deviation: float) -> None:
    """Fill the tensor of ``spec`` from ``rng_of(spec)``: normal, mean 0, standard deviation ``deviation``."""
    parameters[spec.name][...] = rng_of(spec).standard_normal(spec.shape) * deviation


def norm_specs(layer: int, name: str, width: int, kind: str) -> tuple[TensorSpec, ...]:
    """Return the tensor specs of a norm over ``width`` columns: a scale and, for the kind "layer", a bias."""
    scale = TensorSpec(layer, f"{name}.scale", (width,), False)
    return (scale,) if kind == "rms" else (scale, TensorSpec(layer, f"{name}.bias", (width,), False))


def column_specs(layer: int, name: str, inputs: int, *outputs: int, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return the specs of a linear layer sharded by outputs, with a weight of shape (``*outputs``, ``inputs``)."""
    last = len(outputs) - 1
    stacked = outputs[0] if last else 1
    weight = TensorSpec(layer, f"{name}.weight", (*outputs, inputs), cut=last, stacked=stacked)
    return (weight, TensorSpec(layer, f"{name}.bias", outputs, False, cut=last, stacked=stacked)) if bias else (weight,)


def row_specs(layer: int, name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[TensorSpec, ...]:
    """Return the specs of a linear layer sharded by inputs, with a weight of shape (``outputs``, ``inputs``)."""
    weight = TensorSpec(layer, f"{name}.weight", (outputs, inputs), cut=1)
    return (weight, TensorSpec(layer, f"{name}.bias", (outputs,), False)) if bias else (weight,)


IGNORED: Final = -1  # target without loss and gradient


def check_tokens(tokens: Array, count: int, what: str, *, ignored: bool = False) -> None:
    """Raise DataError if a token is outside [0, ``count``). ``what``: name of a token in the error message."""
    # Tokens on a GPU are not checked, to avoid a wait.
    if not is_device(tokens) and tokens.size:
        least, most = int(tokens.min()), int(tokens.max())
        if least < (IGNORED if ignored else 0) or most >= count:
            raise DataError(
                f"{what} {most if most >= count else least} is outside [0, {count}); the data does not fit the model: "
                "set model.vocabulary above its largest token, or use other data"
                + (f" ({IGNORED} marks a {what} to ignore)" if ignored else "")
            )


def as_indices(tokens: Array, saved: Saved) -> Array:
    """Return ``tokens`` as a flat int64 array, on the CPU in scratch memory of ``saved``."""
    if is_device(tokens):
        return tokens.reshape(-1).astype(np.int64)
    indices = saved.scratch("tokens.indices", tokens.shape, np.int64)
    indices[...] = tokens
    return indices.reshape(-1)
