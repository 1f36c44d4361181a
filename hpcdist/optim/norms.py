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


class Norms:
    """sum(w^2) and sum(u^2) of each of ``count`` tensors, over the pieces that were given since `clear`.

    A piece that follows the one before it, of the same tensor, has the bits of both as one.
    """

    def __init__(self, count: int, on: str) -> None:
        self._sums = zeros((count, 2), np.dtype(np.float64), on)
        self._tensor, self._stretch = -1, Range(0, 0)  # of which ``_running`` are the sums; -1: of nothing
        self._running = np.zeros((2, kernels.LANES))

    def clear(self) -> None:
        """Forget all pieces."""
        self._tensor = -1
        self._sums[...] = 0.0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        """Add the piece of ``tensor`` at ``where``."""
        if is_device(weights):
            self._sums[tensor, 0] += kernels.sum_of_squares(weights)
            self._sums[tensor, 1] += kernels.sum_of_squares(step)
            return
        if (tensor, where.start) != (self._tensor, self._stretch.stop):
            self._close()
            self._tensor, self._stretch = tensor, Range(where.start, where.start)
            self._running[...] = 0.0
        phase = self._stretch.size % kernels.LANES
        for values, sums in zip((weights, step), self._running, strict=True):
            kernels.add_squares(values, sums, phase)
        self._stretch = Range(self._stretch.start, where.stop)

    def sums(self) -> Array:  # (tensors, 2)
        """Return the sums, where the weights live."""
        self._close()
        return self._sums

    def _close(self) -> None:
        if self._tensor >= 0:
            self._sums[self._tensor] += [kernels.total(sums) for sums in self._running]
            self._tensor = -1


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
