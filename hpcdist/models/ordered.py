"""Numbers as integers of the same order, inside compiled loops: their maximum is vector code, that of floats is not.

The bits of a float, read as an integer, have its order where it is positive, and the reverse where it is negative. The
latter are turned around. A NaN is beyond one of the ends, by its sign.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.jit import Primitive, jit
from hpcdist.models.kernels import SAMPLE_DTYPES

_SIGN, _REST, _SIGN_D, _REST_D = np.int32(31), np.int32(0x7FFFFFFF), np.int64(63), np.int64(0x7FFFFFFFFFFFFFFF)


def _ordered(numba: Any) -> Any:
    def ordered(x: Any) -> Any:
        raise AssertionError("compiled code never comes here")

    def of_single(x: Any) -> Any:
        bits = np.float32(x).view(np.int32)
        return np.int32(bits ^ ((bits >> _SIGN) & _REST))

    def of_double(x: Any) -> Any:
        bits = np.float64(x).view(np.int64)
        return np.int64(bits ^ ((bits >> _SIGN_D) & _REST_D))

    @numba.extending.overload(ordered)
    def choose(x: Any) -> Any:
        return of_single if x == numba.types.float32 else of_double

    return ordered


def _number(numba: Any) -> Any:
    def number(k: Any) -> Any:
        raise AssertionError("compiled code never comes here")

    def of_single(k: Any) -> Any:
        return np.int32(k ^ ((k >> _SIGN) & _REST)).view(np.float32)

    def of_double(k: Any) -> Any:
        return np.int64(k ^ ((k >> _SIGN_D) & _REST_D)).view(np.float64)

    @numba.extending.overload(number)
    def choose(k: Any) -> Any:
        return of_single if k == numba.types.int32 else of_double

    return number


ordered = Primitive(_ordered, "the integer that stands for a float32 or float64 in their order")
number = Primitive(_number, "the float32 or float64 that an int32 or int64 of `ordered` stands for")


@jit
def largest(row: Any) -> Any:
    """Return the largest of the elements of a row, of one at least; a NaN where it is beyond them."""
    top = ordered(row[0])
    for j in range(row.size):
        top = max(top, ordered(row[j]))
    return number(top)


for _dtype in SAMPLE_DTYPES:
    _row = np.ones(2, _dtype)
    largest.sample(lambda x=_row: (x,))
