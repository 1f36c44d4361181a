"""Which way a buffer on a GPU takes: decided for each algorithm by what was found out, never by a version.

    nccl          NCCL's own kernels and wires
    node_shared   kernels that read the GPUs of the other ranks (`device_shared`), where handles can be opened
    the others    device pointers handed to MPI, where the probe of `comm.cuda_aware` saw their operation work
    otherwise     the algorithm on the host, behind pinned memory, in segments (`staged`); pageable memory where the
                  system pins none

With device pointers the sums of a message algorithm are made by kernels of the GPU, on the current stream; the
hand-over waits for an event behind them before the result is sent on.
"""

import functools
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.collectives import device_shared, nccl
from hpcdist.collectives.native import native_allreduce
from hpcdist.collectives.reduction import AllreduceFunction
from hpcdist.collectives.staged import staged_allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.handover import MESSAGES

NCCL: Final = "nccl"
# What an algorithm asks of the message layer; all others of this package send messages only.
_ASKS: Final = {"native": "allreduce", "all_to_all": "all_to_all"}
# These work in memory of the host whatever MPI takes.
_ON_HOST: Final = ("hierarchical",)


def route(algorithm: str, function: AllreduceFunction) -> AllreduceFunction:
    """Return what reduces buffers on a GPU for ``algorithm``, whose form for the host is ``function`` (local)."""
    if algorithm == NCCL:
        return nccl.nccl_allreduce
    if algorithm == "node_shared":
        return functools.partial(_shared, function)
    if algorithm in _ON_HOST:
        return functools.partial(staged_allreduce, function)
    return functools.partial(_pointers, function, _ASKS.get(algorithm, MESSAGES))


def on_host(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """What "nccl" does with a buffer of the host, which NCCL does not know: MPI_Allreduce. Collective over ``comm``.

    A run on GPUs has some: norms, losses, votes.
    """
    native_allreduce(comm, buffer, op)


def _shared(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    if device_shared.refusal(comm):
        staged_allreduce(function, comm, buffer, op)
    else:
        device_shared.device_shared_allreduce(comm, buffer, op)


def _pointers(function: AllreduceFunction, asks: str, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    if takes_pointers(comm, asks):
        function(comm, buffer, op)
    else:
        staged_allreduce(function, comm, buffer, op)


def takes_pointers(comm: Communicator, operation: str) -> bool:
    """Whether MPI takes device pointers of ``comm`` in ``operation`` (local)."""
    return isinstance(comm, Endpoint) and operation in comm.handover.pointers


def release(comm: Communicator) -> None:
    """Give back what the ways of this module hold for ``comm``. Collective over ``comm``."""
    device_shared.release(comm)
    nccl.release(comm)
