"""Gradient norms: clipping by the global norm, and norms of tensors for layer-wise rates.

Clipping is Algorithm 1 of Pascanu, Mikolov & Bengio 2013 (arXiv:1211.5063). If the bits of a norm must not depend on
the partition, reduce accumulators of `hpcdist.optim.exact` instead of scalars.
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
from hpcdist.optim import exact, kernels


def sum_of_block_squares(blocks: Iterable[Array]) -> float:
    """Return the sum of squares of host arrays, with the bits of `kernels.sum_of_squares` of one concatenated array."""
    sums, seen = np.zeros(kernels.LANES), 0
    for block in blocks:
        kernels.add_squares(block, sums, seen % kernels.LANES)
        seen += block.size
    return float(kernels.total(sums))


class Norms:
    """Sums of squares of weights and of update directions on the host, for each of ``count`` tensors."""

    def __init__(self, count: int) -> None:
        self._sums = np.zeros((count, 2))
        self._tensor, self._stretch = -1, Range(0, 0)  # tensor and range of the ``_running`` sums; -1: no sums
        self._running = np.zeros((2, kernels.LANES))

    def clear(self) -> None:
        """Reset the sums of all tensors to zero."""
        self._tensor = -1
        self._sums[...] = 0.0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        """Add the squares of ``weights`` and directions ``step`` in the flat range ``where`` of tensor ``tensor``."""
        if (tensor, where.start) != (self._tensor, self._stretch.stop):
            self._close()
            self._tensor, self._stretch = tensor, Range(where.start, where.start)
            self._running[...] = 0.0
        phase = self._stretch.size % kernels.LANES
        for values, sums in zip((weights, step), self._running, strict=True):
            kernels.add_squares(values, sums, phase)
        self._stretch = Range(self._stretch.start, where.stop)

    def sums(self) -> np.ndarray:  # (tensors, 2)
        """Return an array (tensors, 2): sums of squares of the weights, and of the update directions."""
        self._close()
        return self._sums

    def _close(self) -> None:
        if self._tensor >= 0:
            self._sums[self._tensor] += [kernels.total(sums) for sums in self._running]
            self._tensor = -1


class GpuNorms:
    """Sums of squares of weights and of update directions per tensor, computed by GPU kernels."""

    def __init__(self, size: int, tensors: kernels.TensorOptions) -> None:
        self.partial, self._tensors = kernels.partial_sums(size, len(tensors.bounds)), tensors

    def clear(self) -> None:
        self.partial[...] = 0.0

    def sums(self) -> Array:  # (tensors, 2)
        return kernels.tensor_sums(self.partial, self._tensors)


class ExactNorms:
    """Sums of squares of weights and of update directions per tensor, computed without rounding."""

    def __init__(self, count: int) -> None:
        self._sums = exact.zeros(count, 2)

    def clear(self) -> None:
        self._sums[...] = 0

    def add(self, tensor: int, where: Range, weights: Array, step: Array) -> None:
        exact.add_squares(weights, self._sums[tensor, 0])
        exact.add_squares(step, self._sums[tensor, 1])

    def sums(self) -> np.ndarray:  # (tensors, 2, exact.SLOTS)
        return self._sums


_NOTHING = 1e-30  # largest norm of a gradient that is not normalised
_WIDEN = 1 << 14  # 16-bit elements to widen at a time: 64 KiB of float32 fit in a cache


def sum_of_squares(
    store: FlatStore, parts: Range | Sequence[Range] | None = None, watched: Sequence[Range] = ()
) -> float:
    """Return the sum of squares in the flat ranges ``parts``, or NaN if a value in ``watched`` is not finite."""
    ranges = store.parts if parts is None else (parts,) if isinstance(parts, Range) else parts
    total = _squares(store, ranges)
    if watched:
        total = total + 0.0 * _squares(store, watched)  # NaN if they are not finite
    return float(total)  # the only wait for a GPU


def _squares(store: FlatStore, ranges: Sequence[Range]) -> Any:
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
    joined: list[Range] = []
    for _, where in layout.within(part):
        if joined and joined[-1].stop == where.start:
            joined[-1] = Range(joined[-1].start, where.stop)
        else:
            joined.append(where)
    return joined


def _squares_of_halves(values: np.ndarray) -> Any:
    memory = np.empty(min(_WIDEN, values.size), np.float32)
    total: Any = 0.0
    for block in cut(Range(0, values.size), max(1, memory.size)):
        wide = memory[: block.size]
        kernels.widen(values[block.slice], wide)
        total = total + kernels.sum_of_squares(wide)
    return total


def exact_squares(store: FlatStore, parts: Sequence[Range]) -> np.ndarray:  # (exact.SLOTS,)
    """Return the accumulator of the exact sum of squares in the flat ranges ``parts`` of a host ``store``."""
    # `exact.rounded` converts the result to a float, which is not finite if an element is not finite.
    digits = exact.zeros()
    for _, where in chain.from_iterable(map(store.layout.within, parts)):
        for values in store.blocks(where):
            exact.add_squares(values, digits)
    return digits


def clip_scale(norm_squared: float, limit: float, *, normalize: bool = False) -> float:
    """Return the factor that clips a gradient to the norm ``limit`` (0: no clipping). Raises NonFiniteError."""
    if not math.isfinite(norm_squared):
        raise NonFiniteError(
            f"the squared norm of the gradient is {norm_squared}, but must be finite; "
            "lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
        )
    norm = math.sqrt(norm_squared)
    # Normalized gradients have norm 1, or ``limit`` if it is smaller. Norms up to 1e-30 are not scaled.
    if normalize and norm > _NOTHING:
        return min(1.0, limit or 1.0) / norm
    return limit / norm if 0.0 < limit < norm else 1.0


def first_nonfinite(store: FlatStore, elements: Range | None = None) -> str | None:
    """Return the name of the first tensor with a NaN or infinity in the flat range ``elements``, or None."""
    for segment, where in store.tensors() if elements is None else store.layout.within(elements):
        if not all(bool(namespace(values).isfinite(values).all()) for values in store.blocks(where)):
            return segment.key
    return None
