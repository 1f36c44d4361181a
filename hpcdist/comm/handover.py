"""Hand-over of buffers to the message layer: contiguity, dtype, stream order and staging.

mpi4py neither synchronises streams nor checks layouts. Before MPI reads or writes GPU memory, the host waits for an
event recorded on the current stream. Data goes through pinned memory if MPI does not take device pointers (see
`mpi.cuda_aware`): the copy to the host waits on a separate stream, and the copy back runs on the current stream.
"""

from collections.abc import Callable, Collection
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import fault_in, is_16bit_float
from hpcdist.arrays.gpu import device, staging
from hpcdist.errors import BufferHandoverError

MESSAGES: Final = "send"  # messages of all kinds: send, recv, sendrecv, isend, irecv, probe
COLLECTIVES: Final = ("broadcast", "allreduce", "reduce_scatter", "all_gather", "all_to_all")
OPERATIONS: Final = (MESSAGES, *COLLECTIVES)


class Handover:
    """Conversion of buffers to arrays that MPI can read or write, with GPU buffers staged on the host if necessary."""

    def __init__(self, device_pointers: bool | Collection[str]) -> None:
        if isinstance(device_pointers, bool):
            device_pointers = OPERATIONS if device_pointers else ()
        # The operations in which MPI accepts GPU pointers. Other operations, and all non-blocking collectives, stage
        # GPU buffers in pinned host memory.
        self.pointers = frozenset(device_pointers)
        assert self.pointers <= set(OPERATIONS), f"{set(self.pointers)} must contain only operations of {OPERATIONS}"

    @property
    def device_pointers(self) -> bool:
        """True if point-to-point messages accept pointers to GPU memory."""
        return MESSAGES in self.pointers

    def outgoing(self, buffer: Array, operation: str = MESSAGES) -> Array:
        """Return an array with the data of ``buffer`` that MPI can send. 16-bit floats become uint16."""
        _check(buffer)
        if backend.is_device(buffer):
            if operation in self.pointers:
                device.produced()
            else:
                # a copy, because MPI cannot read GPU memory in this operation
                buffer = staging.to_host(buffer)
        return _bits(buffer)

    def incoming(self, buffer: Array, operation: str = MESSAGES) -> tuple[Array, Callable[[], object] | None]:
        """Return (array that MPI may receive into, function that then copies this array to ``buffer``, or None)."""
        _check(buffer)
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.writeable:
                raise BufferHandoverError("the buffer to receive into is read-only; pass a writable array")
        elif backend.is_device(buffer):
            if operation not in self.pointers:
                host = staging.lease(buffer.size, buffer.dtype)
                # No wait here: the copy back follows kernels on the current stream that still use `buffer`.
                return _bits(host), lambda: staging.to_device(host, buffer)
            # MPI writes device memory outside of any stream: kernels that still read the memory must end first.
            device.produced()
        return _bits(buffer), None

    def both(self, buffer: Array, operation: str = "") -> tuple[Array, Callable[[], object] | None]:
        """Return (array for an in-place MPI operation on ``buffer``, function that copies the result back, or None)."""
        message, finish = self.incoming(buffer, operation)
        # A `finish` means that `message` is a pinned block that must be filled; `view` reverts `_bits` for the copy.
        if finish is not None:
            staging.begin_to_host(buffer, message.view(buffer.dtype)).synchronize()
        return message, finish


def _check(buffer: Array) -> None:
    if not buffer.flags.c_contiguous or buffer.ndim != 1:
        raise BufferHandoverError(
            f"a message needs a 1-D contiguous buffer, got shape {buffer.shape} with strides {buffer.strides}; "
            "pass np.ascontiguousarray(x).reshape(-1) and copy the result back"
        )
    if fault := fault_in(buffer.dtype):
        raise BufferHandoverError(fault)


def _bits(buffer: Array) -> Array:
    # Most MPI libraries do not support 16-bit floats.
    return buffer.view(np.uint16) if is_16bit_float(buffer.dtype) else buffer
