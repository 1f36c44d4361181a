"""CUDA IPC memory: memory of a GPU that the processes of a node share by a handle of the driver.

The handle is sent as bytes and opened by the others. Only memory that came from cudaMalloc by itself has a handle: a
part of a pool is not the beginning of an allocation, and what cudaMallocAsync returned cannot be shared at all. So it
is allocated here, in whole units of 2 MiB, since the driver shares all of the unit that an allocation lies in.
"""

import os
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import device
from hpcdist.errors import MissingCapabilityError

UNIT_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class IpcHandle:
    """What another process needs to read the memory: small, and picklable."""

    process: str
    bus_id: str
    pointer: int
    handle: bytes
    nbytes: int


class IpcMapping:
    """Memory of another rank: ``array`` has its bytes until `close`."""

    def __init__(self, pointer: int, nbytes: int, opened: bool) -> None:
        cuda = device.cupy().cuda
        self._pointer, self._opened = pointer, opened
        memory = cuda.UnownedMemory(pointer, nbytes, self, device.index())
        self.array: Any = device.cupy().ndarray(nbytes, np.uint8, cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Unmap; must precede the owner's freeing, and follow the last kernel that reads (local)."""
        self.array = None
        if self._opened:
            self._opened = False
            device.cupy().cuda.runtime.ipcCloseMemHandle(self._pointer)


def process_identity() -> str:
    """Return what tells this process from the others of its node: memory of one process needs no handle in it."""
    return str(os.getpid())


def allocate(nbytes: int) -> Array:
    """Return at least ``nbytes`` bytes of the current GPU that `export` takes (local)."""
    cuda = device.cupy().cuda
    size = -(-nbytes // UNIT_BYTES) * UNIT_BYTES
    try:
        memory = cuda.Memory(size)
    except cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(f"the GPU has no {size} bytes left to share ({error})") from error
    array: Array = device.cupy().ndarray(size, np.uint8, cuda.MemoryPointer(memory, 0))
    return array


def export(array: Array) -> IpcHandle:
    """Return the ticket of what `allocate` returned. Raises MissingCapabilityError, with the reason (local)."""
    cuda = device.cupy().cuda
    memory: Any = getattr(array.data, "mem", None)
    if isinstance(memory, cuda.MemoryAsync):
        raise MissingCapabilityError("memory of cudaMallocAsync cannot be shared between processes; take cupy's pool")
    if not isinstance(memory, cuda.Memory) or array.data.ptr != memory.ptr:  # type: ignore[attr-defined]
        raise MissingCapabilityError("only a whole allocation of cudaMalloc can be shared, not a part of a pool")
    try:
        handle = cuda.runtime.ipcGetMemHandle(memory.ptr)
    except cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(f"the driver makes no handle of device memory ({error})") from error
    return IpcHandle(process_identity(), device.bus_id(), memory.ptr, handle, array.nbytes)


def open_handle(ticket: IpcHandle) -> IpcMapping:
    """Map the memory of ``ticket``, which another process of the node exported (local).

    Raises MissingCapabilityError where the driver refuses: the other GPU is hidden (bound to another task, or left out
    of CUDA_VISIBLE_DEVICES) or has no peer access.
    """
    if ticket.process == process_identity():
        return IpcMapping(ticket.pointer, ticket.nbytes, opened=False)
    runtime = device.cupy().cuda.runtime
    try:
        pointer = int(runtime.ipcOpenMemHandle(ticket.handle))
    except runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"GPU {device.bus_id()} cannot open memory of GPU {ticket.bus_id} ({error}); let all ranks of a node see "
            "all of its GPUs (--gpus-per-node instead of --gpus-per-task, --gpu-bind=none)"
        ) from error
    return IpcMapping(pointer, ticket.nbytes, opened=True)
