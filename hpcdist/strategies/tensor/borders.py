"""The borders between what every rank computes and what the ranks of the tensor axis compute in parallel.

Each border is a pair of conjugate operators: what is the identity in the forward is a sum in the backward, and the
other way round (f and g of arXiv:1909.08053). `ByRows` has the pair of arXiv:2205.05198: an all-gather and a
reduce-scatter. Whoever calls a method here, all ranks of the axis do, in the same order.
"""

from typing import Any, Protocol

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.models.stage import Saved
from hpcdist.strategies.tensor.axis import TensorAxis


class Borders(Protocol):
    """What a rank has of the activations outside of the parallel parts; inside it has all tokens."""

    axis: TensorAxis
    by_rows: bool  # whether a rank has only some of the tokens

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return all tokens of ``x``: itself, or a scratch array (batch, context, hidden)."""

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum the ranks' parts of the gradient of what was entered with, in place; return what this rank has of it."""

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return uninitialised memory (..., hidden) for this rank's summand of a result, all tokens of it."""

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum the ranks' summands; return what this rank has of the result, kept under ``name``."""

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return the gradient of all tokens: ``dy`` itself, or a scratch array."""

    def first_token(self, y: Array) -> int:
        """Return which of all tokens is the first that this rank has in ``y`` (local)."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what this rank has of activations of the shape ``whole`` (local)."""


class Whole:
    """Every rank has all activations, the same bits."""

    by_rows = False

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return x (local)."""
        return x

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum dx in place and return it."""
        self.axis.allreduce(dx.reshape(-1))
        return dx

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return the memory of the result itself (local)."""
        return saved.empty(name, shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum in place; return ``partial``."""
        self.axis.allreduce(partial.reshape(-1))
        return partial

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return dy (local)."""
        return dy

    def first_token(self, y: Array) -> int:
        """Return 0: it has all tokens."""
        return 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``whole``."""
        return whole


class ByRows:
    """Activations are cut by tokens: a rank has a range of the rows of (batch x context, hidden), uneven if need be.

    All samples have ``context`` tokens, at least one a rank: so the own rows tell how many there are in all.
    """

    by_rows = True

    def __init__(self, axis: TensorAxis, context: int) -> None:
        self.axis, self.context = axis, context
        assert context >= axis.size

    def enter(self, x: Array, saved: Saved) -> Array:
        """Gather the rows of x (rows, hidden)."""
        return self._gather(x, saved)

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum dx (..., hidden) to the ranks that have its rows; return the own ones, a part of its memory."""
        return self._scatter(dx)

    def partial(self, shape: tuple[int, ...], dtype: Any, name: str, saved: Saved) -> Array:
        """Return a scratch array (local)."""
        return saved.scratch("tensor.partial", shape, dtype)

    def leave(self, partial: Array, name: str, saved: Saved) -> Array:
        """Sum to the ranks that have the rows; return the own ones (rows, hidden)."""
        own = self._scatter(partial)
        y = saved.empty(name, own.shape, own.dtype)
        y[...] = own
        return y

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Gather the rows of dy (rows, hidden)."""
        return self._gather(dy, saved)

    def first_token(self, y: Array) -> int:
        """Return the index of the first own row among all (local)."""
        return self._rows(self._tokens(y.shape[0]))[self.axis.rank].start

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return (own rows, hidden) for (batch, context, hidden)."""
        batch, context, hidden = whole
        return self._rows(batch * context)[self.axis.rank].size, hidden

    def _rows(self, tokens: int) -> list[Range]:
        return split(tokens, self.axis.size, itemsize=1, align_bytes=1)

    def _tokens(self, own: int) -> int:
        # This many rows here stand for one of `axis.size` consecutive numbers; one of them is a multiple of `context`.
        return (own * self.axis.size + self.axis.rank) // self.context * self.context

    def _gather(self, own: Array, saved: Saved) -> Array:
        rows, hidden = own.shape
        tokens = self._tokens(rows)
        whole = saved.scratch("tensor.gathered", (tokens // self.context, self.context, hidden), own.dtype)
        buffer = whole.reshape(-1)
        shares = self._shares(tokens, hidden)
        buffer[shares[self.axis.rank].slice] = own.reshape(-1)
        self.axis.all_gather(buffer, shares)
        return whole

    def _scatter(self, whole: Array) -> Array:
        hidden = whole.shape[-1]
        buffer = whole.reshape(-1)
        shares = self._shares(buffer.size // hidden, hidden)
        self.axis.reduce_scatter(buffer, shares)
        return buffer[shares[self.axis.rank].slice].reshape(-1, hidden)

    def _shares(self, tokens: int, hidden: int) -> list[Range]:
        return [Range(rows.start * hidden, rows.stop * hidden) for rows in self._rows(tokens)]
