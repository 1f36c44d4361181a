"""NCCL collectives on GPU buffers.

Calls run on the current stream. The host waits for each call, so that the watchdog can name a rank that skipped it;
inside `enqueuing`, the caller waits instead. Shares may differ in size.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import is_16bit_float, name_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.algorithms.all_to_all import reduce_rows
from hpcdist.collectives.reduction import check_buffer, check_op, combiner, may_lose_nan
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, MissingCapabilityError

SEVERAL_RANKS_A_GPU: Final = 23000  # NCCL 2.30, as returned by get_version
SEVERAL_RANKS_VARIABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
_OPS: Final = {"sum": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_DTYPES: Final = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")


class _Local(threading.local):
    def __init__(self) -> None:
        self.enqueued: int | None = None


_here: Final = _Local()
_communicators: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def nccl_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce a GPU ``buffer`` by NCCL. If any rank has no NCCL, all ranks raise MissingCapabilityError. Collective."""
    if is_16bit_float(buffer.dtype) or may_lose_nan(buffer, op):
        parts = split(buffer.size, comm.size, buffer.itemsize)
        reduce_scatter(comm, buffer, parts, op)
        all_gather(comm, buffer, parts)
        return
    combiner(buffer, op)
    if comm.size == 1 or buffer.size == 0:
        return
    channel, module, kind, stream = _prepared(comm, buffer)
    address = _address(buffer)
    channel.allReduce(address, address, buffer.size, kind, getattr(module, _OPS[op]), stream)
    _finish()


def reduce_scatter(comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum") -> None:
    """Reduce a GPU ``buffer`` by NCCL. On rank r, only ``buffer[ranges[r]]`` is defined afterwards. Collective."""
    if is_16bit_float(buffer.dtype) or may_lose_nan(buffer, op):
        _exchange_and_reduce(comm, buffer, ranges, op)
        return
    combiner(buffer, op)
    if comm.size == 1 or buffer.size == 0:
        return
    channel, module, kind, stream = _prepared(comm, buffer)
    module.groupStart()
    for root, part in enumerate(ranges):
        if part:
            address = _address(buffer[part.slice])
            channel.reduce(address, address, part.size, kind, getattr(module, _OPS[op]), root, stream)
    module.groupEnd()
    _finish()


def _exchange_and_reduce(comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str) -> None:
    # NCCL's reductions round 16-bit floats at each partial sum, and lose NaNs in max and min: reduce by cupy kernels.
    check_buffer(buffer)
    check_op(op)
    if comm.size == 1 or buffer.size == 0:
        return
    channel, module, kind, stream = _prepared(comm, buffer.view("uint8"))
    local_range = ranges[comm.rank]
    received = scratch("nccl", local_range.size * comm.size, buffer.dtype, buffer)  # (ranks * size of the local range,)
    rows = [received[local_range.size * rank : local_range.size * (rank + 1)] for rank in range(comm.size)]
    module.groupStart()
    for peer, (part, row) in enumerate(zip(ranges, rows, strict=True)):
        if part:
            channel.send(_address(buffer[part.slice]), part.size * buffer.itemsize, kind, peer, stream)
        if local_range:
            channel.recv(_address(row), row.nbytes, kind, peer, stream)
    module.groupEnd()
    reduce_rows(rows, buffer[local_range.slice], op)  # after the group, on the same stream
    _finish()


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """All-gather a GPU ``buffer`` by NCCL. Rank r contributes ``buffer[ranges[r]]``. Collective over ``comm``."""
    check_buffer(buffer)
    if comm.size == 1 or buffer.size == 0:
        return
    # Only bits are copied: gather any dtype as bytes.
    channel, module, kind, stream = _prepared(comm, buffer.view("uint8"))
    module.groupStart()
    for root, part in enumerate(ranges):
        if part:
            piece = buffer[part.slice]
            channel.broadcast(_address(piece), _address(piece), piece.nbytes, kind, root, stream)
    module.groupEnd()
    _finish()


def _prepared(comm: Communicator, buffer: Array) -> tuple[Any, Any, int, int]:
    if not is_device(buffer):
        raise BufferHandoverError("NCCL needs a buffer in GPU memory, got a buffer on the host; use another algorithm")
    name = name_of(buffer.dtype)
    if name not in _DTYPES:
        raise BufferHandoverError(f"NCCL cannot reduce {name} arrays; use {', '.join(_DTYPES)}, or another algorithm")
    channel, module = communicator(comm), device.nccl()
    return channel, module, int(getattr(module, f"NCCL_{name.upper()}")), int(device.current_stream().ptr)


@contextmanager
def enqueuing(allowed: bool = True) -> Iterator[None]:
    """Context manager: this thread's NCCL calls return once enqueued. If ``allowed`` is False, the calls wait."""
    before = _here.enqueued
    _here.enqueued = 0 if allowed else None
    try:
        yield
    finally:
        _here.enqueued = before


def enqueued() -> int:
    """Return the number of NCCL calls that this thread has enqueued in the current `enqueuing` block. Local."""
    return _here.enqueued or 0


def _finish() -> None:
    if _here.enqueued is None:
        device.produced()
    else:
        _here.enqueued += 1


def _address(buffer: Any) -> int:
    return int(buffer.data.ptr)


def communicator(comm: Communicator) -> Any:
    """Return the NCCL communicator object for ``comm``. The first call creates it, and is collective."""
    channel = _communicators.get(comm)
    if channel is None:
        reason = refusal(comm)
        if reason:
            raise MissingCapabilityError(reason)
        module = device.nccl()
        unique_id = comm.broadcast_object(module.get_unique_id() if comm.rank == 0 else None)
        channel = _communicators[comm] = module.NcclCommunicator(comm.size, unique_id, comm.rank)
    return channel


def refusal(comm: Communicator) -> str:
    """Return the reason why NCCL cannot be used on ``comm``, or "", equal on all ranks. Collective over ``comm``."""
    reason, bus_id, version = "", "", 0
    try:
        module = device.nccl()
        version, bus_id = int(module.get_version()), device.bus_id()
    except MissingCapabilityError as error:
        reason = f"rank {comm.rank}: {error}"
    allowed = version >= SEVERAL_RANKS_A_GPU and os.environ.get(SEVERAL_RANKS_VARIABLE) == "1"
    answers = comm.allgather_object((reason, (comm.nodes().index, bus_id), version, allowed))
    for text, _, _, _ in answers:
        if text:
            return str(text)
    (node, bus_id), ranks = Counter(where for _, where, _, _ in answers).most_common(1)[0]
    if ranks == 1 or all(may for *_, may in answers):
        return ""
    oldest = min(number for _, _, number, _ in answers)
    cure = (
        f"set {SEVERAL_RANKS_VARIABLE}=1"
        if oldest >= SEVERAL_RANKS_A_GPU
        else "give each rank a GPU of its own, or install nvidia-nccl-cu12 (or -cu13) >= 2.30"
    )
    version_text = f"{oldest // 10000}.{oldest // 100 % 100}.{oldest % 100}"
    return (
        f"{ranks} ranks share GPU {bus_id} of node {node}, but the installed and configured NCCL {version_text} "
        f"takes one rank a GPU; {cure}, or choose another communication.algorithm than nccl"
    )


def release(comm: Communicator) -> None:
    """Destroy the NCCL communicator of ``comm``, if there is one. Collective over ``comm``."""
    channel = _communicators.pop(comm, None)
    if channel is not None:
        channel.destroy()
