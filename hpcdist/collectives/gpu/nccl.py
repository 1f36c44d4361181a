"""NCCL collectives on buffers of GPUs: the library selects ring or tree, over NVLink or the network.

NCCL's communicator is made at the first call on a communicator of hpcdist: rank 0 draws an id, which is broadcast by
MPI. A call is made on the current stream, so it comes behind the kernels that produced the buffer and before those
launched later; the host then waits for the event behind it, so that the watchdog names a call that a rank has
skipped. `enqueuing` leaves that to the caller.

NCCL computes each element at one place and sends its bits on: all ranks end with the same bits. Shares need not be of
one size, which NCCL's own reduce-scatter requires: each half is a group of p reductions, or broadcasts, one a share.

NCCL would round 16-bit floats at every partial sum. They are exchanged as they are, float16 and bfloat16 as bytes, in a
group of sends and receives; the rank of a share sums it in float32 and rounds once, and the allreduce gathers that.
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

SEVERAL_RANKS_A_GPU: Final = 23000  # NCCL 2.30, as get_version gives it
SEVERAL_RANKS_VARIABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
_OPS: Final = {"sum": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_DTYPES: Final = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")


class _Local(threading.local):
    """Number of calls of this thread that are enqueued, None where each is waited for."""

    def __init__(self) -> None:
        self.enqueued: int | None = None


_here: Final = _Local()
_communicators: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def nccl_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer``, on a GPU, in place to the same bits on every rank. Collective over ``comm``.

    Raises MissingCapabilityError, with the reason and on every rank, where NCCL is missing or would refuse the GPUs.
    """
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
    """Reduce ``buffer`` in place; afterwards the own range is defined, the rest not. Collective over ``comm``."""
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
    """Reduce this rank's range of ``buffer`` in place by kernels of cupy. Collective over ``comm``.

    Used for 16-bit floats, and for the maximum and minimum of floats, in which NCCL may lose NaN.
    """
    check_buffer(buffer)
    check_op(op)
    if comm.size == 1 or buffer.size == 0:
        return
    channel, module, kind, stream = _prepared(comm, buffer.view("uint8"))
    own = ranges[comm.rank]
    received = scratch("nccl", own.size * comm.size, buffer.dtype, buffer)  # (ranks * own range,)
    rows = [received[own.size * rank : own.size * (rank + 1)] for rank in range(comm.size)]
    module.groupStart()
    for peer, (part, row) in enumerate(zip(ranges, rows, strict=True)):
        if part:
            channel.send(_address(buffer[part.slice]), part.size * buffer.itemsize, kind, peer, stream)
        if own:
            channel.recv(_address(row), row.nbytes, kind, peer, stream)
    module.groupEnd()
    reduce_rows(rows, buffer[own.slice], op)  # behind the group, on the same stream
    _finish()


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Give the own range of ``buffer`` to all and fill the others, in place. Collective over ``comm``."""
    check_buffer(buffer)
    if comm.size == 1 or buffer.size == 0:
        return
    # Bits are gathered, of any dtype: as bytes.
    channel, module, kind, stream = _prepared(comm, buffer.view("uint8"))
    module.groupStart()
    for root, part in enumerate(ranges):
        if part:
            piece = buffer[part.slice]
            channel.broadcast(_address(piece), _address(piece), piece.nbytes, kind, root, stream)
    module.groupEnd()
    _finish()


def _prepared(comm: Communicator, buffer: Array) -> tuple[Any, Any, int, int]:
    """Return the communicator, NCCL, its number of the buffer's dtype, and the current stream. Collective at first.

    Raises BufferHandoverError, and MissingCapabilityError as `communicator` does.
    """
    if not is_device(buffer):
        raise BufferHandoverError("NCCL works on memory of a GPU, and the buffer is on the host; use another algorithm")
    name = name_of(buffer.dtype)
    if name not in _DTYPES:
        raise BufferHandoverError(f"NCCL reduces no {name}; choose one of {', '.join(_DTYPES)}, or another algorithm")
    channel, module = communicator(comm), device.nccl()
    return channel, module, int(getattr(module, f"NCCL_{name.upper()}")), int(device.current_stream().ptr)


@contextmanager
def enqueuing(allowed: bool = True) -> Iterator[None]:
    """Let calls of this thread return when they are enqueued; not ``allowed``: each is waited for (local)."""
    before = _here.enqueued
    _here.enqueued = 0 if allowed else None
    try:
        yield
    finally:
        _here.enqueued = before


def enqueued() -> int:
    """Return the number of calls of this thread, inside of `enqueuing`, that nobody has waited for (local)."""
    return _here.enqueued or 0


def _finish() -> None:
    """Wait for what is on the current stream, unless the caller of this thread's calls does."""
    if _here.enqueued is None:
        device.produced()
    else:
        _here.enqueued += 1


def _address(buffer: Any) -> int:
    return int(buffer.data.ptr)


def communicator(comm: Communicator) -> Any:
    """Return the NCCL communicator of ``comm``, made at the first call. Collective at the first call."""
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
    """Return why NCCL cannot serve ``comm``, the same on every rank; "" where it can. Collective.

    Before 2.30 it refuses two ranks on one GPU, afterwards unless NCCL_MULTI_RANK_GPU_ENABLE=1: it would say "invalid
    usage", and on some ranks only, while the others wait.
    """
    reason, place, version = "", "", 0
    try:
        module = device.nccl()
        version, place = int(module.get_version()), device.bus_id()
    except MissingCapabilityError as error:
        reason = f"rank {comm.rank}: {error}"
    allowed = version >= SEVERAL_RANKS_A_GPU and os.environ.get(SEVERAL_RANKS_VARIABLE) == "1"
    answers = comm.allgather_object((reason, (comm.nodes().index, place), version, allowed))
    for text, _, _, _ in answers:
        if text:
            return str(text)
    (node, place), ranks = Counter(where for _, where, _, _ in answers).most_common(1)[0]
    if ranks == 1 or all(may for *_, may in answers):
        return ""
    oldest = min(number for _, _, number, _ in answers)
    cure = (
        f"set {SEVERAL_RANKS_VARIABLE}=1"
        if oldest >= SEVERAL_RANKS_A_GPU
        else "give each rank a GPU of its own, or install nvidia-nccl-cu12 (or -cu13) >= 2.30"
    )
    return (
        f"{ranks} ranks share GPU {place} of node {node}, and NCCL {_readable(oldest)}, as it is set up, takes one "
        f"rank a GPU; {cure}, or choose another communication.algorithm than nccl"
    )


def _readable(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def release(comm: Communicator) -> None:
    """Give the NCCL communicator of ``comm`` back, if there is one. Collective over ``comm``."""
    channel = _communicators.pop(comm, None)
    if channel is not None:
        channel.destroy()
