"""Route of an allreduce on a GPU buffer, and staging through pinned host memory.

Routes by algorithm:

    nccl          NCCL
    node_shared   kernels that read peer GPU memory (`peer_memory`), if IPC handles can be opened
    others        device pointers passed to MPI, if the probe of `comm.mpi.cuda_aware` succeeded
    otherwise     the host algorithm on pinned memory, in segments

Copies of staged segments overlap with the reduction. With n bytes, link bandwidth B, time T of the algorithm and k
segments, staging takes about max(n/B, T) + 2 n/(k B) instead of 2 n/B + T.
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
from hpcdist.comm.handover import MESSAGES

ReduceScatter = Callable[[Communicator, np.ndarray, Sequence[Range], str], None]
AllGather = Callable[[Communicator, np.ndarray, Sequence[Range]], None]

SEGMENT_BYTES: Final = 8 << 20  # large compared with message and copy latency (to be measured on a GPU)
BLOCKS: Final = 3  # one block is being filled, one reduced, one emptied


def staged_allreduce(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce a GPU ``buffer`` in place by ``function``, an allreduce of host memory. Collective over ``comm``."""
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
            # The event of the copy back also follows the kernels that produced the buffer.
            following = segments[index + BLOCKS]
            filled.append(_fill(buffer[following], blocks[index % BLOCKS], emptied))


def _fill(source: Array, block: np.ndarray, after: Event) -> Event:
    return staging.begin_to_host(source, block[: source.size], after)


def staged_reduce_scatter(
    function: ReduceScatter, comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum"
) -> None:
    """Reduce-scatter a GPU ``buffer`` by ``function`` on the host. Rank r gets the range ``shares[r]``. Collective."""
    host = staging.to_host(buffer)
    function(comm, host, shares, op)
    share = shares[comm.rank]
    if share:
        staging.to_device(host[share.slice], buffer[share.slice])


def staged_all_gather(function: AllGather, comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
    """All-gather a GPU ``buffer`` by ``function`` on the host. Rank r provides the range ``shares[r]``. Collective."""
    host = staging.lease(buffer.size, buffer.dtype)
    share = shares[comm.rank]
    if share:
        staging.begin_to_host(buffer[share.slice], host[share.slice]).synchronize()
    function(comm, host, shares)
    staging.to_device(host, buffer)


NCCL: Final = "nccl"
# MPI operations that algorithms need; all other algorithms only send messages.
_ASKS: Final = {"native": "allreduce", "all_to_all": "all_to_all"}
# Algorithms that always work in host memory.
_ON_HOST: Final = ("hierarchical",)


def route(algorithm: str, function: AllreduceFunction) -> AllreduceFunction:
    """Return the allreduce ``algorithm`` for GPU buffers. ``function``: the same algorithm for host buffers. Local."""
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
    # The MPI operators that propagate NaN run on the host (`comm.mpi.communicator`).
    if takes_pointers(comm, asks) and not (asks == "allreduce" and may_lose_nan(buffer, op)):
        function(comm, buffer, op)
    else:
        staged_allreduce(function, comm, buffer, op)


def takes_pointers(comm: Communicator, operation: str) -> bool:
    """Return True if MPI accepts pointers to GPU memory for ``operation``, such as "allreduce", on ``comm``. Local."""
    return isinstance(comm, Communicator) and operation in comm.handover.pointers


def release(comm: Communicator) -> None:
    """Free the shared GPU memory and the NCCL communicator of ``comm``. Collective over ``comm``."""
    peer_memory.release(comm)
    nccl.release(comm)
