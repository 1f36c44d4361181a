"""Tensors as buffers for communication: 1-D, contiguous, of a dtype that numpy and MPI support.

Bools and 8-bit floats are sent as bytes, complex numbers as pairs of floats. GPU tensors are accessed on the
operation's stream. Without cupy, each operation copies them to pinned host memory and back.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from hpcdist.adapters.torch.arrays import check_memory, contiguous, flat_array
from hpcdist.arrays.backend import Array
from hpcdist.torch import streams


class Buffer:
    """1-D array over the memory of a PyTorch ``tensor``, for communication. A non-contiguous tensor is copied first.

    Construction raises BufferHandoverError for unsupported tensors.
    """

    __slots__ = ("_copy", "_tensor", "array")
    array: Array

    def __init__(self, tensor: torch.Tensor, copy: bool = False) -> None:
        self._tensor = tensor
        self._copy: torch.Tensor | None = None
        is_cpu = tensor.is_cpu
        if tensor.layout is not torch.strided or tensor.is_quantized or not (is_cpu or tensor.is_cuda):
            check_memory(tensor)  # raises
        plain = contiguous(tensor, copy=copy)
        if plain is not tensor:
            tensor = self._copy = plain
        if is_cpu:
            self.array = flat_array(tensor)

    def __getattr__(self, name: str) -> Array:
        # The array of a GPU tensor is created by the thread that runs the operation, on the operation's stream.
        if name != "array":
            raise AttributeError(name)
        memory = self._tensor if self._copy is None else self._copy
        if not streams.has_cupy():
            streams.record_use(memory)
            self._copy = streams.pinned_like(memory)
            self._copy.copy_(memory.detach())
            memory = self._copy
        self.array = array_of(memory)
        return self.array

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def finish(self) -> None:
        """Copy the result into the tensor if the operation used a copy of the tensor. Call it after the operation."""
        if self._copy is not None:
            if self._tensor.is_cuda:
                streams.record_use(self._tensor)
            self._tensor.detach().copy_(self._copy)


def coalesced_inputs(inputs: Sequence[torch.Tensor], *outputs: Sequence[torch.Tensor]) -> list[Buffer]:
    """Return a list of one `Buffer` per input of a coalesced collective. Copy all inputs if an output overlaps one."""
    # An output may overlap the input of another position, so all inputs are then copied.
    copy = len(inputs) > 1 and _do_overlap(inputs, *outputs)
    return [Buffer(tensor, copy) for tensor in inputs]


def _do_overlap(*lists: Sequence[torch.Tensor]) -> bool:
    spans = []
    for tensors in lists:
        for entry, tensor in enumerate(tensors):
            if tensor.layout is torch.strided and tensor.numel():
                extents = zip(tensor.shape, tensor.stride(), strict=True)
                last = sum((size - 1) * stride for size, stride in extents)
                spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize, entry))
    longest, owner = 0, -1
    for start, stop, entry in sorted(spans):
        if start < longest and entry != owner:
            return True
        longest, owner = max((longest, owner), (stop, entry))
    return False


def array_of(memory: torch.Tensor) -> Array:
    """Return a 1-D array over the memory of a contiguous tensor. Raises BufferHandoverError for unsupported dtypes."""
    if memory.is_cuda:
        streams.record_use(memory)
    return flat_array(memory)


def devices_of(arguments: Iterable[Iterable[Any]]) -> set[torch.device]:
    """Return the set of the devices of all buffers in ``arguments``: the argument tuples of several calls."""
    values = (value for argument in arguments for value in argument)
    parts = (part for value in values for part in (value if isinstance(value, list) else (value,)))
    return {part.device for part in parts if isinstance(part, Buffer)}


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Return ``tensors``, one tensor or several, as a list. Local."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def buffers_of(tensors: Sequence[torch.Tensor]) -> list[Buffer]:
    """Return a list of one `Buffer` per tensor. Local."""
    return [Buffer(tensor) for tensor in tensors]


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without "torch."."""
    return str(dtype).removeprefix("torch.")
