"""Norms of tensors for layer-wise rates, summed piece by piece.

A tensor that arrives in blocks, one behind the other, has the same bits of norm as one that arrives whole: its running
sums are kept between the blocks. So a state that is read in blocks from a file is updated as one in memory.

`ExactNorms` do not round at all, see `hpcdist.optim.exact`: they have the same bits however tensors are cut.
"""

from collections.abc import Iterable

import numpy as np

from hpcdist.arrays.backend import Array, is_device, zeros
from hpcdist.arrays.ranges import Range
from hpcdist.optim import exact, kernels


def sum_of_squares(blocks: Iterable[Array]) -> float:
    """Return the sum of squares of consecutive ``blocks``, with the bits of `kernels.sum_of_squares` of the whole.

    On the host.
    """
    sums, seen = np.zeros(kernels.LANES), 0
    for block in blocks:
        kernels.add_squares(block, sums, seen % kernels.LANES)
        seen += block.size
    return kernels.total(sums)


class _Stretch:
    """Running sums of squares of w and u over one stretch of a tensor."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self.weights, self.step = np.zeros(kernels.LANES), np.zeros(kernels.LANES)

    def add(self, where: Range, weights: Array, step: Array) -> None:
        """Add what follows, at ``where``."""
        phase = (where.start - self.start) % kernels.LANES
        kernels.add_squares(weights, self.weights, phase)
        kernels.add_squares(step, self.step, phase)
        self.stop = where.stop


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
        if stretch is None or where.start != stretch.stop:
            self._close(tensor)
            stretch = self._open[tensor] = _Stretch(where.start)
        stretch.add(where, weights, step)

    def sums(self) -> Array:  # (tensors, 2)
        """Return the sums, where the weights live."""
        for tensor in list(self._open):
            self._close(tensor)
        return self._sums

    def _close(self, tensor: int) -> None:
        stretch = self._open.pop(tensor, None)
        if stretch is not None:
            self._sums[tensor, 0] += kernels.total(stretch.weights)
            self._sums[tensor, 1] += kernels.total(stretch.step)


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
