"""Peer-memory allreduce between the GPUs of a node, or between ranks that share a GPU, by CUDA IPC handles.

The buffer is exchanged in pieces through memory that the other ranks map. The time for a piece of n bytes is, with μ
the time to read and write a byte of device or peer memory,

    2 (α log2(p)) + n μ (copy in) + n μ (sum p slices of n/p) + n μ (copy out)

The host runs two barriers per piece, each after this rank's kernels. Pieces alternate between two halves of the memory,
so no rank overwrites bytes that another rank still reads. One rank sums each slice in rank order, so all ranks get the
same bits.
"""

import os
import weakref
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float
from hpcdist.arrays.gpu import device
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.collectives import segments
from hpcdist.collectives.reduction import Combine, check_buffer, ufunc
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MissingCapabilityError

UNIT_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class IpcHandle:
    """Picklable description of a GPU allocation, with which another process of the node can map the memory."""

    process: str
    bus_id: str
    pointer: int
    handle: bytes
    nbytes: int


class _Opened: ...


class IpcMapping:
    """Mapped GPU memory of another rank. ``array``: the mapped bytes, valid until `close`."""

    def __init__(self, pointer: int, nbytes: int, opened: bool) -> None:
        cuda, owner = device.cupy().cuda, _Opened()
        self._close = weakref.finalize(owner, _unmap, cuda, pointer) if opened else None
        if self._close is not None:
            self._close.atexit = False  # at exit the driver unmaps, and may already be gone
        memory = cuda.UnownedMemory(pointer, nbytes, owner, device.index())
        self.array: Any = device.cupy().ndarray(nbytes, np.uint8, cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Unmap the memory. Kernels that use it must have ended. The owner may free it only after this call. Local."""
        self.array = None
        if self._close is not None:
            self._close()


def _unmap(cuda: Any, pointer: int) -> None:
    cuda.get_current_stream().synchronize()  # kernels may still read if `close` was not called
    cuda.runtime.ipcCloseMemHandle(pointer)


def process_identity() -> str:
    """Return an id of this process that is unique on its node."""
    return str(os.getpid())


def allocate(nbytes: int) -> Array:
    """Allocate at least ``nbytes`` bytes of GPU memory, as an array of bytes that `export` accepts. Local."""
    cuda = device.cupy().cuda
    size = -(-nbytes // UNIT_BYTES) * UNIT_BYTES
    try:
        memory = cuda.Memory(size)
    except cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"the GPU cannot allocate {size} bytes to share ({error}); free GPU memory"
        ) from error
    array: Array = device.cupy().ndarray(size, np.uint8, cuda.MemoryPointer(memory, 0))
    return array


def export(array: Array) -> IpcHandle:
    """Return an IPC handle of ``array``, a result of `allocate`. Raises MissingCapabilityError. Local."""
    cuda = device.cupy().cuda
    memory: Any = getattr(array.data, "mem", None)
    if isinstance(memory, cuda.MemoryAsync):
        raise MissingCapabilityError(
            "memory of cudaMallocAsync cannot be shared between processes; use an array from peer_memory.allocate"
        )
    if not isinstance(memory, cuda.Memory) or array.data.ptr != memory.ptr:  # type: ignore[attr-defined]
        raise MissingCapabilityError(
            "this GPU array is a part of a pool or of a larger allocation; only a whole cudaMalloc allocation can be "
            "shared between processes: use an array from peer_memory.allocate"
        )
    try:
        handle = cuda.runtime.ipcGetMemHandle(memory.ptr)
    except cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"the driver cannot share device memory between processes ({error}); set another communication.algorithm"
        ) from error
    return IpcHandle(process_identity(), device.bus_id(), memory.ptr, handle, array.nbytes)


def open_handle(memory: IpcHandle) -> IpcMapping:
    """Map GPU memory of another process of this node by its handle. Raises MissingCapabilityError. Local."""
    # The driver rejects it if the other GPU is hidden from this process, or there is no peer access between the GPUs.
    if memory.process == process_identity():
        return IpcMapping(memory.pointer, memory.nbytes, opened=False)
    runtime = device.cupy().cuda.runtime
    try:
        pointer = int(runtime.ipcOpenMemHandle(memory.handle))
    except runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"GPU {device.bus_id()} cannot open memory of GPU {memory.bus_id} ({error}); let every rank see all GPUs "
            "of its node (--gpus-per-node instead of --gpus-per-task, --gpu-bind=none)"
        ) from error
    return IpcMapping(pointer, memory.nbytes, opened=True)


PIECE_BYTES: Final = 32 << 20  # per rank and half; large compared with two barriers (to be measured on a GPU)


@dataclass
class _Exchange:
    memory: Array | None
    mappings: list[IpcMapping | None]
    half_bytes: int
    refusal: str = ""
    turn: int = 0

    def next_half(self, rank: int) -> list[Array]:
        # Ranks may still copy results of the last piece from the other half.
        self.turn ^= 1
        start = self.turn * self.half_bytes
        assert self.memory is not None
        arrays = [self.memory if mapping is None else mapping.array for mapping in self.mappings]
        assert self.mappings[rank] is None
        return [array[start : start + self.half_bytes] for array in arrays]

    def close(self) -> None:
        for mapping in self.mappings:
            if mapping is not None:
                mapping.close()
        self.mappings = []


_exchanges: weakref.WeakKeyDictionary[Communicator, _Exchange] = weakref.WeakKeyDictionary()


def device_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce a GPU ``buffer`` by reads from the node's other GPUs. Raises MissingCapabilityError. Collective."""
    check_buffer(buffer)
    combine = ufunc(buffer, op)
    if comm.size == 1 or buffer.size == 0:
        return
    exchange = _exchange_of(comm, min(buffer.nbytes, PIECE_BYTES))
    if exchange.refusal:
        raise MissingCapabilityError(exchange.refusal)
    for piece in cut(Range(0, buffer.size), exchange.half_bytes // buffer.itemsize):
        halves = exchange.next_half(comm.rank)
        views = [half[: piece.size * buffer.itemsize].view(buffer.dtype) for half in halves]
        _reduce_piece(comm, buffer[piece.slice], views, combine)


def refusal(comm: Communicator) -> str:
    """Return the reason why the ranks of ``comm`` cannot share GPU memory, or "". The first call is collective."""
    if comm.nodes().count > 1:
        return f"the {comm.size} ranks of {comm.name} are on {comm.nodes().count} nodes"
    return _exchange_of(comm, UNIT_BYTES).refusal


def _reduce_piece(comm: Communicator, data: Array, views: list[Array], combine: Combine) -> None:
    slices = [part.slice for part in split(data.size, comm.size, data.itemsize)]
    local_slice = slices[comm.rank]
    # No other rank reads this rank's slice before the sum is complete: write the sum there, and read `data`.
    views[comm.rank][: local_slice.start] = data[: local_slice.start]
    views[comm.rank][local_slice.stop :] = data[local_slice.stop :]
    # MPI does not know CUDA streams: wait for this rank's kernels before the barrier.
    device.produced()
    comm.barrier()
    operands = [data[local_slice] if rank == comm.rank else view[local_slice] for rank, view in enumerate(views)]
    target = views[comm.rank][local_slice]
    total = target
    if is_16bit_float(data.dtype):
        total = segments.scratch("device_shared", target.size, accumulation_dtype(data.dtype), data)
        total[...] = operands[0]
        operands[0] = total
    combine(operands[0], operands[1], total)
    for operand in operands[2:]:
        combine(total, operand, total)
    if total is not target:
        target[...] = total
    device.produced()
    comm.barrier()
    for view, part in zip(views, slices, strict=True):
        data[part] = view[part]


def _exchange_of(comm: Communicator, nbytes: int) -> _Exchange:
    exchange = _exchanges.get(comm)
    if exchange is None or (not exchange.refusal and exchange.half_bytes < nbytes):
        release(comm)
        exchange = _exchanges[comm] = _open(comm, nbytes)
    return exchange


def _open(comm: Communicator, nbytes: int) -> _Exchange:
    half_bytes = -(-nbytes // UNIT_BYTES) * UNIT_BYTES
    memory: Array | None = None
    answer: IpcHandle | str
    try:
        memory = segments.count_in_ledger(allocate(2 * half_bytes))
        answer = export(memory)
    except MissingCapabilityError as error:
        answer = str(error)
    handles = comm.allgather_object(answer)
    mappings: list[IpcMapping | None] = []
    problem = next((f"rank {rank}: {text}" for rank, text in enumerate(handles) if isinstance(text, str)), "")
    if not problem:
        try:
            for rank, handle in enumerate(handles):
                mappings.append(None if rank == comm.rank else open_handle(handle))
        except MissingCapabilityError as error:
            problem = f"rank {comm.rank}: {error}"
    exchange = _Exchange(memory, mappings, half_bytes)
    # Share all problems, so that either all ranks use the memory or none.
    exchange.refusal = next(filter(None, comm.allgather_object(problem)), "")
    if exchange.refusal:
        exchange.close()
        comm.barrier()  # no rank frees memory that another rank has mapped
        exchange.memory = None
    return exchange


def release(comm: Communicator) -> None:
    """Free the GPU memory that is shared for ``comm``, if there is any. Collective over ``comm``."""
    exchange = _exchanges.pop(comm, None)
    if exchange is not None and exchange.memory is not None:
        device.produced()  # wait for the last copies from other ranks' memory
        exchange.close()
        comm.barrier()
        exchange.memory = None
