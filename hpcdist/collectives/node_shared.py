"""Collectives through memory that the ranks of a node share: no message, no barrier of the MPI library.

With n bytes on p ranks, memory bandwidth 1/μ of a rank, and flags that take σ to be seen:

    buffers from `allocate`     2 σ + 2 n μ             the owner of a range reads it p times and writes it p times
    any other buffer            about 2 σ a piece + 2 n μ, and as much between the caches for the copies in and out
    small buffers               σ + p n μ               everybody sums everything

An MPI library cannot do the first: its buffers are the caller's, and the other ranks cannot see them. Gradients that
lie in `allocate` are summed where backward left them. Each element is summed in the order of the ranks, by every rank
that needs it or by one whose bits are copied: all ways give all ranks the same bits.
"""

import weakref
from collections.abc import Sequence

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import node_words
from hpcdist.collectives.low_precision import multiply
from hpcdist.collectives.node_memory import NodeMemory
from hpcdist.collectives.pieces import check_ranges
from hpcdist.collectives.reduction import check_buffer, check_op
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import CommunicationError, MissingCapabilityError, UsageError

_memory: weakref.WeakKeyDictionary[Communicator, NodeMemory] = weakref.WeakKeyDictionary()
_inside: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # whose node holds arrays


def node_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
    """Reduce ``buffer`` times ``scale`` in place to the same bits on every rank. Collective over ``comm``, on one node.

    Any dtype, 16-bit floats included: those are summed in float32 and rounded once. The shared memory is taken at the
    first call and kept for ``comm``. Raises UsageError over several nodes, MissingCapabilityError where no memory can
    be shared, CommunicationError when the ranks bring different buffers or one of them has died; at the first call,
    which sends messages, the MPI library tells of a death by an error of its own (see `comm.deaths`).
    """
    check_buffer(buffer)
    check_op(op)
    _check_scale(buffer, scale)
    if comm.size == 1:
        if scale != 1.0:
            multiply(buffer, scale)
    else:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, op, scale, None, node_words.REDUCE | node_words.GATHER)
        if host is not buffer:
            buffer[...] = backend.namespace(buffer).asarray(host)


def allreduce_into(
    comm: Communicator, buffer: np.ndarray, result: np.ndarray, op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce ``buffer`` times ``scale`` into ``result``, one array for all. Collective over ``comm``, on one node.

    ``result`` is memory from `allocate_common`, of the size and dtype of ``buffer``, which keeps its values. Written
    once instead of once a rank: (p+1) n bytes instead of 2 p n. No rank may still read it when another one calls.
    """
    check_buffer(buffer)
    check_buffer(result)
    check_op(op)
    _check_scale(buffer, scale)
    memory = _shared_memory_of(comm) if comm.size > 1 else None
    if result.shape != buffer.shape or result.dtype != buffer.dtype:
        raise UsageError(
            f"the result has {result.size} {name_of(result.dtype)}, the buffer {buffer.size} {name_of(buffer.dtype)}; "
            "they must be alike"
        )
    if memory is None:
        result[...] = buffer
        multiply(result, scale)
        return
    address = result.ctypes.data
    if not memory.is_common(address, result.nbytes):
        raise UsageError("the result does not lie in memory of node_shared.allocate_common(comm, ...)")
    _carry_out(comm, memory, buffer, op, scale, None, node_words.REDUCE | node_words.ELSEWHERE, address)


def reduce_scatter(comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum") -> None:
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result. Collective over ``comm``, on one node.

    The rest is undefined. ``ranges`` are one for each rank, the same on every rank, disjoint; any may be empty.
    """
    check_buffer(buffer)
    check_op(op)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, op, 1.0, ranges, node_words.REDUCE)
        if host is not buffer:
            own = ranges[comm.rank].slice
            buffer[own] = backend.namespace(buffer).asarray(host[own])


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges. Collective over ``comm``, on one node."""
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    if comm.size > 1:
        host = backend.to_host(buffer)
        _carry_out(comm, _shared_memory_of(comm), host, "sum", 1.0, ranges, node_words.GATHER)
        if host is not buffer:
            buffer[...] = backend.namespace(buffer).asarray(host)


def allocate(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Return zeroed memory that the other ranks of the node can read. Collective over ``comm``.

    Collectives over ``comm``, or over its ``nodes().intra`` where it spans nodes, then need no copy of what lies there.
    Every rank asks for the same. Plain memory where nothing can be shared. It is kept until `release`.
    """
    nodes = comm.nodes()
    on = comm if nodes.count == 1 else nodes.intra
    memory = None if on.size == 1 else _memory_of(on)
    if memory is None or not memory.is_shared:
        return np.zeros(size, dtype)
    if on is not comm:
        _inside[comm] = on
    return memory.region(on, size * np.dtype(dtype).itemsize).view(dtype)


def allocate_common(comm: Communicator, size: int, dtype: np.dtype) -> np.ndarray:
    """Return zeroed memory that is one and the same for all ranks. Collective over ``comm``, on one node.

    It is kept until `release`. Raises MissingCapabilityError where nothing can be shared.
    """
    nbytes = size * np.dtype(dtype).itemsize
    if comm.size == 1:
        return np.zeros(size, dtype)
    return _shared_memory_of(comm).common(comm, nbytes).view(dtype)


def is_available(comm: Communicator) -> bool:
    """Whether all ranks of ``comm`` are on one node that lets them share memory. Collective over ``comm``."""
    return comm.size > 1 and comm.nodes().count == 1 and _memory_of(comm).is_shared


def release(comm: Communicator) -> None:
    """Give back what is shared for ``comm``: arrays of `allocate` must not be used again. Collective over ``comm``."""
    for one in (comm, _inside.pop(comm, None)):
        found = None if one is None else _memory.pop(one, None)
        if found is not None:
            found.close()


def _memory_of(comm: Communicator) -> NodeMemory:
    found = _memory.get(comm)
    if found is None:
        if comm.nodes().count > 1:
            raise UsageError(
                f"node_shared needs all ranks on one node, and the {comm.size} ranks of {comm.name} are on "
                f"{comm.nodes().count}; choose hierarchical, or another algorithm that sends messages"
            )
        found = _memory[comm] = NodeMemory(comm)
    return found


def _shared_memory_of(comm: Communicator) -> NodeMemory:
    memory = _memory.get(comm) or _memory_of(comm)
    if not memory.is_shared:
        raise MissingCapabilityError(
            f"the {comm.size} ranks of {comm.name} cannot share memory (neither an anonymous mapping nor an MPI "
            "window: see the free memory, /dev/shm and the containers' process namespaces); choose another "
            "communication.algorithm than node_shared"
        )
    return memory


def _check_scale(buffer: Array, scale: float) -> None:
    if scale != 1.0 and buffer.dtype.kind in "iu":
        raise UsageError(f"{name_of(buffer.dtype)} cannot be multiplied by {scale!r}; leave scale = 1, or pass floats")


def _carry_out(
    comm: Communicator,
    memory: NodeMemory,
    buffer: np.ndarray,
    op: str,
    scale: float,
    ranges: Sequence[Range] | None,
    mode: int,
    target: int = 0,
) -> None:
    """Carry out one collective on a host buffer."""
    if not memory.run(buffer, op, float(scale), mode, ranges, target):
        brought = memory.brought()
        raise CommunicationError(
            f"the ranks of {comm.name} brought different buffers: "
            + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(brought))
        )
