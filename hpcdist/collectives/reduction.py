"""Reduction operators, buffer checks of all algorithms, the MPI library's allreduce, and sums of 16-bit floats.

If several ranks compute the same element, all must pass the operands in the same order: the sign of a zero and the
payload of a NaN depend on it.

16-bit floats are summed in float32, and rounded once: to nearest, ties to even. Overflow gives infinity, and underflow
gives subnormals or zero. A NaN keeps its sign and the leading bits of its payload.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import BFLOAT16, accumulation_dtype, fault_in, is_16bit_float, name_of
from hpcdist.arrays.intrinsics import INFINITE, MAGNITUDE, bits_of, float_of
from hpcdist.arrays.jit import jit
from hpcdist.collectives.segments import scratch
from hpcdist.comm.checks import REDUCTIONS
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError

# Errors that an algorithm raises on all ranks before it sends anything, so that the ranks stay in step.
REFUSALS: Final = (UsageError, ConfigurationError, MissingCapabilityError, BufferHandoverError)

Combine: TypeAlias = Callable[[Array, Array, Array], None]  # (left, right, out) of equal shape; out may be an operand

_UFUNCS: Final = {"sum": "add", "max": "maximum", "min": "minimum"}
assert tuple(_UFUNCS) == REDUCTIONS


# An algorithm: reduces a buffer in place by an op to the same bits on every rank. Collective.
AllreduceFunction: TypeAlias = Callable[[Communicator, Array, str], None]


class ScaledFunction(Protocol):
    """Type of an allreduce that multiplies the result by ``scale``, then rounds to the buffer's dtype. Collective."""

    def __call__(self, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        """Reduce ``buffer`` in place and multiply the result by keyword-only ``scale``."""


def combiner(buffer: Array, op: str) -> Combine:
    """Check ``buffer``, then return `ufunc(buffer, op)`. Raises BufferHandoverError, also for 16-bit floats."""
    check_buffer(buffer)
    if is_16bit_float(buffer.dtype):
        raise BufferHandoverError(
            f"this function would round {name_of(buffer.dtype)} at every partial sum; "
            "call hpcdist.collectives.allreduce, which sums in float32 and rounds once"
        )
    return ufunc(buffer, op)


def ufunc(buffer: Array, op: str) -> Combine:
    """Return a function (left, right, out) that applies ``op`` on the device of ``buffer``. Raises UsageError."""
    check_op(op)
    function = getattr(namespace(buffer), _UFUNCS[op])
    if buffer.dtype.kind in "iu":  # integers wrap around without warnings
        return lambda left, right, out: function(left, right, out=out)

    def combine(left: Array, right: Array, out: Array) -> None:
        # The caller checks for infinity and NaN; MPI libraries do not warn either.
        with np.errstate(all="ignore"):
            function(left, right, out=out)

    return combine


def may_lose_nan(buffer: Array, op: str) -> bool:
    """Return True if ``op`` on ``buffer`` is a max or min of floats, in which MPI and NCCL may lose NaNs. Local."""
    return op != "sum" and buffer.dtype.kind == "f"


def check_op(op: str) -> None:
    """Raise UsageError if ``op`` is unknown. Local."""
    if op not in _UFUNCS:
        raise UsageError(f"reduction {op!r} is unknown; choose one of {', '.join(_UFUNCS)}")


def check_buffer(buffer: Array) -> None:
    """Raise BufferHandoverError unless ``buffer`` is 1-D, contiguous, writable and of a supported dtype. Local."""
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise BufferHandoverError(
            f"a collective needs a 1-D contiguous buffer, got shape {buffer.shape} with strides {buffer.strides}; "
            "pass np.ascontiguousarray(x).reshape(-1) and copy the result back"
        )
    if fault := fault_in(buffer.dtype):
        raise BufferHandoverError(fault)
    if isinstance(buffer, np.ndarray) and not buffer.flags.writeable:
        raise BufferHandoverError("the buffer is read-only, and a collective works in place; pass a writable array")


def native_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place by MPI_Allreduce. The MPI library chooses the algorithm. Collective."""
    comm.allreduce(buffer, op)  # also checks the buffer


# uint32 constants: Python integers would make every operation 64 bits wide and halve the vector width.
_SIGN16: Final = np.uint32(0x8000)
_MAGNITUDE16: Final = np.uint32(0x7FFF)
_SUBNORMAL16_BELOW: Final = np.uint32(0x0400)
_INFINITY16: Final = np.uint32(0x7C00)
_QUIET16: Final = np.uint32(0x7E00)
_FRACTION16: Final = np.uint32(0x03FF)
_SHIFT: Final = np.uint32(13)  # number of fraction bits of float32 minus float16
_HALF_WORD: Final = np.uint32(16)
_ONE: Final = np.uint32(1)
_BIAS: Final = np.uint32(112 << 23)  # difference of the exponent biases
_SMALLEST_NORMAL: Final = np.uint32(113 << 23)  # 2^-14
_BEYOND: Final = np.uint32(143 << 23)  # 2^16
_ROUNDER: Final = np.uint32(126 << 23)  # 0.5: its last bit is worth 2^-24, like the last bit of a subnormal float16
_BELOW_HALF_13: Final = np.uint32(0x0FFF)
_BELOW_HALF_16: Final = np.uint32(0x7FFF)
_QUIET32: Final = np.uint32(0x0040_0000)


@jit
def float16_to_float32(half: Any) -> Any:
    """Convert a float16, given by its bits ``half`` (uint16), to float32. For use in compiled loops."""
    word = np.uint32(half)
    magnitude = np.uint32(word & _MAGNITUDE16)
    moved = np.uint32(magnitude << _SHIFT)  # exponent and fraction in the fields of a float32
    normal = np.uint32(moved + _BIAS)
    special = np.uint32(normal + _BIAS)  # the exponent 31 becomes 255, with the payload of a NaN
    # A subnormal has no hidden bit: read it with the hidden bit of 2^-14, then subtract 2^-14.
    subnormal = bits_of(np.float32(float_of(np.uint32(moved + _SMALLEST_NORMAL)) - float_of(_SMALLEST_NORMAL)))
    finite = subnormal if magnitude < _SUBNORMAL16_BELOW else normal
    wide = special if magnitude >= _INFINITY16 else finite
    return float_of(np.uint32(wide | np.uint32(np.uint32(word & _SIGN16) << _HALF_WORD)))


@jit
def float32_to_float16(value: Any) -> Any:
    """Round the float32 ``value`` to float16, and return its bits (uint16). For use in compiled loops."""
    word = bits_of(value)
    magnitude = np.uint32(word & MAGNITUDE)
    shifted = np.uint32(magnitude >> _SHIFT)
    tie = np.uint32(shifted & _ONE)  # add just under half, plus 1 if the last bit is odd: ties to even
    normal = np.uint32(np.uint32(np.uint32(magnitude - _BIAS) + _BELOW_HALF_13) + tie) >> _SHIFT
    # The sum with 0.5 is rounded to multiples of 2^-24, the unit of subnormals, which are its lowest bits.
    subnormal = np.uint32(bits_of(np.float32(float_of(magnitude) + float_of(_ROUNDER))) - _ROUNDER)
    quiet = np.uint32(_QUIET16 | np.uint32(shifted & _FRACTION16))
    special = quiet if magnitude > INFINITE else _INFINITY16
    finite = subnormal if magnitude < _SMALLEST_NORMAL else np.uint32(normal)
    narrow = special if magnitude >= _BEYOND else finite
    return np.uint16(np.uint32(narrow | np.uint32(np.uint32(word >> _HALF_WORD) & _SIGN16)))


@jit
def bfloat16_to_float32(half: Any) -> Any:
    """Convert a bfloat16, given by its bits ``half`` (uint16), to float32. For use in compiled loops."""
    return float_of(np.uint32(np.uint32(half) << _HALF_WORD))


@jit
def float32_to_bfloat16(value: Any) -> Any:
    """Round the float32 ``value`` to bfloat16, and return its bits (uint16). For use in compiled loops."""
    word = bits_of(value)
    tie = np.uint32(np.uint32(word >> _HALF_WORD) & _ONE)
    rounded = np.uint32(np.uint32(word + _BELOW_HALF_16) + tie)
    quiet = np.uint32(word | _QUIET32)
    selected = quiet if np.uint32(word & MAGNITUDE) > INFINITE else rounded
    return np.uint16(np.uint32(selected >> _HALF_WORD))


@jit
def widen_float16(source: Any, target: Any) -> None:
    """Convert float16 elements, stored as uint16 in ``source``, to float32 in ``target``."""
    for i in range(target.size):
        target[i] = float16_to_float32(source[i])


@jit
def widen_bfloat16(source: Any, target: Any) -> None:
    """Convert bfloat16 elements, stored as uint16 in ``source``, to float32 in ``target``."""
    for i in range(target.size):
        target[i] = bfloat16_to_float32(source[i])


@jit
def round_float16(target: Any, source: Any) -> None:
    """Round float32 elements of ``source`` to float16, stored as uint16 in ``target``."""
    for i in range(target.size):
        target[i] = float32_to_float16(source[i])


@jit
def round_bfloat16(target: Any, source: Any) -> None:
    """Round float32 elements of ``source`` to bfloat16, stored as uint16 in ``target``."""
    for i in range(target.size):
        target[i] = float32_to_bfloat16(source[i])


def widen_on_host(source: Array, target: Array) -> None:
    """Convert a contiguous host array of 16-bit floats to the float32 array ``target``. Local."""
    loop = widen_bfloat16 if source.dtype == BFLOAT16 else widen_float16
    loop(source.view(np.uint16), target)


def round_on_host(target: Array, source: Array) -> None:
    """Round the float32 array ``source`` to 16-bit floats, written to ``target``, a contiguous host array. Local."""
    loop = round_bfloat16 if target.dtype == BFLOAT16 else round_float16
    loop(target.view(np.uint16), source)


for _loop in (widen_float16, widen_bfloat16, round_float16, round_bfloat16):
    _loop.sample(lambda: (np.zeros(1, np.uint16), np.zeros(1, np.float32)))


def widened_allreduce(
    algorithm: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce a ``buffer`` of 16-bit floats: run ``algorithm`` in float32, then multiply and round. Collective.

    ``algorithm``: an allreduce function. ``scale`` (keyword-only): factor for the result.
    """
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    widen(buffer, wide)
    algorithm(comm, wide, op)
    multiply(wide, scale)
    round_into(buffer, wide)


def widen(source: Array, target: Array) -> None:
    """Copy ``source`` to ``target``. If ``target`` is float32, 16-bit floats are converted. Local."""
    if is_16bit_float(source.dtype) and not is_device(source):
        widen_on_host(source, target)
    else:
        target[...] = source


def round_into(target: Array, total: Array) -> None:
    """Round ``total`` to the dtype of ``target``, and write it to ``target``. Overflow gives infinity. Local."""
    if is_16bit_float(target.dtype) and not is_device(target):
        round_on_host(target, total)
        return
    with np.errstate(over="ignore"):  # loss scaling checks for infinity
        target[...] = total


def multiply(total: Array, scale: float) -> None:
    """Multiply ``total`` in place by ``scale``, in the dtype of ``total``. Local."""
    if scale != 1.0:
        with np.errstate(all="ignore"):  # the caller checks for infinity and NaN
            total *= total.dtype.type(scale)
