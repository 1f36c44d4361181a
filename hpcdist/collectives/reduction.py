"""Reduction operators and buffer checks that all algorithms share, and the MPI library's own allreduce.

The operator is a ufunc of the library that owns the buffer, numpy or cupy. An algorithm in which several ranks
compute the same element must pass the operands in the same order on each of them: the sign of a zero and the payload
of a NaN depend on the order. `AllreduceFunction` is an algorithm.
"""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.dtypes import fault_in, is_16bit_float, name_of
from hpcdist.comm.communicator import REDUCTIONS, Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError

# An algorithm raises these on all ranks of its communicator alike, before it has sent anything: they stay in step.
REFUSALS: Final = (UsageError, ConfigurationError, MissingCapabilityError, BufferHandoverError)

Combine: TypeAlias = Callable[[Array, Array, Array], None]  # (left, right, out), all of one shape; out may be either

_UFUNCS: Final = {"sum": "add", "max": "maximum", "min": "minimum"}
assert tuple(_UFUNCS) == REDUCTIONS


# An algorithm: reduces a buffer in place by an op to the same bits on every rank. Collective.
AllreduceFunction: TypeAlias = Callable[[Communicator, Array, str], None]


class ScaledFunction(Protocol):
    """An algorithm that multiplies the result by ``scale``, once, before it is rounded. Collective over ``comm``."""

    def __call__(self, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        """Reduce ``buffer`` by ``op`` and multiply it."""


def combiner(buffer: Array, op: str) -> Combine:
    """Return the ufunc of ``op`` for ``buffer``, which must be one that can be reduced as it is.

    Raises UsageError for an unknown op, BufferHandoverError for a buffer that cannot be sent or would round at every
    partial sum (16-bit floats).
    """
    check_buffer(buffer)
    if is_16bit_float(buffer.dtype):
        raise BufferHandoverError(
            f"{name_of(buffer.dtype)} would be rounded at every partial sum; "
            "call hpcdist.collectives.allreduce, which sums in float32 and rounds once"
        )
    return ufunc(buffer, op)


def ufunc(buffer: Array, op: str) -> Combine:
    """Return the ufunc of ``op`` for ``buffer``, whatever its dtype. Raises UsageError."""
    check_op(op)
    function = getattr(namespace(buffer), _UFUNCS[op])
    if buffer.dtype.kind in "iu":  # integers wrap around and warn of nothing
        return lambda left, right, out: function(left, right, out=out)

    def combine(left: Array, right: Array, out: Array) -> None:
        # Infinity and NaN are for the caller to find: no MPI library warns of them either.
        with np.errstate(all="ignore"):
            function(left, right, out=out)

    return combine


def may_lose_nan(buffer: Array, op: str) -> bool:
    """Return True for the maximum and the minimum of floats, in which foreign libraries may lose NaN (local)."""
    return op != "sum" and buffer.dtype.kind == "f"


def check_op(op: str) -> None:
    """Raise UsageError for an unknown reduction (local)."""
    if op not in _UFUNCS:
        raise UsageError(f"reduction {op!r} is unknown; choose one of {', '.join(_UFUNCS)}")


def check_buffer(buffer: Array) -> None:
    """Raise BufferHandoverError unless ``buffer`` is 1-D, contiguous, writable and of a supported dtype (local).

    The hand-over of a message checks the same; here it is checked whole and on any number of ranks, one included.
    """
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
    """Reduce ``buffer`` in place by MPI_Allreduce. Collective over ``comm``.

    The library chooses the algorithm by size and topology, so neither cost nor bytes sent are known here. The
    MPI standard requires that all ranks receive identical results.
    """
    comm.allreduce(buffer, op)  # which refuses what every other algorithm does
