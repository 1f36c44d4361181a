"""How numbered samples are cut out of an array of tokens or of a table."""

from typing import Any, Protocol, TypeAlias

import numpy as np

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]  # inputs (samples, ...), targets (samples, ...)


class Sliceable(Protocol):
    """What an array and an HDF5 dataset have in common: elements are read when a slice is asked for."""

    @property
    def dtype(self) -> np.dtype:
        """Type of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length in every dimension."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Part:
    """Elements ``start`` to ``stop - 1`` of a dataset, read when a slice of them is asked for."""

    def __init__(self, whole: Sliceable, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.dtype = whole.dtype
        self.shape = (stop - start, *whole.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice, /) -> Any:
        start, stop, step = index.indices(len(self))
        return self._whole[self._start + start : self._start + stop : step]


def part(whole: Sliceable, start: int, stop: int) -> Sliceable:
    """Return elements ``start`` to ``stop - 1`` of ``whole`` without reading them."""
    return whole[start:stop] if isinstance(whole, np.ndarray) else Part(whole, start, stop)


class Samples(Protocol):
    """``count`` samples at each of ``shifts`` offsets."""

    count: int
    shifts: int

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return the samples at ``indices`` (n,) as new arrays: inputs (n, ...) and targets (n, ...)."""
        ...


class Windows:
    """Windows of ``context`` tokens side by side; the target of each token is the next one.

    With ``shifting`` all windows can be moved by up to ``context - 1`` tokens, so that epochs do not always cut the
    text at the same places.
    """

    def __init__(self, tokens: Sliceable, context: int, shifting: bool) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = (len(tokens) - 1) // context
        if shifting and self.count > 1:
            self.count -= 1  # room for the shift
        self.shifts = min(context, len(tokens) - self.count * context) if shifting else 1

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs and targets, both (n, context)."""
        block = _rows(self._tokens, indices * self._context + shift, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])


class NextToken:
    """Every place in a text: the input is the ``context`` tokens before it, the target its token."""

    shifts = 1

    def __init__(self, tokens: Sliceable, context: int) -> None:
        assert len(tokens) > context
        self._tokens, self._context = tokens, context
        self.count = len(tokens) - context

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, context) and targets (n,)."""
        block = _rows(self._tokens, indices, self._context + 1)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, -1])


class Rows:
    """Rows ``start`` to ``stop - 1`` of a table ``x`` (rows, ...) and of its classes ``y`` (rows,).

    ``shaped`` ones keep the shape that they have in ``x``; others become a line of features.
    """

    shifts = 1

    def __init__(self, x: Sliceable, y: Sliceable, start: int, stop: int, *, shaped: bool = False) -> None:
        assert start < stop <= len(x) == len(y)
        self._shaped = shaped
        self._x, self._y, self._start = x, y, start
        self.count = stop - start

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, features), or (n, ...), and targets (n,)."""
        rows = [self._start + int(index) for index in indices]
        x = np.empty((len(rows), *self._x.shape[1:]), self._x.dtype)
        y = np.empty(len(rows), self._y.dtype)
        for place, row in enumerate(rows):
            x[place], y[place] = self._x[row], self._y[row]
        return x if self._shaped else x.reshape(len(rows), int(np.prod(x.shape[1:]))), y


def _rows(tokens: Sliceable, starts: np.ndarray, length: int) -> np.ndarray:
    """Return (n, length): the tokens from each start on."""
    block = np.empty((len(starts), length), tokens.dtype)
    for row, start in enumerate(starts.tolist()):
        block[row] = tokens[start : start + length]
    return block
