"""Reduction operators and buffer checks of all algorithms, and the MPI library's allreduce.

If several ranks compute the same element, all must pass the operands in the same order: the sign of a zero and the
payload of a NaN depend on it.
"""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.dtypes import fault_in, is_16bit_float, name_of
from hpcdist.comm.communicator import REDUCTIONS, Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError

# Errors that an algorithm raises on all ranks before it sends anything, so that the ranks stay in step.
REFUSALS: Final = (UsageError, ConfigurationError, MissingCapabilityError, BufferHandoverError)

Combine: TypeAlias = Callable[[Array, Array, Array], None]  # (left, right, out) of equal shape; out may be an operand

_UFUNCS: Final = {"sum": "add", "max": "maximum", "min": "minimum"}
assert tuple(_UFUNCS) == REDUCTIONS


# An algorithm: reduces a buffer in place by an op to the same bits on every rank. Collective.
AllreduceFunction: TypeAlias = Callable[[Communicator, Array, str], None]


class ScaledFunction(Protocol):
    """An allreduce that multiplies the result by ``scale``, then rounds to the buffer's dtype. Collective."""

    def __call__(self, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        """Reduce ``buffer`` in place and multiply the result by keyword-only ``scale``."""


def combiner(buffer: Array, op: str) -> Combine:
    """Return the numpy or cupy ufunc that performs ``op`` on ``buffer``.

    Raises UsageError for an unknown op, and BufferHandoverError for an unsupported buffer. 16-bit floats are
    unsupported, because every partial sum would be rounded.
    """
    check_buffer(buffer)
    if is_16bit_float(buffer.dtype):
        raise BufferHandoverError(
            f"this function would round {name_of(buffer.dtype)} at every partial sum; "
            "call hpcdist.collectives.allreduce, which sums in float32 and rounds once"
        )
    return ufunc(buffer, op)


def ufunc(buffer: Array, op: str) -> Combine:
    """Return the numpy or cupy ufunc that performs ``op``, for any dtype. Raises UsageError for an unknown op."""
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
    """Return True for max and min of floats, in which MPI and NCCL may lose NaNs. Local."""
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
    """Reduce ``buffer`` in place by MPI_Allreduce, which chooses the algorithm. Collective over ``comm``."""
    comm.allreduce(buffer, op)  # also checks the buffer
