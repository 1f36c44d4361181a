"""16-bit floats: conversion to and from float32, and an allreduce that rounds only once.

`widened_allreduce` makes a float32 copy for an algorithm that sends partial sums. A ring in 16 bits would round p-1
times: with 4 ranks more than a fifth of its elements differ from the true sum, rounded. The bytes sent are those of
float32; `all_to_all` is the algorithm that keeps 16 bits on the wire.

The conversions are loops over uint16 that the compiler vectorises.

Widening is exact. Rounding is to nearest, ties to even; what is beyond the range becomes infinite, what is too small
subnormal or zero, and a NaN stays one with its sign and as much of its payload as there is room for. There is no
branch per element and no call, so that a loop of them runs at the speed of the memory: numpy and ml_dtypes convert
one element at a time.

A bfloat16 is the upper half of a float32. A float16 has 5 bits of exponent with bias 15, and 10 of fraction: its bits
moved to those of a float32 read 2^112 too small, and a sum with a power of two does the rounding of a subnormal.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import BFLOAT16, accumulation_dtype, is_16bit_float
from hpcdist.arrays.intrinsics import bits_of, float_of
from hpcdist.arrays.jit import jit
from hpcdist.collectives.reduction import AllreduceFunction
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator

# Constants of one type: a Python integer would make every operation one of 64 bits, and halve the width of a vector.
_SIGN16: Final = np.uint32(0x8000)
_MAGNITUDE16: Final = np.uint32(0x7FFF)
_MAGNITUDE32: Final = np.uint32(0x7FFF_FFFF)
_INFINITY32: Final = np.uint32(0x7F80_0000)
_SUBNORMAL16_BELOW: Final = np.uint32(0x0400)
_INFINITY16: Final = np.uint32(0x7C00)
_QUIET16: Final = np.uint32(0x7E00)
_FRACTION16: Final = np.uint32(0x03FF)
_SHIFT: Final = np.uint32(13)  # bits of fraction that a float32 has and a float16 has not
_HALF_WORD: Final = np.uint32(16)
_ONE: Final = np.uint32(1)
_BIAS: Final = np.uint32(112 << 23)  # what the exponents differ by
_SMALLEST_NORMAL: Final = np.uint32(113 << 23)  # 2^-14
_BEYOND: Final = np.uint32(143 << 23)  # 2^16
_ROUNDER: Final = np.uint32(126 << 23)  # 0.5: its last bit is worth 2^-24, as that of a subnormal float16
_BELOW_HALF_13: Final = np.uint32(0x0FFF)
_BELOW_HALF_16: Final = np.uint32(0x7FFF)
_QUIET32: Final = np.uint32(0x0040_0000)


@jit
def float16_to_float32(half: Any) -> Any:
    """Return the uint16 ``half``, read as a float16, as float32. For compiled loops."""
    word = np.uint32(half)
    magnitude = np.uint32(word & _MAGNITUDE16)
    moved = np.uint32(magnitude << _SHIFT)  # exponent and fraction at the places that a float32 has them
    normal = np.uint32(moved + _BIAS)
    special = np.uint32(normal + _BIAS)  # the exponent 31 becomes 255, with the payload of a NaN
    # A subnormal has no hidden bit: read with that of 2^-14, less 2^-14.
    subnormal = bits_of(np.float32(float_of(np.uint32(moved + _SMALLEST_NORMAL)) - float_of(_SMALLEST_NORMAL)))
    finite = subnormal if magnitude < _SUBNORMAL16_BELOW else normal
    wide = special if magnitude >= _INFINITY16 else finite
    return float_of(np.uint32(wide | np.uint32(np.uint32(word & _SIGN16) << _HALF_WORD)))


@jit
def float32_to_float16(value: Any) -> Any:
    """Return the float32 ``value`` rounded to float16, as uint16. For compiled loops."""
    word = bits_of(value)
    magnitude = np.uint32(word & _MAGNITUDE32)
    shifted = np.uint32(magnitude >> _SHIFT)
    tie = np.uint32(shifted & _ONE)  # just under half is added, and 1 more where the last bit is odd: ties to even
    normal = np.uint32(np.uint32(np.uint32(magnitude - _BIAS) + _BELOW_HALF_13) + tie) >> _SHIFT
    # The processor rounds the sum with 0.5 to multiples of 2^-24, the unit of subnormals; they are its lowest bits.
    subnormal = np.uint32(bits_of(np.float32(float_of(magnitude) + float_of(_ROUNDER))) - _ROUNDER)
    quiet = np.uint32(_QUIET16 | np.uint32(shifted & _FRACTION16))
    special = quiet if magnitude > _INFINITY32 else _INFINITY16
    finite = subnormal if magnitude < _SMALLEST_NORMAL else np.uint32(normal)
    narrow = special if magnitude >= _BEYOND else finite
    return np.uint16(np.uint32(narrow | np.uint32(np.uint32(word >> _HALF_WORD) & _SIGN16)))


@jit
def bfloat16_to_float32(half: Any) -> Any:
    """Return the uint16 ``half``, read as a bfloat16, as float32. For compiled loops."""
    return float_of(np.uint32(np.uint32(half) << _HALF_WORD))


@jit
def float32_to_bfloat16(value: Any) -> Any:
    """Return the float32 ``value`` rounded to bfloat16, as uint16. For compiled loops."""
    word = bits_of(value)
    tie = np.uint32(np.uint32(word >> _HALF_WORD) & _ONE)
    rounded = np.uint32(np.uint32(word + _BELOW_HALF_16) + tie)
    quiet = np.uint32(word | _QUIET32)
    selected = quiet if np.uint32(word & _MAGNITUDE32) > _INFINITY32 else rounded
    return np.uint16(np.uint32(selected >> _HALF_WORD))


@jit
def widen_float16(source: Any, target: Any) -> None:
    """Widen an array of float16, held as uint16, into one of float32 of the same size."""
    for i in range(target.size):
        target[i] = float16_to_float32(source[i])


@jit
def widen_bfloat16(source: Any, target: Any) -> None:
    """Widen an array of bfloat16, held as uint16, into one of float32 of the same size."""
    for i in range(target.size):
        target[i] = bfloat16_to_float32(source[i])


@jit
def round_float16(target: Any, source: Any) -> None:
    """Round an array of float32 into one of float16, held as uint16, of the same size."""
    for i in range(target.size):
        target[i] = float32_to_float16(source[i])


@jit
def round_bfloat16(target: Any, source: Any) -> None:
    """Round an array of float32 into one of bfloat16, held as uint16, of the same size."""
    for i in range(target.size):
        target[i] = float32_to_bfloat16(source[i])


def widen_on_host(source: Array, target: Array) -> None:
    """Widen ``source``, 16-bit floats on the host, 1-D and contiguous, into the float32 ``target`` (local)."""
    loop = widen_bfloat16 if source.dtype == BFLOAT16 else widen_float16
    loop(source.view(np.uint16), target)


def round_on_host(target: Array, source: Array) -> None:
    """Round the float32 ``source`` into ``target``, 16-bit floats on the host, 1-D and contiguous (local)."""
    loop = round_bfloat16 if target.dtype == BFLOAT16 else round_float16
    loop(target.view(np.uint16), source)


for _loop in (widen_float16, widen_bfloat16, round_float16, round_bfloat16):
    _loop.sample(lambda: (np.zeros(1, np.uint16), np.zeros(1, np.float32)))


def widened_allreduce(
    algorithm: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce the 16-bit ``buffer`` in place by ``algorithm`` on a float32 copy. Collective over ``comm``.

    The result is multiplied by ``scale`` before it is rounded.
    """
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    widen(buffer, wide)
    algorithm(comm, wide, op)
    multiply(wide, scale)
    round_into(buffer, wide)


def widen(source: Array, target: Array) -> None:
    """Copy ``source`` into ``target``, which is of the same dtype or of that for sums of it (local)."""
    if is_16bit_float(source.dtype) and not is_device(source):
        widen_on_host(source, target)
    else:
        target[...] = source


def round_into(target: Array, total: Array) -> None:
    """Round ``total`` to the dtype of ``target``; a sum beyond its range becomes infinite (local)."""
    if is_16bit_float(target.dtype) and not is_device(target):
        round_on_host(target, total)
        return
    with np.errstate(over="ignore"):  # infinity is the message: loss scaling looks for it
        target[...] = total


def multiply(total: Array, scale: float) -> None:
    """Multiply ``total``, of a dtype that is summed as it is, by ``scale`` in its own precision (local)."""
    if scale != 1.0:
        with np.errstate(all="ignore"):  # infinity and NaN are for the caller to find
            total *= total.dtype.type(scale)
