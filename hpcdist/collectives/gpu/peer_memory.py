"""Peer-memory allreduce between the GPUs of a node, or on one GPU that ranks share, by CUDA IPC handles.

Kernels read the memory of the other ranks. A handle of the driver is sent as bytes and opened by the others. Only
memory that came from cudaMalloc by itself has one: a part of a pool is not the beginning of an allocation, and memory
of cudaMallocAsync cannot be shared at all. So the memory is allocated here, in whole units of 2 MiB, since the driver
shares all of the unit that an allocation lies in.

Each rank keeps exchange memory on its GPU that the others have mapped by handles of the driver. As in
`node.shared_memory`, a rank copies its buffer there, sums one slice over all ranks, and copies the other slices of
the result out. With μ the time to read and write a byte of device memory, or of a peer's, and barriers of α log2(p):

    2 (α log2(p)) + n μ (copy in) + n μ (sum p slices of n/p) + n μ (copy out)    for each piece

Nothing passes through the host but two barriers a piece. Before each barrier the host waits for an event behind the
rank's own kernels, so what the others read after it is there. Two halves of the memory take turns: before a half is
written again, every rank has waited for its copies out of it, at the first barrier of the other half's piece. The
memory of a communicator that is dropped without `release` is unmapped as well, but no rank waits for the others then.

Each element is summed in rank order by one rank, and its bits are copied: all ranks end with the same bits, those of
`node.shared_memory` on the host. 16-bit floats are shared as they are; the kernels widen them, sum in float32, and
round once.
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
    """Handle by which another process reads the memory: small, and picklable."""

    process: str
    bus_id: str
    pointer: int
    handle: bytes
    nbytes: int


class _Opened:
    """Owner of the arrays of a mapping: with the last of them the mapping is closed, if it was not before."""


class IpcMapping:
    """Memory of another rank: ``array`` has its bytes until `close`, or until nothing refers to it."""

    def __init__(self, pointer: int, nbytes: int, opened: bool) -> None:
        cuda, owner = device.cupy().cuda, _Opened()
        self._close = weakref.finalize(owner, _unmap, cuda, pointer) if opened else None
        if self._close is not None:
            self._close.atexit = False  # the driver does it, and may be gone by then
        memory = cuda.UnownedMemory(pointer, nbytes, owner, device.index())
        self.array: Any = device.cupy().ndarray(nbytes, np.uint8, cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Unmap; must precede the owner's freeing, and follow the last kernel that reads (local)."""
        self.array = None
        if self._close is not None:
            self._close()


def _unmap(cuda: Any, pointer: int) -> None:
    cuda.get_current_stream().synchronize()  # kernels may still read where nobody has called `close`
    cuda.runtime.ipcCloseMemHandle(pointer)


def process_identity() -> str:
    """Return the identity of this process on its node: memory of the own process needs no handle."""
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
    """Return the handle of memory that `allocate` returned. Raises MissingCapabilityError, with the reason (local)."""
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


def open_handle(memory: IpcHandle) -> IpcMapping:
    """Map ``memory``, which another process of the node exported (local).

    Raises MissingCapabilityError where the driver refuses: the other GPU is hidden (bound to another task, or left out
    of CUDA_VISIBLE_DEVICES) or has no peer access.
    """
    if memory.process == process_identity():
        return IpcMapping(memory.pointer, memory.nbytes, opened=False)
    runtime = device.cupy().cuda.runtime
    try:
        pointer = int(runtime.ipcOpenMemHandle(memory.handle))
    except runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"GPU {device.bus_id()} cannot open memory of GPU {memory.bus_id} ({error}); let all ranks of a node see "
            "all of its GPUs (--gpus-per-node instead of --gpus-per-task, --gpu-bind=none)"
        ) from error
    return IpcMapping(pointer, memory.nbytes, opened=True)


PIECE_BYTES: Final = 32 << 20  # per rank and half: large beside two barriers (to be measured on a GPU)


@dataclass
class _Exchange:
    """The exchange memory of all ranks, as bytes, in two halves; a refusal where there is none."""

    own: Array | None
    mappings: list[IpcMapping | None]
    half_bytes: int
    refusal: str = ""
    turn: int = 0

    def next_half(self, rank: int) -> list[Array]:
        """Return, as bytes of each rank, the half whose turn it is."""
        # The other half than last time: ranks may still copy the results of the last piece out of that one.
        self.turn ^= 1
        start = self.turn * self.half_bytes
        assert self.own is not None
        arrays = [self.own if mapping is None else mapping.array for mapping in self.mappings]
        assert self.mappings[rank] is None
        return [array[start : start + self.half_bytes] for array in arrays]

    def close(self) -> None:
        for mapping in self.mappings:
            if mapping is not None:
                mapping.close()
        self.mappings = []


_exchanges: weakref.WeakKeyDictionary[Communicator, _Exchange] = weakref.WeakKeyDictionary()


def device_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer``, on a GPU, in place to the same bits on every rank. Collective over ``comm``, one node.

    The memory is taken at the first call and grows with the buffer, up to two halves of `PIECE_BYTES`. Raises
    MissingCapabilityError, on every rank, where a rank cannot map what another one shares.
    """
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
    """Return why the ranks of ``comm`` cannot share device memory, "" where they can. Collective at the first call."""
    if comm.nodes().count > 1:
        return f"the {comm.size} ranks of {comm.name} are on {comm.nodes().count} nodes"
    return _exchange_of(comm, UNIT_BYTES).refusal


def _reduce_piece(comm: Communicator, data: Array, views: list[Array], combine: Combine) -> None:
    """Reduce ``data`` over the ranks; ``views`` hold as many elements of each."""
    slices = [part.slice for part in split(data.size, comm.size, data.itemsize)]
    own = slices[comm.rank]
    # Nobody else reads the own slice before the sum is in it, so it takes the sum, and the operand stays in `data`.
    views[comm.rank][: own.start] = data[: own.start]
    views[comm.rank][own.stop :] = data[own.stop :]
    # `produced` waits for this rank's kernels; MPI knows nothing of streams, so a barrier orders hosts only.
    device.produced()
    comm.barrier()
    operands = [data[own] if rank == comm.rank else view[own] for rank, view in enumerate(views)]
    target = views[comm.rank][own]
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
    """Return exchange memory whose halves hold ``nbytes``, or its refusal. Collective where it is made or grows."""
    exchange = _exchanges.get(comm)
    if exchange is None or (not exchange.refusal and exchange.half_bytes < nbytes):
        release(comm)
        exchange = _exchanges[comm] = _open(comm, nbytes)
    return exchange


def _open(comm: Communicator, nbytes: int) -> _Exchange:
    """Take memory on every rank and map that of the others; all ranks succeed, or none. Collective."""
    half_bytes = -(-nbytes // UNIT_BYTES) * UNIT_BYTES
    own: Array | None = None
    answer: IpcHandle | str
    try:
        own = segments.count_in_ledger(allocate(2 * half_bytes))
        answer = export(own)
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
    exchange = _Exchange(own, mappings, half_bytes)
    # Every rank learns of every problem: all of them use the memory, or none.
    exchange.refusal = next(filter(None, comm.allgather_object(problem)), "")
    if exchange.refusal:
        exchange.close()
        comm.barrier()  # nobody frees what another one has mapped
        exchange.own = None
    return exchange


def release(comm: Communicator) -> None:
    """Give back what is shared for ``comm``, if anything is. Collective over ``comm``."""
    exchange = _exchanges.pop(comm, None)
    if exchange is not None and exchange.own is not None:
        device.produced()  # the last copies out of the others' memory
        exchange.close()
        comm.barrier()
        exchange.own = None
