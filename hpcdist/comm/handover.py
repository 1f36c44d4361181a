"""The one place where a buffer is handed to messages: contiguity, dtype, stream and staging are decided here.

mpi4py synchronises no stream and checks no layout; callers must not have to remember either.
"""

from collections.abc import Callable

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import is_16bit_float, is_supported, name_of
from hpcdist.errors import BufferHandoverError


class Handover:
    """Turns the caller's buffers into what the message layer may read or write.

    ``device_pointers`` says that the layer below takes pointers into GPU memory; where it does not, device buffers
    travel through a host copy.
    """

    def __init__(self, device_pointers: bool) -> None:
        self.device_pointers = device_pointers

    def outgoing(self, buffer: Array) -> Array:
        """Return ``buffer`` in a form that may be read at once: 16-bit floats as uint16, device memory synchronised."""
        _check(buffer)
        if backend.is_device(buffer):
            backend.synchronise(buffer)
            if not self.device_pointers:
                buffer = backend.to_host(buffer)
        return _bits(buffer)

    def incoming(self, buffer: Array) -> tuple[Array, Callable[[], None] | None]:
        """Return memory to receive into, and what must be called when the data is there (None: nothing)."""
        _check(buffer)
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.writeable:
                raise BufferHandoverError("the buffer to receive into is read-only; pass a writable array")
        elif backend.is_device(buffer):
            # Pending kernels may still read what the message will overwrite.
            backend.synchronise(buffer)
            if not self.device_pointers:
                host = np.empty(buffer.shape, buffer.dtype)
                return _bits(host), lambda: buffer.set(host)
        return _bits(buffer), None

    def both(self, buffer: Array) -> tuple[Array, Callable[[], None] | None]:
        """Return memory that holds the buffer's data and takes the result, and what to call when it is there."""
        message, finish = self.incoming(buffer)
        if finish is not None:
            message[...] = _bits(backend.to_host(buffer))
        return message, finish


def _check(buffer: Array) -> None:
    if not buffer.flags.c_contiguous or buffer.ndim != 1:
        raise BufferHandoverError(
            f"a message needs a 1-D contiguous buffer, got shape {buffer.shape} with strides {buffer.strides}; "
            "pass np.ascontiguousarray(x).reshape(-1) and copy the result back"
        )
    if not is_supported(buffer.dtype):
        raise BufferHandoverError(
            f"dtype {buffer.dtype} cannot travel; use a float, integer or bfloat16 dtype "
            f"in native byte order, not {name_of(buffer.dtype)}"
        )


def _bits(buffer: Array) -> Array:
    """Show 16-bit floats as uint16: most MPI libraries know neither of them, and none may reduce them."""
    return buffer.view(np.uint16) if is_16bit_float(buffer.dtype) else buffer
