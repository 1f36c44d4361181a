"""Gradient norms: clipping by the global norm, and norms of tensors for layer-wise rates.

Clipping is that of Pascanu, Mikolov & Bengio 2013 (arXiv:1211.5063), Algorithm 1.

The sum of squares of each rank's own part is additive, so the norm of a sharded gradient is one reduced scalar, or
one reduced accumulator of `hpcdist.optim.update.exact` where its bits must not depend on the partition.

`Norms` has the norms of tensors for layer-wise rates, summed by pieces. A tensor that arrives in blocks, one behind the
other, has the same bits of norm as one that arrives whole, because its running sums are kept between the blocks. So a
state that is read in blocks from a file is updated as one in memory. `GpuNorms` are summed by the kernels that compute
directions, tile by tile. `ExactNorms` do not round at all: they have the same bits however tensors are cut.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.filestore import FileStore
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim.update import exact, kernels


def sum_of_block_squares(blocks: Iterable[Array]) -> float:
    """Return the sum of squares of consecutive ``blocks``, with the bits of `kernels.sum_of_squares` of the whole.

    On the host.
    """
    sums, seen = np.zeros(kernels.LANES), 0
    for block in blocks:
        kernels.add_squares(block, sums, seen % kernels.LANES)
        seen += block.size
    return float(kernels.total(sums))


class Norms:
    """sum(w^2) and sum(u^2) of each of ``count`` tensors on the host, over the pieces that were given since `clear`.

    A piece that follows the one before it, of the same tensor, has the bits of both as one.
    """

    def __init__(self, count: int) -> None:
        self._sums = np.zeros((count, 2))
        self._tensor, self._stretch = -1, Range(0, 0)  # of which ``_running`` are the sums; -1: of nothing
        self._running = np.zeros((2, kernels.LANES))

    def clear(self) -> None:
        """Forget all pieces."""
        self._tensor = -1
        self._sums[...] = 0.0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        """Add the piece of ``tensor`` at ``where``."""
        if (tensor, where.start) != (self._tensor, self._stretch.stop):
            self._close()
            self._tensor, self._stretch = tensor, Range(where.start, where.start)
            self._running[...] = 0.0
        phase = self._stretch.size % kernels.LANES
        for values, sums in zip((weights, step), self._running, strict=True):
            kernels.add_squares(values, sums, phase)
        self._stretch = Range(self._stretch.start, where.stop)

    def sums(self) -> np.ndarray:  # (tensors, 2)
        """Return the sums."""
        self._close()
        return self._sums

    def _close(self) -> None:
        if self._tensor >= 0:
            self._sums[self._tensor] += [kernels.total(sums) for sums in self._running]
            self._tensor = -1


class GpuNorms:
    """As `Norms`, of all tensors on a GPU, whose directions add to ``partial``."""

    def __init__(self, size: int, tensors: kernels.TensorOptions) -> None:
        self.partial, self._tensors = kernels.partial_sums(size, len(tensors.bounds)), tensors

    def clear(self) -> None:
        """Forget all pieces."""
        self.partial[...] = 0.0

    def sums(self) -> Array:  # (tensors, 2)
        """Return the sums, on the GPU."""
        return kernels.tensor_sums(self.partial, self._tensors)


class ExactNorms:
    """As `Norms`, of weights on the host, in the accumulators of `hpcdist.optim.update.exact`: to be rounded by it."""

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


_NOTHING = 1e-30  # the norm of a gradient that has no direction
_WIDEN = 1 << 14  # 16-bit elements that are widened at a time: 64 KiB of float32 stay in a cache


def sum_of_squares(
    store: FlatStore, parts: Range | Sequence[Range] | None = None, watched: Sequence[Range] = ()
) -> float:
    """Return the sum of squares of the tensors in ``parts`` (None: of all the store holds), accumulated in float64.

    Padding is left out. What is not finite in the ranges ``watched``, which count nothing, makes the sum so too.
    float16, bfloat16 and float32 cannot overflow in it. A float64 element above 1e154 gives infinity, and a NaN or
    infinite element a result that `clip_scale` refuses. A GPU is waited for once.
    """
    ranges = store.parts if parts is None else (parts,) if isinstance(parts, Range) else parts
    total = _squares(store, ranges)
    if watched:
        total = total + 0.0 * _squares(store, watched)  # NaN where they are not finite
    return float(total)  # the one place that waits for a GPU


def _squares(store: FlatStore, ranges: Sequence[Range]) -> Any:
    """Return the sum of squares in ``ranges``, where the values are."""
    total: Any = 0.0
    if not isinstance(store, FileStore) and is_device(store.array):
        pieces = [store.range(where) for part in ranges for where in _joined(store.layout, part)]
        return kernels.launch_sum_of_squares(*pieces) if pieces else total
    for _, where in chain.from_iterable(map(store.layout.within, ranges)):
        if isinstance(store, FileStore):
            total += sum_of_block_squares(store.blocks(where))
            continue
        values = store.range(where)
        if is_16bit_float(store.dtype):
            total = total + _squares_of_halves(values)
        else:
            total = total + kernels.sum_of_squares(values)
    return total


def _joined(layout: Layout, part: Range) -> list[Range]:
    """Return the ranges of tensors in ``part``, as one where they touch: most tensors end where the next one begins."""
    joined: list[Range] = []
    for _, where in layout.within(part):
        if joined and joined[-1].stop == where.start:
            joined[-1] = Range(joined[-1].start, where.stop)
        else:
            joined.append(where)
    return joined


def _squares_of_halves(values: np.ndarray) -> Any:
    """Return the sum of squares of 16-bit ``values`` on the host, widened block by block in one piece of memory."""
    memory = np.empty(min(_WIDEN, values.size), np.float32)
    total: Any = 0.0
    for block in cut(Range(0, values.size), max(1, memory.size)):
        wide = memory[: block.size]
        kernels.widen(values[block.slice], wide)
        total = total + kernels.sum_of_squares(wide)
    return total


def exact_squares(store: FlatStore, parts: Sequence[Range]) -> np.ndarray:  # (exact.SLOTS,)
    """Return the sum of squares of the tensors in ``parts`` of a ``store`` on the host, padding left out, not rounded.

    See `hpcdist.optim.update.exact`; a NaN or infinite element gives a sum that is so when it is rounded.
    """
    digits = exact.zeros()
    for _, where in chain.from_iterable(map(store.layout.within, parts)):
        for values in store.blocks(where):
            exact.add_squares(values, digits)
    return digits


def clip_scale(norm_squared: float, limit: float, *, normalize: bool = False) -> float:
    """Return the factor that brings a gradient of this squared norm down to ``limit``: 1 below it or when it is 0.

    The factor is exactly limit / norm. With ``normalize`` it is that of a gradient which is divided by its norm first:
    min(1, limit) / norm, and 1 below 1e-30, where the quotient would be rounding or beyond float32. There is no limit
    where it is 0. All ranks must pass the same reduced ``norm_squared``; they then agree on the factor, or raise
    together. Raises NonFiniteError when the norm is NaN or infinite (`first_nonfinite` finds why).
    """
    if not math.isfinite(norm_squared):
        raise NonFiniteError(
            f"the squared norm of the gradient is {norm_squared}; it must be finite: "
            "lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
        )
    norm = math.sqrt(norm_squared)
    if normalize and norm > _NOTHING:
        return min(1.0, limit or 1.0) / norm
    return limit / norm if 0.0 < limit < norm else 1.0


def first_nonfinite(store: FlatStore, part: Range | None = None) -> str | None:
    """Return the key of the first tensor that holds a NaN or an infinity, None where all are finite.

    ``part``, a range of the flat space that the store holds, restricts the search.
    """
    for segment, where in store.tensors() if part is None else store.layout.within(part):
        if not all(bool(namespace(values).isfinite(values).all()) for values in store.blocks(where)):
            return segment.key
    return None
