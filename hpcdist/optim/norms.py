"""Norms of tensors for layer-wise rates, summed piece by piece.

A tensor that arrives in blocks, one behind the other, has the same bits of norm as one that arrives whole: its four
running sums are kept between the blocks. So a state that is read in blocks from a file is updated as one in memory.

`ExactNorms` do not round at all, see `hpcdist.optim.exact`: they have the same bits however tensors are cut.
"""

from collections.abc import Iterable

import numpy as np

from hpcdist.arrays.backend import Array, is_device, zeros
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range
from hpcdist.optim import exact, kernels

LANES = 4  # of `kernels.sum_of_squares`


@jit
def _squares_on(values, lanes):  # type: ignore[no-untyped-def]
    # As `kernels.sum_of_squares`, from the sums that the block before has left.
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    whole = values.size - values.size % 4
    for i in range(0, whole, 4):
        p, q = np.float64(values[i]), np.float64(values[i + 1])
        r, s = np.float64(values[i + 2]), np.float64(values[i + 3])
        a += p * p
        b += q * q
        c += r * r
        d += s * s
    for i in range(whole, values.size):
        p = np.float64(values[i])
        a += p * p
    lanes[0], lanes[1], lanes[2], lanes[3] = a, b, c, d


def sum_of_squares(blocks: Iterable[Array]) -> float:
    """Return the sum of squares of consecutive ``blocks``, with the bits of `kernels.sum_of_squares` of the whole.

    All but the last have a multiple of 4 elements. On the host.
    """
    lanes = np.zeros(LANES)
    for block in blocks:
        _squares_on(block, lanes)
    return _total(lanes)


def _total(lanes: np.ndarray) -> float:
    a, b, c, d = lanes.tolist()
    return float((a + b) + (c + d))


class _Stretch:
    """Running sums of squares of w and u over one stretch of a tensor."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self.weights, self.step = np.zeros(LANES), np.zeros(LANES)

    def continues(self, where: Range) -> bool:
        """Whether ``where`` follows, and its first element goes to the first lane."""
        return where.start == self.stop and (self.stop - self.start) % LANES == 0


class Norms:
    """sum(w^2) and sum(u^2) of each of ``count`` tensors, over the pieces that were given since `clear`."""

    def __init__(self, count: int, on: str) -> None:
        self._sums = zeros((count, 2), np.dtype(np.float64), on)
        self._open: dict[int, _Stretch] = {}

    def clear(self) -> None:
        """Forget all pieces."""
        self._open.clear()
        self._sums[...] = 0.0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        """Add the piece of ``tensor`` at ``where``."""
        if is_device(weights):
            self._sums[tensor, 0] += kernels.sum_of_squares(weights)
            self._sums[tensor, 1] += kernels.sum_of_squares(step)
            return
        stretch = self._open.get(tensor)
        if stretch is None or not stretch.continues(where):
            self._close(tensor)
            stretch = self._open[tensor] = _Stretch(where.start)
        _squares_on(weights, stretch.weights)
        _squares_on(step, stretch.step)
        stretch.stop = where.stop

    def sums(self) -> Array:  # (tensors, 2)
        """Return the sums, where the weights live."""
        for tensor in list(self._open):
            self._close(tensor)
        return self._sums

    def _close(self, tensor: int) -> None:
        stretch = self._open.pop(tensor, None)
        if stretch is not None:
            self._sums[tensor, 0] += _total(stretch.weights)
            self._sums[tensor, 1] += _total(stretch.step)


class ExactNorms:
    """As `Norms`, of weights on the host, in the accumulators of `hpcdist.optim.exact`: to be rounded by it."""

    def __init__(self, count: int) -> None:
        self._sums = exact.zeros(count, 2)

    def clear(self) -> None:
        """Forget all pieces."""
        self._sums[...] = 0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        """Add the piece of ``tensor`` at ``where``."""
        exact.add_squares(weights, self._sums[tensor, 0])
        exact.add_squares(step, self._sums[tensor, 1])

    def sums(self) -> np.ndarray:  # (tensors, 2, exact.SLOTS)
        """Return the sums so far."""
        return self._sums


for _dtype in (np.float32, np.float64):
    _squares_on.sample(lambda _dtype=_dtype: (np.ones(8, _dtype), np.zeros(LANES)))
