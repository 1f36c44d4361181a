"""Route of an allreduce on a GPU buffer, and staging through pinned host memory where it is needed.

The route is decided for each algorithm by what was probed, never by a version:

    nccl          NCCL's own kernels and wires
    node_shared   kernels that read the GPUs of the other ranks (`peer_memory`), where handles can be opened
    the others    device pointers handed to MPI, where the probe of `comm.mpi.cuda_aware` saw their operation work
    otherwise     the algorithm on the host, behind pinned memory, in segments; pageable memory where the system
                  pins none

With device pointers the sums of a message algorithm are made by kernels of the GPU, on the current stream; the
hand-over waits for an event behind them before the result is sent on.

Staged, a segment is copied to pinned memory, reduced there by an algorithm of the host, and copied back:

    device -> host   0 1 2 3 . .            of n bytes over a link of bandwidth B, with the algorithm's own time T,
    reduce           . 0 1 2 3 .            about  max(n/B, T) + 2 n/(k B)  for k segments instead of  2 n/B + T
    host -> device   . . 0 1 2 3

All copies to the host come behind one event of the producing stream, on a stream of their own. Copies back are made
on the current stream: kernels launched later see the result, and no host waits for it. The pinned memory is that of a
few segments, so a copy to the host also waits until its block has been copied back.

The halves of an allreduce, whose shares are cut already, are copied whole.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.gpu.device import Event
from hpcdist.arrays.ranges import Range, cut
from hpcdist.collectives.gpu import nccl, peer_memory
from hpcdist.collectives.reduction import AllreduceFunction, may_lose_nan
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.handover import MESSAGES

ReduceScatter = Callable[[Communicator, np.ndarray, Sequence[Range], str], None]
AllGather = Callable[[Communicator, np.ndarray, Sequence[Range]], None]

SEGMENT_BYTES: Final = 8 << 20  # large beside a message and the start of a copy (to be measured on a GPU)
BLOCKS: Final = 3  # one is filled, one is reduced, one is emptied


def staged_allreduce(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer``, on a GPU, in place by ``function`` on copies in pinned memory. Collective over ``comm``."""
    produced = device.record()
    segments = [part.slice for part in cut(Range(0, buffer.size), max(1, SEGMENT_BYTES // buffer.itemsize))]
    size = min(buffer.size, max(1, SEGMENT_BYTES // buffer.itemsize))
    blocks = [staging.lease(size, buffer.dtype) for _ in range(min(BLOCKS, len(segments)))]
    filled = [_fill(buffer[part], block, produced) for part, block in zip(segments, blocks, strict=False)]
    for index, part in enumerate(segments):
        block = blocks[index % BLOCKS][: part.stop - part.start]
        filled[index].synchronize()
        function(comm, block, op)
        emptied = staging.to_device(block, buffer[part])
        if index + BLOCKS < len(segments):
            # The event of the copy back is on the current stream, behind the kernels that produced the buffer as well.
            following = segments[index + BLOCKS]
            filled.append(_fill(buffer[following], blocks[index % BLOCKS], emptied))


def _fill(source: Array, block: np.ndarray, after: Event) -> Event:
    """Begin to copy ``source`` into ``block`` behind the event ``after``; return the event behind the copy (local)."""
    return staging.begin_to_host(source, block[: source.size], after)


def staged_reduce_scatter(
    function: ReduceScatter, comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum"
) -> None:
    """Reduce ``buffer``, on a GPU, by ``function`` on a copy in pinned memory. Collective over ``comm``.

    The own share comes back; the rest of ``buffer`` stays as it was.
    """
    host = staging.to_host(buffer)
    function(comm, host, shares, op)
    own = shares[comm.rank]
    if own:
        staging.to_device(host[own.slice], buffer[own.slice])


def staged_all_gather(function: AllGather, comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
    """Fill ``buffer``, on a GPU, by ``function`` on pinned memory that has its own share. Collective over ``comm``."""
    host = staging.lease(buffer.size, buffer.dtype)
    own = shares[comm.rank]
    if own:
        staging.begin_to_host(buffer[own.slice], host[own.slice]).synchronize()
    function(comm, host, shares)
    staging.to_device(host, buffer)


NCCL: Final = "nccl"
# Operation of the message layer that an algorithm needs; all others of this package send messages only.
_ASKS: Final = {"native": "allreduce", "all_to_all": "all_to_all"}
# These work in memory of the host whatever MPI takes.
_ON_HOST: Final = ("hierarchical",)


def route(algorithm: str, function: AllreduceFunction) -> AllreduceFunction:
    """Return the form for GPU buffers of ``algorithm``, whose form for the host is ``function`` (local)."""
    if algorithm == NCCL:
        return nccl.nccl_allreduce
    if algorithm == "node_shared":
        return functools.partial(_shared, function)
    if algorithm in _ON_HOST:
        return functools.partial(staged_allreduce, function)
    return functools.partial(_pointers, function, _ASKS.get(algorithm, MESSAGES))


def _shared(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    if peer_memory.refusal(comm):
        staged_allreduce(function, comm, buffer, op)
    else:
        peer_memory.device_shared_allreduce(comm, buffer, op)


def _pointers(function: AllreduceFunction, asks: str, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    # The operators that propagate NaN run on the host (`comm.mpi.communicator`).
    if takes_pointers(comm, asks) and not (asks == "allreduce" and may_lose_nan(buffer, op)):
        function(comm, buffer, op)
    else:
        staged_allreduce(function, comm, buffer, op)


def takes_pointers(comm: Communicator, operation: str) -> bool:
    """Whether MPI takes device pointers of ``comm`` in ``operation`` (local)."""
    return isinstance(comm, Endpoint) and operation in comm.handover.pointers


def release(comm: Communicator) -> None:
    """Give back peer memory and the NCCL communicator of ``comm``. Collective over ``comm``."""
    peer_memory.release(comm)
    nccl.release(comm)
