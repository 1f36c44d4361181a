"""Exact sums of squares: bitwise equal for any order and any partition over ranks.

A sum is held in 64-bit digits of 32 bits each, in multiples of 2^-1074: a superaccumulator (R. Neal, arXiv:1505.05571).
Squares are first rounded to float64.
"""

import math

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit
from hpcdist.errors import UsageError

DIGITS = 68  # 66 cover the largest float64, 2 more a sum of 2^64 of them
INFINITE, NAN = DIGITS, DIGITS + 1  # indices of the counts of infinite squares and of NaN
SLOTS = DIGITS + 2
_LOWEST = 1074  # the unit is 2^-1074, the smallest float64
_BLOCK = 1 << 16  # number of 48-bit squares whose sum fits into 64 bits

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def zeros(*shape: int) -> np.ndarray:
    """Return accumulators of exact sums with value 0, as int64 (``*shape``, SLOTS). ``*shape``: shape of the sums."""
    return np.zeros((*shape, SLOTS), np.int64)


def add_squares(values: Array, digits: np.ndarray) -> None:
    """Add the squares of ``values`` (float32 or float64, on the host) exactly to the accumulator ``digits``."""
    # Afterwards each digit is below 2^32, so accumulators of 2^31 ranks can be added.
    if values.dtype == np.float32:
        _add_float32(values.view(np.uint32), digits)
    elif values.dtype == np.float64:
        _add_float64(values, digits)
    else:
        raise UsageError(f"exact sums of squares need float32 or float64, got {values.dtype}; convert the array")


def rounded(digits: np.ndarray) -> np.ndarray:
    """Return the float64 values of the exact sums in the accumulators ``digits``, rounded to nearest."""
    sums = [_rounded(row) for row in digits.reshape(-1, SLOTS)]
    return np.array(sums, np.float64).reshape(digits.shape[:-1])


def _rounded(row: np.ndarray) -> float:  # (SLOTS,)
    if row[NAN]:
        return math.nan
    if row[INFINITE]:
        return math.inf
    total = sum(int(row[index]) << 32 * int(index) for index in np.flatnonzero(row))
    try:
        return total / (1 << _LOWEST)  # Python rounds the quotient of two integers once
    except OverflowError:
        return math.inf


@jit
def _put(digits, mantissa, position):  # type: ignore[no-untyped-def]
    # Adds mantissa * 2^position without carries, for a mantissa of at most 64 bits: shifted halves go to the lower 32
    # bits of three digits; the upper bits collect carries until `_carry`.
    index, shift = position >> 5, np.uint64(position & 31)
    low, high = (mantissa & _LOW) << shift, (mantissa >> _HALF) << shift
    digits[index] += np.int64(low & _LOW)
    digits[index + 1] += np.int64(low >> _HALF) + np.int64(high & _LOW)
    digits[index + 2] += np.int64(high >> _HALF)


@jit
def _carry(digits):  # type: ignore[no-untyped-def]
    for index in range(DIGITS - 1):
        digits[index + 1] += digits[index] >> 32
        digits[index] &= 0xFFFFFFFF


@jit
def _add_float32(words, digits):  # type: ignore[no-untyped-def]
    fraction, one, top = np.uint64(0x7FFFFF), np.uint64(1), np.uint64(23)
    sums = np.zeros((2, 256), np.uint64)  # by exponent; two alternating sets reduce dependent additions
    for start in range(0, words.size, _BLOCK):
        stop = min(start + _BLOCK, words.size)
        sums[:] = np.uint64(0)
        for i in range(start, stop):
            word = np.uint64(words[i])
            exponent = (word >> top) & np.uint64(255)
            mantissa = (word & fraction) + (min(exponent, one) << top)
            sums[i & 1, exponent] += mantissa * mantissa
        for power in range(255):
            total = sums[0, power] + sums[1, power]
            if total:
                # value = mantissa 2^(power - 150), with power 1 for a subnormal; the square has twice the exponent
                _put(digits, total, 2 * (power if power else 1) - 300 + _LOWEST)
        if sums[0, 255] + sums[1, 255]:
            for i in range(start, stop):
                if words[i] & 0x7F800000 == 0x7F800000:
                    digits[NAN if words[i] & 0x7FFFFF else INFINITE] += 1
        _carry(digits)


@jit
def _add_float64(values, digits):  # type: ignore[no-untyped-def]
    squares = np.empty(4096, np.float64)
    words = squares.view(np.uint64)
    fraction, one, top = np.uint64((1 << 52) - 1), np.uint64(1), np.uint64(52)
    for start in range(0, values.size, squares.size):
        count = min(squares.size, values.size - start)
        for i in range(count):
            squares[i] = values[start + i] * values[start + i]
        for i in range(count):
            exponent = (words[i] >> top) & np.uint64(2047)
            if exponent == np.uint64(2047):
                digits[NAN if words[i] & fraction else INFINITE] += 1
                continue
            least = min(exponent, one)  # a subnormal has the unit of exponent 1 and no hidden bit
            mantissa = (words[i] & fraction) + (least << top)
            _put(digits, mantissa, np.int64(exponent) - np.int64(least))
        _carry(digits)


_add_float32.sample(lambda: (np.ones(8, np.uint32), zeros()))
_add_float64.sample(lambda: (np.ones(8), zeros()))
