"""Hand-over of a buffer to the message layer: contiguity, dtype, stream order and staging, decided here alone.

mpi4py synchronises no stream and checks no layout; here that is done for every buffer. For a buffer on a GPU:

- Data to be sent is produced by kernels that may still run. An event is recorded behind them on the current stream, and
  the host waits for that event before the message layer reads: not for the device, nor for kernels launched later.
- Where the message layer takes device pointers for the operation (`mpi.cuda_aware` tests it, operation by operation),
  the same event also stands before it writes.
- Otherwise the data goes through pinned memory: the copy to the host waits for the event on a stream of its own, and
  the copy back is made on the current stream, so that kernels launched afterwards see it and no host waits for it.
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
    """Conversion of the caller's buffers into memory that the message layer may read or write.

    ``device_pointers`` says for which of `OPERATIONS` the layer below takes pointers into GPU memory (True: all of
    them); where it does not, device buffers travel through pinned memory. Non-blocking collectives are never among
    them: Open MPI reads device memory in those as if it were the host's.
    """

    def __init__(self, device_pointers: bool | Collection[str]) -> None:
        if isinstance(device_pointers, bool):
            device_pointers = OPERATIONS if device_pointers else ()
        self.pointers = frozenset(device_pointers)
        assert self.pointers <= set(OPERATIONS), f"{set(self.pointers)} has operations that are none of {OPERATIONS}"

    @property
    def device_pointers(self) -> bool:
        """Whether messages take device pointers."""
        return MESSAGES in self.pointers

    def outgoing(self, buffer: Array, operation: str = MESSAGES) -> Array:
        """Return ``buffer`` as memory that may be read at once: its kernels have ended, 16-bit floats are uint16."""
        _check(buffer)
        if backend.is_device(buffer):
            if operation in self.pointers:
                device.produced()
            else:
                buffer = staging.to_host(buffer)
        return _bits(buffer)

    def incoming(self, buffer: Array, operation: str = MESSAGES) -> tuple[Array, Callable[[], None] | None]:
        """Return memory to receive into, and the function to call when the data has arrived (None: nothing to do)."""
        _check(buffer)
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.writeable:
                raise BufferHandoverError("the buffer to receive into is read-only; pass a writable array")
        elif backend.is_device(buffer):
            if operation not in self.pointers:
                host = staging.lease(buffer.size, buffer.dtype)
                # No wait here: the copy back is enqueued on the current stream, behind kernels that still use `buffer`.
                return _bits(host), lambda: _copy_back(host, buffer)
            # MPI writes the device memory by itself, in no stream: kernels that still read it must end first.
            device.produced()
        return _bits(buffer), None

    def both(self, buffer: Array, operation: str = "") -> tuple[Array, Callable[[], None] | None]:
        """Return memory with the buffer's data for an in-place operation, and the function to call after it (or None).

        An operation that is not among `OPERATIONS`, such as a non-blocking one, is staged.
        """
        message, finish = self.incoming(buffer, operation)
        # A `finish` means that `message` is a pinned block, which has to be filled; `view` undoes `_bits` for the copy.
        if finish is not None:
            staging.begin_to_host(buffer, message.view(buffer.dtype)).synchronize()
        return message, finish


def _copy_back(host: np.ndarray, buffer: Array) -> None:
    staging.to_device(host, buffer)


def _check(buffer: Array) -> None:
    if not buffer.flags.c_contiguous or buffer.ndim != 1:
        raise BufferHandoverError(
            f"a message needs a 1-D contiguous buffer, got shape {buffer.shape} with strides {buffer.strides}; "
            "pass np.ascontiguousarray(x).reshape(-1) and copy the result back"
        )
    if fault := fault_in(buffer.dtype):
        raise BufferHandoverError(fault)


def _bits(buffer: Array) -> Array:
    """Show 16-bit floats as uint16: most MPI libraries know neither of them, and none may reduce them."""
    return buffer.view(np.uint16) if is_16bit_float(buffer.dtype) else buffer
