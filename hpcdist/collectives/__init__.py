"""Collective algorithms: functions of a communicator and a buffer, one file each.

`allreduce` is what strategies call. The algorithms behind its names can be called by themselves, and so can the two
halves of the ring: `reduce_scatter` and `all_gather`. `SHARDED` has the two halves by algorithm, for shards.

Costs in the docstrings are for n bytes on p ranks: α is the latency of a message in s, β the time on the wire in
s/byte, γ the time to reduce in s/byte.
"""

from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import is_16bit_float, name_of
from hpcdist.collectives import node_shared, workspace
from hpcdist.collectives.all_to_all import all_to_all_allreduce
from hpcdist.collectives.hierarchical import hierarchical, hierarchical_allreduce
from hpcdist.collectives.low_precision import widened_allreduce
from hpcdist.collectives.native import native_allreduce
from hpcdist.collectives.node_shared import node_shared_allreduce
from hpcdist.collectives.rabenseifner import rabenseifner_allreduce
from hpcdist.collectives.recursive_doubling import recursive_doubling_allreduce
from hpcdist.collectives.reduction import AllreduceFunction, check_buffer
from hpcdist.collectives.ring import all_gather, reduce_scatter, ring_allreduce
from hpcdist.collectives.sharded import SHARDED, Sharding
from hpcdist.collectives.workspace import account
from hpcdist.comm.communicator import REDUCTIONS, Communicator
from hpcdist.errors import UsageError

__all__ = [
    "ALLREDUCE",
    "SHARDED",
    "AllreduceFunction",
    "Sharding",
    "account",
    "all_gather",
    "all_to_all_allreduce",
    "allreduce",
    "hierarchical",
    "hierarchical_allreduce",
    "native_allreduce",
    "node_shared_allreduce",
    "rabenseifner_allreduce",
    "recursive_doubling_allreduce",
    "reduce_scatter",
    "release",
    "ring_allreduce",
]

ALLREDUCE: Final[dict[str, AllreduceFunction]] = {
    "native": native_allreduce,
    "ring": ring_allreduce,
    "recursive_doubling": recursive_doubling_allreduce,
    "rabenseifner": rabenseifner_allreduce,
    "node_shared": node_shared_allreduce,
    "hierarchical": hierarchical_allreduce,
    "all_to_all": all_to_all_allreduce,
}

_KEEPS_16_BITS: Final = ("all_to_all",)  # no partial sum travels, so none is rounded


def allreduce(comm: Communicator, buffer: Array, algorithm: str = "native", op: str = "sum") -> None:
    """Reduce ``buffer`` over all ranks in place; afterwards all hold the same bits. Collective over ``comm``.

    ``buffer`` is 1-D, contiguous, of the same size and dtype on every rank; ``op`` is "sum", "max" or "min". 16-bit
    floats are summed in float32 and rounded once: all algorithms but "all_to_all" send float32 for them. Raises
    UsageError for an unknown algorithm or op, BufferHandoverError for a buffer that cannot travel.
    """
    function = ALLREDUCE.get(algorithm)
    if function is None:
        raise UsageError(f"allreduce algorithm {algorithm!r} is unknown; choose one of {', '.join(ALLREDUCE)}")
    check_buffer(buffer)
    if comm.size == 1 and op in REDUCTIONS:
        return
    # One event over the messages within: a rank that skips the call is then named, whatever the algorithm.
    token = comm.events.begin(comm.name, f"{algorithm}_allreduce", name_of(buffer.dtype), buffer.size, 0, -1, 0)
    if is_16bit_float(buffer.dtype) and algorithm not in _KEEPS_16_BITS:
        widened_allreduce(function, comm, buffer, op)
    else:
        function(comm, buffer, op)
    comm.events.end(token)


def release(comm: Communicator) -> None:
    """Give back the scratch memory of this thread and what was shared for ``comm``. Collective over ``comm``.

    Only needed where the memory is wanted for something else: later calls take it again.
    """
    node_shared.release(comm)
    workspace.release()
