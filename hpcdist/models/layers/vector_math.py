"""Vector code for compiled loops: the exponential function, the maximum of a row, and compiler flags.

exp(x) = 2^n exp(r) with x = n ln 2 + r and |r| <= ln 2 / 2. exp(r) is a polynomial: Cephes (Moshier) in float32, Taylor
of degree 13 in float64. Relative errors are at most 1e-7 and 3e-16. Subnormal results become 0.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.jit import Primitive, jit

# LLVM flags that vectorise sums over a row and preserve NaN and infinity, which show that a run diverged.
REORDER: Final[Any] = {"reassoc", "contract", "arcp", "nsz"}
SAMPLE_DTYPES: Final = ("float32", "float64")  # `hpcdist warmup` compiles every kernel for these


_S, _D = np.float32, np.float64
_LOG2E, _LOG2E_D = _S(1.4426950408889634), 1.4426950408889634
# Adding one of these to a number leaves the nearest integer in the lowest bits.
_ROUND, _ROUND_D = _S(1.5 * 2**23), 1.5 * 2.0**52
# ln 2 as a sum of two parts; the first has so few bits that its product with n is exact.
_HIGH, _LOW = _S(0.693359375), _S(-2.12194440e-4)
_HIGH_D, _LOW_D = 6.93145751953125e-1, 1.42860682030941723212e-6
_ONE, _ZERO, _INFINITE = _S(1), _S(0), _S(np.inf)
_LEAST, _MOST = _S(-87.3), _S(88)
_LEAST_D, _MOST_D = -708.3, 709.0
_A0, _A1, _A2 = _S(1.9875691500e-4), _S(1.3981999507e-3), _S(8.3334519073e-3)
_A3, _A4, _A5 = _S(4.1665795894e-2), _S(1.6666665459e-1), _S(5.0000001201e-1)
_B13, _B12, _B11, _B10 = 1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800
_B9, _B8, _B7, _B6 = 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720
_B5, _B4, _B3 = 1 / 120, 1 / 24, 1 / 6
_BIAS, _PLACES, _BIAS_D, _PLACES_D = np.int32(127 << 23), np.int32(23), np.int64(1023 << 52), np.int64(52)

# Only fused multiply-add is allowed: other reorderings would undo the rounding.
_CONTRACT: Final[Any] = {"contract"}


@jit(fastmath=_CONTRACT)
def _exp_single(x: Any) -> Any:
    shifted = np.float32(x * _LOG2E + _ROUND)
    n = shifted - _ROUND
    r = x - n * _HIGH
    r = r - n * _LOW
    p = ((((_A0 * r + _A1) * r + _A2) * r + _A3) * r + _A4) * r + _A5
    bits = np.int32((shifted.view(np.int32) << _PLACES) + _BIAS)
    y = (p * r * r + r + _ONE) * bits.view(np.float32)
    y = _ZERO if x < _LEAST else y
    return _INFINITE if x > _MOST else y


@jit(fastmath=_CONTRACT)
def _exp_double(x: Any) -> Any:
    shifted = np.float64(x * _LOG2E_D + _ROUND_D)
    n = shifted - _ROUND_D
    r = x - n * _HIGH_D
    r = r - n * _LOW_D
    p = ((((_B13 * r + _B12) * r + _B11) * r + _B10) * r + _B9) * r + _B8
    p = (((((p * r + _B7) * r + _B6) * r + _B5) * r + _B4) * r + _B3) * r + 0.5
    bits = np.int64((shifted.view(np.int64) << _PLACES_D) + _BIAS_D)
    y = (p * r * r + r + 1.0) * bits.view(np.float64)
    y = 0.0 if x < _LEAST_D else y
    return np.inf if x > _MOST_D else y


def _by_type(numba: Any, first_type: str, first: Any, second: Any) -> Any:
    # A function for compiled code: `first` for arguments of the numba type `first_type`, `second` for all others.
    def function(x: Any) -> Any:
        raise AssertionError("numba replaces the body of this function; call the function only from compiled code")

    @numba.extending.overload(function)
    def choose(x: Any) -> Any:
        return first if x == getattr(numba.types, first_type) else second

    return function


def _exp(numba: Any) -> Any:
    single, double = _exp_single.inner(numba), _exp_double.inner(numba)

    def in_single(x: Any) -> Any:
        return single(x)

    def in_double(x: Any) -> Any:
        return double(x)

    return _by_type(numba, "float32", in_single, in_double)


exp = Primitive(_exp, "exp(x) of a float32 or float64, in its own precision")


@jit
def write_exponentials(x: Any, y: Any) -> None:
    """Write exp(x) to y. x and y are 1-D arrays of the same dtype."""
    for i in range(x.size):
        y[i] = exp(x[i])


_exp_single.sample(lambda: (np.float32(0),))
_exp_double.sample(lambda: (0.0,))
for _dtype in SAMPLE_DTYPES:
    _line = np.ones(2, _dtype)
    write_exponentials.sample(lambda x=_line: (x, x.copy()))


_SIGN, _REST, _SIGN_D, _REST_D = np.int32(31), np.int32(0x7FFFFFFF), np.int64(63), np.int64(0x7FFFFFFFFFFFFFFF)


def _ordered_single(x: Any) -> Any:
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN) & _REST))


def _ordered_double(x: Any) -> Any:
    bits = np.float64(x).view(np.int64)
    return np.int64(bits ^ ((bits >> _SIGN_D) & _REST_D))


def _number_single(x: Any) -> Any:
    return np.int32(x ^ ((x >> _SIGN) & _REST)).view(np.float32)


def _number_double(x: Any) -> Any:
    return np.int64(x ^ ((x >> _SIGN_D) & _REST_D)).view(np.float64)


ordered_bits = Primitive(
    lambda numba: _by_type(numba, "float32", _ordered_single, _ordered_double),
    "the integer that stands for a float32 or float64 in their order",
)
from_ordered_bits = Primitive(
    lambda numba: _by_type(numba, "int32", _number_single, _number_double),
    "the float32 or float64 that an int32 or int64 of `ordered_bits` stands for",
)


@jit
def row_maximum(row: Any) -> Any:
    """Return the largest element of ``row``. A NaN is above all numbers, or below them if its sign bit is set."""
    top = ordered_bits(row[0])
    for j in range(row.size):
        top = max(top, ordered_bits(row[j]))
    return from_ordered_bits(top)


for _ordered_dtype in SAMPLE_DTYPES:
    _row = np.ones(2, _ordered_dtype)
    row_maximum.sample(lambda x=_row: (x,))
