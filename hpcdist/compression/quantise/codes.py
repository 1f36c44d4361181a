"""Codes of a quantiser: block scales, uniform draws for random rounding, and bit packing.

Scales. The scale of a block is its largest magnitude or its 2-norm.

Sums of squares are carried in float64 by halves (element i to element i + half, until one is left), so that they are
the same on every processor. They overflow for no float32; a norm beyond the range of float32 is cut to the largest
one, which still is no less than any magnitude.

The reciprocal of a subnormal scale may be beyond float32. So values are multiplied by a power of two first, which is
exact: x = (v lift) inverse with inverse = levels / (scale lift).

Draws. Uniform numbers in [0, 1) for random rounding have 24 bits of Philox4x32 each (`hpcdist.arrays.rng`). Element i
has word i % 4 of counter i // 4, whoever draws it, in whatever pieces.

Packing. Codes of 1, 2, 4 or 8 bits fill bytes without a gap: n codes are ceil(n bits / 8) bytes.

Codes are packed by groups of `GROUP`. A group of m codes has ceil(m bits / 8) bytes, and byte j holds the codes j, j
+ bytes, j + 2 bytes, ... of it, the first in its lowest bits: neighbours in memory meet in a register, so loops over
a group become vectors. Only the last group may be shorter; where its codes do not fill its bytes, the rest is 0.
"""

import math
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.intrinsics import bits_of, float_of
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox_arrays

GROUP: Final = 256  # codes: a multiple of 8, few enough for the first cache
WIDTHS: Final = (1, 2, 4, 8)
_BY2: Final = np.uint8(2)
_BY4: Final = np.uint8(4)


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of ``n`` codes."""
    return -(-n * bits // 8)


@jit
def pack(codes: Any, count: Any, bits: Any, packed: Any) -> None:
    """Pack one group, the first ``count`` of the uint8 ``codes`` (GROUP,), into the bytes ``packed``. For kernels.

    High bits of codes must be 0. Codes from ``count`` on are overwritten.
    """
    # Indices begin at 0, and one loop for each width: an index that may be negative, and a shift of bytes by what is
    # no constant, keep loops scalar.
    stride = packed.size
    codes[count:] = 0
    if bits == 4:
        high = codes[stride:]
        for j in range(stride):
            packed[j] = codes[j] | np.uint8(high[j] << _BY4)
    else:
        second, third, fourth = codes[stride:], codes[2 * stride :], codes[3 * stride :]
        for j in range(stride):
            low = codes[j] | np.uint8(second[j] << _BY2)
            packed[j] = low | np.uint8(np.uint8(third[j] | np.uint8(fourth[j] << _BY2)) << _BY4)


def pack_arrays(codes: Array, bits: int, packed: Array) -> None:
    """Pack uint8 ``codes`` (n,) into ``packed`` (packed_bytes(n, bits),), on either processor."""
    for group, place in _groups(codes, bits, packed):
        stride = place.shape[1]
        place[...] = 0
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            place[:, : part.shape[1]] |= part << np.uint8(k * bits)


def unpack_arrays(packed: Array, bits: int, codes: Array) -> None:
    """Unpack ``packed`` into the uint8 ``codes`` (n,), on either processor."""
    mask = np.uint8((1 << bits) - 1)
    for group, place in _groups(codes, bits, packed):
        stride = place.shape[1]
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            part[...] = place[:, : part.shape[1]] >> np.uint8(k * bits) & mask


def _groups(codes: Array, bits: int, packed: Array) -> list[tuple[Array, Array]]:
    """Return the whole groups as (rows, GROUP) with their bytes, and the last one, if it is shorter, as (1, rest)."""
    whole = codes.size // GROUP * GROUP
    ends = packed_bytes(whole, bits)
    pairs = [(codes[:whole].reshape(-1, GROUP), packed[:ends].reshape(-1, GROUP * bits // 8))]
    pairs.append((codes[None, whole:], packed[None, ends:]))
    return [(group, place) for group, place in pairs if group.size]


def rows_of(values: Array, width: int) -> list[Array]:
    """Return views of ``values`` (n,): the whole rows as (rows, width), and the rest, if there is one, as (1, rest)."""
    whole = values.size // width * width
    rows = [values[:whole].reshape(-1, width), values[None, whole:]]
    return [row for row in rows if row.size]


def spread(scales: Array, width: int, n: int) -> Array:
    """Return (n,) values: each of ``scales`` for the next ``width`` of them."""
    wide = namespace(scales).empty((scales.size, width), scales.dtype)
    wide[...] = scales[:, None]
    return wide.reshape(-1)[:n]


WORDS: Final = 4  # of a counter
_SHIFT: Final = np.uint32(8)
_STEP: Final = np.float32(2.0**-24)


@jit
def unit(word: Any) -> Any:
    """Return the upper 24 bits of ``word`` as a float32 in [0, 1). For kernels."""
    return np.float32(np.float32(np.int32(np.uint32(word >> _SHIFT))) * _STEP)


def units_arrays(like: Array, key: tuple[int, ...]) -> Array:
    """Return the numbers of the elements of ``like`` (n,), on its processor; ``key`` is that of `RandomKey.words`."""
    xp = namespace(like)
    counters = -(-like.size // WORDS)
    drawn = philox_arrays((xp.arange(counters, dtype=np.uint64), *key[:3]), (key[3], key[4]))
    units = xp.empty((counters, WORDS), np.float32)
    for number, word in enumerate(drawn):
        units[:, number] = word >> 8
    units *= _STEP
    return units.reshape(-1)[: like.size]


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
