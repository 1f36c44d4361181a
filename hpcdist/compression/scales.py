"""The scale of a block: its largest magnitude or its 2-norm, and how values are brought to its levels without overflow.

Sums of squares are carried in float64 by halves (element i to element i + half, until one is left), so that they are
the same on every processor. They overflow for no float32; a norm beyond the range of float32 is cut to the largest one,
which still is no less than any magnitude.

The reciprocal of a subnormal scale may be beyond float32. So values are multiplied by a power of two first, which is
exact: x = (v lift) inverse with inverse = levels / (scale lift).
"""

import math
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.bits import bits_of, float_of
from hpcdist.arrays.jit import jit

MAXIMUM: Final = 0
NORM: Final = 1
LARGEST: Final = np.float32(np.finfo(np.float32).max)
_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_SMALL: Final = np.float32(2.0**-62)
_UP: Final = np.float32(2.0**64)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@jit
def largest(values: Any) -> Any:
    """Return the largest magnitude. For kernels."""
    # Of the bits, since a maximum of floats would not become vectors: it may not be reordered where there are NaN.
    top = np.uint32(0)
    for i in range(values.size):
        word = np.uint32(bits_of(values[i]) & _MAGNITUDE)
        top = word if word > top else top
    return float_of(top)


@jit
def folded(sums: Any) -> Any:
    """Return the sum of float64 ``sums`` (a power of two of them) by halves; they are overwritten. For kernels."""
    half = sums.size // 2
    while half:
        high = sums[half : 2 * half]
        for j in range(half):
            sums[j] += high[j]
        half //= 2
    return sums[0]


@jit
def norm(values: Any, squares: Any) -> Any:
    """Return the 2-norm, rounded to float32. ``squares`` is scratch: as many float64 as a whole block. For kernels."""
    for j in range(values.size):
        wide = np.float64(values[j])
        squares[j] = wide * wide
    squares[values.size :] = 0.0
    return np.float32(min(math.sqrt(folded(squares)), np.float64(LARGEST)))


@jit
def lift_of(scale: Any) -> Any:
    """Return the power of two for values of this scale, 0 where all are 0. For kernels."""
    if scale == _ZERO:
        return _ZERO
    return _UP if scale < _SMALL else _ONE


@jit
def inverse_of(scale: Any, levels: Any) -> Any:
    """Return what lifted values are multiplied by to be in [-levels, levels]. For kernels."""
    return np.float32(np.float32(levels) / np.float32(scale * lift_of(scale))) if scale > _ZERO else _ZERO


def scales_arrays(rows: Array, kind: int, width: int) -> Array:
    """Return the scale of each of ``rows`` (rows, at most width), rounded to float32, on either processor."""
    xp = namespace(rows)
    if kind == MAXIMUM:
        return xp.absolute(rows).max(axis=1)
    squares = xp.zeros((rows.shape[0], width), np.float64)
    wide = rows.astype(np.float64)
    squares[:, : rows.shape[1]] = wide * wide
    return xp.minimum(xp.sqrt(folded_arrays(squares)), float(LARGEST)).astype(np.float32)


def folded_arrays(sums: Array) -> Array:
    """Return (rows,) sums of float64 ``sums`` (rows, a power of two) by halves, as `folded` does."""
    half = sums.shape[1] // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    return sums[:, 0]


def lifts_arrays(scales: Array, levels: int) -> tuple[Array, Array]:
    """Return the lifts and the inverses of ``scales``, on either processor."""
    xp = namespace(scales)
    lift = xp.where(scales == _ZERO, _ZERO, xp.where(scales < _SMALL, _UP, _ONE)).astype(np.float32)
    reached = xp.where(scales == _ZERO, _ONE, scales * lift)
    inverse = xp.where(scales == _ZERO, _ZERO, np.float32(levels) / reached)
    return lift, inverse.astype(np.float32)
