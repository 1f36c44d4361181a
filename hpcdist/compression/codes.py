"""Codes of a quantiser: block scales, random numbers for stochastic rounding, and bit packing.

The scale of a block is its largest magnitude or its 2-norm. Sums of squares are computed in float64 by halves (element
i plus element i + half), so that they are equal on every processor.

Uniform random numbers in [0, 1) have 24 bits of Philox4x32. Element i uses word i % 4 of counter i // 4.

n codes of 1, 2, 4 or 8 bits take ceil(n bits / 8) bytes. They are packed in groups of `GROUP` codes. Byte j of a group
of B bytes has the codes j, j + B, j + 2 B, ... from its lowest bits on.
"""

import math
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.intrinsics import MAGNITUDE, bits_of, float_of
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox_arrays

GROUP: Final = 256  # codes: a multiple of 8 that fits the first-level cache
WIDTHS: Final = (1, 2, 4, 8)
_BY2: Final = np.uint8(2)
_BY4: Final = np.uint8(4)


def packed_bytes(n: int, bits: int) -> int:
    """Return the size in bytes of ``n`` packed codes of ``bits`` bits each."""
    return -(-n * bits // 8)


@jit
def pack(codes: Any, count: Any, bits: Any, packed: Any) -> None:
    """Pack the first ``count`` elements of uint8 ``codes`` into the bytes ``packed``, ``bits`` bits per code."""
    # Called by compiled kernels.
    # Indices start at 0, and each width has its own loop: possibly negative indices and variable shifts would prevent
    # vectorisation.
    stride = packed.size
    # `codes` has shape (GROUP,), and all codes are less than 2^bits.
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
    """Pack the uint8 array ``codes`` into the bytes ``packed``, ``bits`` bits per code, on the host or a GPU."""
    for group, place in grouped(codes, bits, packed):
        stride = place.shape[1]
        place[...] = 0
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            place[:, : part.shape[1]] |= part << np.uint8(k * bits)


def unpack_arrays(packed: Array, bits: int, codes: Array) -> None:
    """Unpack the result ``packed`` of `pack_arrays` into the uint8 array ``codes``, on the host or a GPU.

    ``bits``: bits per code.
    """
    mask = np.uint8((1 << bits) - 1)
    for group, place in grouped(codes, bits, packed):
        stride = place.shape[1]
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            part[...] = place[:, : part.shape[1]] >> np.uint8(k * bits) & mask


def grouped(codes: Array, bits: int, packed: Array) -> list[tuple[Array, Array]]:
    """Return a list of pairs of 2-D views of (``codes``, ``packed``), with one group of codes per row.

    The first pair holds all groups of `GROUP` codes, the second pair the remaining codes. ``bits``: bits per code.
    """
    whole = codes.size // GROUP * GROUP
    ends = packed_bytes(whole, bits)
    pairs = [(codes[:whole].reshape(-1, GROUP), packed[:ends].reshape(-1, GROUP * bits // 8))]
    pairs.append((codes[None, whole:], packed[None, ends:]))
    return [(group, place) for group, place in pairs if group.size]


def rows_of(values: Array, width: int) -> list[Array]:
    """Return a list of 2-D views of ``values``: all full rows of ``width`` values, and one row of the rest."""
    whole = values.size // width * width
    rows = [values[:whole].reshape(-1, width), values[None, whole:]]
    return [row for row in rows if row.size]


def spread(scales: Array, width: int, n: int) -> Array:
    """Return the first ``n`` elements of an array that repeats each scale ``width`` times."""
    wide = namespace(scales).empty((scales.size, width), scales.dtype)
    wide[...] = scales[:, None]
    return wide.reshape(-1)[:n]


WORDS: Final = 4  # per counter
_SHIFT: Final = np.uint32(8)
_STEP: Final = np.float32(2.0**-24)


@jit
def unit(word: Any) -> Any:
    """Convert the random uint32 ``word`` to a float32 in [0, 1). Called by compiled kernels."""
    return np.float32(np.float32(np.int32(np.uint32(word >> _SHIFT))) * _STEP)


def units_arrays(like: Array, key: tuple[int, ...]) -> Array:
    """Return float32 uniform random numbers in [0, 1), as many as ``like`` has elements. ``key``: `RandomKey.words`."""
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
_SMALL: Final = np.float32(2.0**-62)
_UP: Final = np.float32(2.0**64)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


@jit
def largest(values: Any) -> Any:
    """Return the largest magnitude in the float32 array ``values``. Called by compiled kernels."""
    # Integer maximum of the bits: a float maximum would not vectorise, because NaN forbids reordering.
    top = np.uint32(0)
    for i in range(values.size):
        word = np.uint32(bits_of(values[i]) & MAGNITUDE)
        top = word if word > top else top
    return float_of(top)


largest.sample(lambda: (np.ones(2, np.float32),))


@jit
def folded(sums: Any) -> Any:
    """Return the sum of the float64 array ``sums``, which is overwritten. Its size must be a power of two."""
    # Called by compiled kernels.
    half = sums.size // 2
    while half:
        high = sums[half : 2 * half]
        for j in range(half):
            sums[j] += high[j]
        half //= 2
    return sums[0]


@jit
def norm(values: Any, squares: Any) -> Any:
    """Return the 2-norm of ``values`` as float32. ``squares``: float64 scratch buffer. Called by compiled kernels."""
    for j in range(values.size):
        wide = np.float64(values[j])
        squares[j] = wide * wide
    squares[values.size :] = 0.0
    return np.float32(min(math.sqrt(folded(squares)), np.float64(LARGEST)))


@jit
def lift_of(scale: Any) -> Any:
    """Return a power of two f for which 1 / (f * ``scale``) does not overflow in float32, or 0 if ``scale`` is 0."""
    # Called by compiled kernels.
    if scale == _ZERO:
        return _ZERO
    return _UP if scale < _SMALL else _ONE


@jit
def inverse_of(scale: Any, levels: Any) -> Any:
    """Return ``levels`` / (f * ``scale``) with f = lift_of(scale), or 0 if ``scale`` is 0."""
    return np.float32(np.float32(levels) / np.float32(scale * lift_of(scale))) if scale > _ZERO else _ZERO


def scales_arrays(rows: Array, kind: int, width: int) -> Array:
    """Return the float32 scale of each row of ``rows``: its largest magnitude (MAXIMUM) or 2-norm (NORM).

    ``kind``: MAXIMUM or NORM. ``width``: row length after padding with zeros for NORM, which must be a power of two.
    """
    xp = namespace(rows)
    if kind == MAXIMUM:
        return xp.absolute(rows).max(axis=1)
    # `folded_arrays` needs a power of two as width.
    squares = xp.zeros((rows.shape[0], width), np.float64)
    wide = rows.astype(np.float64)
    squares[:, : rows.shape[1]] = wide * wide
    return xp.minimum(xp.sqrt(folded_arrays(squares)), float(LARGEST)).astype(np.float32)


def folded_arrays(sums: Array) -> Array:
    """Return the sum of each row of ``sums`` (float64). The row length must be a power of two."""
    half = sums.shape[1] // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    return sums[:, 0]


def lifts_arrays(scales: Array, levels: int) -> tuple[Array, Array]:
    """Return two float32 arrays with one factor per scale. The scale times both of its factors is ``levels``.

    ``levels``: largest quantised value. For scale 0, both factors are 0.
    """
    # Callers multiply by one factor after the other, because the product could overflow.
    xp = namespace(scales)
    lift = xp.where(scales == _ZERO, _ZERO, xp.where(scales < _SMALL, _UP, _ONE)).astype(np.float32)
    reached = xp.where(scales == _ZERO, _ONE, scales * lift)
    inverse = xp.where(scales == _ZERO, _ZERO, np.float32(levels) / reached)
    return lift, inverse.astype(np.float32)
