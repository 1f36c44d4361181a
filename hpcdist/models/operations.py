"""Table of operations that the stages call. `LOCAL` computes everything on this rank; strategies replace entries.

Every operation has an explicit ``forward`` and ``backward``. Operations with tensors take the whole mapping and the
prefix of their names, so that a replacement may own other shapes. What a backward needs is kept in ``saved`` under
that prefix. An operation leaves ``dy`` alone; see `hpcdist.models.stage` for who may overwrite what.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from hpcdist.arrays.backend import Array, Scalar
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.layers.activation import LocalActivation
from hpcdist.models.layers.cross_entropy import LocalCrossEntropy
from hpcdist.models.layers.dropout import LocalDropout
from hpcdist.models.layers.embedding import LocalEmbedding, LocalPositions, LocalRotary
from hpcdist.models.layers.linear import LocalLinear
from hpcdist.models.layers.norm import LocalNorm
from hpcdist.models.stage import Gradients, Parameters, Saved


class LinearOperation(Protocol):
    """``y = x weight^T + bias`` over the last dim; a tensor ``PREFIX.bias`` that does not exist is left out."""

    @property
    def weight_reads(self) -> tuple[str, ...]:
        """The names, behind ``PREFIX.``, of what `backward_weight` reads in ``saved``."""

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved) -> Array:
        """Return y (..., outputs) for x (..., inputs)."""

    def backward(
        self,
        parameters: Parameters,
        gradients: Gradients,
        prefix: str,
        dy: Array,
        saved: Saved,
        input_gradient: bool = True,
    ) -> Array | None:
        """Return dx, a scratch array that the next linear backward overwrites; None without ``input_gradient``.

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

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, kind: str = "layer") -> Array:
        """Return y of the shape of x; x itself is kept and must stay unchanged until backward."""

    def backward(
        self,
        parameters: Parameters,
        gradients: Gradients,
        prefix: str,
        dy: Array,
        saved: Saved,
        residual: Array | None = None,
    ) -> Array:
        """Return dx, a scratch array; with ``residual`` dx is added to that instead, and that is returned."""


class AttentionOperation(Protocol):
    """Attention of all heads that it is given; no square of the context is stored."""

    def forward(
        self,
        qkv: Array,
        head_size: int,
        saved: Saved,
        name: str = "attention",
        dropout: float = 0.0,
        part: tuple[int, int] | None = None,
        kv: Array | None = None,
        causal: bool = True,
    ) -> Array:
        """Return (batch, context, width) for qkv (batch, context, 3 width), ordered query, key, value.

        With ``kv`` (batch, context, 2 kv width), qkv is the queries alone; kv width divides width. ``dropout`` is how
        much of the probabilities is dropped, and ``part`` where these heads are in the mask: see `LocalAttention`.
        """

    def backward(
        self, dy: Array, saved: Saved, name: str = "attention", keep: bool = False
    ) -> Array | tuple[Array, Array]:
        """Return dqkv, or (dq, dkv), scratch arrays; with ``keep`` they stay, and are what ``saved`` owns."""


class ActivationOperation(Protocol):
    """An elementwise function."""

    def forward(self, x: Array, kind: str, saved: Saved, name: str = "activation") -> Array:
        """Return "gelu" (tanh form), "relu" or "swiglu" of x; x is kept and must stay unchanged until backward.

        "swiglu" of x (..., 2 w), gates before values, is (..., w); the others have the shape of x.
        """

    def backward(self, dy: Array, saved: Saved, name: str = "activation") -> Array:
        """Return dx, written over the x that was kept."""


class DropoutOperation(Protocol):
    """What is dropped follows from ``saved.draw`` and the layer of ``saved``; see `hpcdist.models.layers.dropout`."""

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return x (samples, ..., columns) with elements dropped at ``rate``, in the memory of x."""

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return dx, a scratch array that the next dropout backward overwrites, or dy where nothing was dropped."""


class CrossEntropyOperation(Protocol):
    """Softmax and negative log likelihood."""

    def forward(self, logits: Array, targets: Array, saved: Saved, name: str = "cross_entropy") -> Scalar:
        """Return the sum of the losses over all tokens in nats; logits (tokens, classes) are overwritten.

        Targets of -1 do not count: no loss, no gradient.
        """

    def backward(self, scale: float, saved: Saved, name: str = "cross_entropy") -> Array:
        """Return dlogits = (softmax - onehot) scale, written over the logits of the forward."""


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


LOCAL: Final = Operations(
    linear_column=LocalLinear(),
    linear_row=LocalLinear(),
    embed=LocalEmbedding(),
    positions=LocalPositions(),
    rotary=LocalRotary(),
    norm=LocalNorm(),
    attention=LocalAttention(),
    activation=LocalActivation(),
    dropout=LocalDropout(),
    cross_entropy=LocalCrossEntropy(),
)
