"""Exact sums of squares, without rounding, so that no order and no partition changes a bit of them.

A floating point sum depends on its order, hence on how a tensor is cut over ranks. Here every square, rounded to
float64 (that of a float32 is exact), is added as the integer that it is in units of 2^-1074, in 64-bit digits of 32
bits each: a superaccumulator (U. Kulisch, "Computer Arithmetic and Validity", 2nd ed. 2013, chapter 8; R. M. Neal,
"Fast exact summation using small and large superaccumulators", arXiv:1505.05571). Integers add up exactly whatever
the order, over ranks too; `rounded` rounds the sum once, to nearest even. J. Demmel and H. D. Nguyen, "Fast
reproducible floating-point summation" (IEEE ARITH 21, 2013), get reproducible sums with fewer digits and without
their last bits.

Of float32 the squares of integer mantissas are first added up by exponent, 256 sums, one addition for each element;
of float64 each square goes to three digits.
"""

import math

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit
from hpcdist.errors import UsageError

DIGITS = 68  # 66 reach the largest float64, 2 more the sum of 2^64 of them
INFINITE, NAN = DIGITS, DIGITS + 1  # places of the numbers of infinite squares and of NaN
SLOTS = DIGITS + 2
_LOWEST = 1074  # the unit is 2^-1074, the smallest float64
_BLOCK = 1 << 16  # squares of 24 bits whose sum fits into 64 bits

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def zeros(*shape: int) -> np.ndarray:
    """Return accumulators of nothing: int64, ``shape`` of them, each of `SLOTS` integers."""
    return np.zeros((*shape, SLOTS), np.int64)


def add_squares(values: Array, digits: np.ndarray) -> None:
    """Add the squares of ``values``, float32 or float64 on the host, to the accumulator ``digits`` (SLOTS,), in place.

    Afterwards each digit is below 2^32: those of 2^31 ranks may be added. Raises UsageError for other dtypes.
    """
    if values.dtype == np.float32:
        _add_float32(values.view(np.uint32), digits)
    elif values.dtype == np.float64:
        _add_float64(values, digits)
    else:
        raise UsageError(f"exact sums of squares of {values.dtype}: widen it to float32 first")


def rounded(digits: np.ndarray) -> np.ndarray:
    """Return the float64 nearest to each of the sums in ``digits`` (..., SLOTS), which ranks may have added up."""
    sums = [_rounded(row) for row in digits.reshape(-1, SLOTS)]
    return np.array(sums, np.float64).reshape(digits.shape[:-1])


def _rounded(row: np.ndarray) -> float:  # (SLOTS,)
    if row[NAN]:
        return math.nan
    if row[INFINITE]:
        return math.inf
    total = sum(int(row[place]) << 32 * int(place) for place in np.flatnonzero(row))
    try:
        return total / (1 << _LOWEST)  # Python rounds the quotient of two integers once
    except OverflowError:
        return math.inf


@jit
def _put(digits, mantissa, position):  # type: ignore[no-untyped-def]
    # Adds mantissa * 2^position, a mantissa of 64 bits at most, without a carry: its shifted halves go to three digits,
    # in the lower 32 bits of each; the upper ones collect the carries until `_carry`.
    place, shift = position >> 5, np.uint64(position & 31)
    low, high = (mantissa & _LOW) << shift, (mantissa >> _HALF) << shift
    digits[place] += np.int64(low & _LOW)
    digits[place + 1] += np.int64(low >> _HALF) + np.int64(high & _LOW)
    digits[place + 2] += np.int64(high >> _HALF)


@jit
def _carry(digits):  # type: ignore[no-untyped-def]
    for place in range(DIGITS - 1):
        digits[place + 1] += digits[place] >> 32
        digits[place] &= 0xFFFFFFFF


@jit
def _add_float32(words, digits):  # type: ignore[no-untyped-def]
    fraction, one, top = np.uint64(0x7FFFFF), np.uint64(1), np.uint64(23)
    sums = np.zeros((2, 256), np.uint64)  # by exponent; neighbours in turn, so that few additions wait for the last one
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
                # value = mantissa 2^(power - 150), its square has twice the exponent; a subnormal that of power 1
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
            least = min(exponent, one)  # a subnormal has the unit of exponent 1, and no hidden bit
            mantissa = (words[i] & fraction) + (least << top)
            _put(digits, mantissa, np.int64(exponent) - np.int64(least))
        _carry(digits)


_add_float32.sample(lambda: (np.ones(8, np.uint32), zeros()))
_add_float64.sample(lambda: (np.ones(8), zeros()))
