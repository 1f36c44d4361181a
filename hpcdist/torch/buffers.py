"""Tensors as the buffers that hpcdist sends: 1-D, contiguous, of a dtype that numpy and MPI know.

A contiguous tensor is seen where it lies; any other is copied, and `Buffer.finish` copies the result back. Truths
and 8-bit floats travel as bytes, complex numbers as pairs of floats.
"""

from typing import Final

import torch

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.arrays.gpu import device
from hpcdist.errors import BufferHandoverError

_BYTES: Final = frozenset(
    kind
    for kind in (
        torch.bool,
        *(
            getattr(torch, name, None)
            for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
        ),
    )
    if kind is not None
)
_SEEN_AS: Final = {
    torch.bfloat16: torch.int16,  # numpy has no such type of its own
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    **dict.fromkeys(_BYTES, torch.uint8),
}


class Buffer:
    """The memory of ``tensor``, or of a contiguous copy.

    Raises BufferHandoverError for a sparse or quantised tensor, or one on a device that is neither CPU nor CUDA.
    """

    __slots__ = ("_copy", "_tensor", "array")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._copy: torch.Tensor | None = None
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise BufferHandoverError(f"a {kind} tensor cannot travel; pass tensor.to_dense() or its parts")
        if tensor.device.type not in ("cpu", "cuda"):
            raise BufferHandoverError(f"a tensor on the device {tensor.device} cannot travel; bring it to cpu or cuda")
        memory = self._tensor
        if not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
            memory = self._copy = memory.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        self.array: Array = array_of(memory)

    def finish(self) -> None:
        """Copy a result back into the tensor, where it was not written there."""
        if self._copy is not None:
            self._tensor.copy_(self._copy)


def array_of(memory: torch.Tensor) -> Array:
    """Return the 1-D array in the memory of a contiguous tensor without a gradient."""
    seen = _SEEN_AS.get(memory.dtype)
    flat = memory.reshape(-1)
    if seen is not None:
        flat = flat.view(seen)
    array: Array = device.cupy().from_dlpack(flat) if flat.is_cuda else flat.numpy()
    return array.view(BFLOAT16) if memory.dtype is torch.bfloat16 else array


def is_bytes(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` travel as bytes that no sum can be made of."""
    return tensor.dtype in _BYTES
