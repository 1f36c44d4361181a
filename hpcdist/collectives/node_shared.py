"""Allreduce through memory that the ranks of a node share: no message but the barriers.

Every rank copies its buffer where all can read it, sums one slice over all ranks, and copies the other slices of the
result out. With memory bandwidth 1/μ (bytes a second of one rank) and barriers of α log2(p):

    2 (α log2(p)) + n μ (copy in) + n μ (sum p slices of n/p) + n μ (copy out)    for each piece

Each element is summed in rank order by one rank, and its bits are copied: all ranks end with the same bits.

A buffer goes through in pieces, so that the shared memory is small and fixed. Two halves of it take turns: before a
half is written again, all ranks have passed the first barrier of the other half's piece, so they have copied this half
out.
"""

import weakref
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.collectives import workspace
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import UsageError

PIECE_BYTES: Final = 1 << 20  # per rank and half: large beside a barrier, small beside the cache (empirical)


@dataclass
class _Shared:
    block: SharedBlock
    turn: int = 0

    def next_half(self) -> list[np.ndarray]:
        """Return, as bytes of each rank, the half whose turn it is."""
        self.turn ^= 1
        return [view[self.turn * PIECE_BYTES :][:PIECE_BYTES] for view in self.block.views]


_shared: weakref.WeakKeyDictionary[Communicator, _Shared] = weakref.WeakKeyDictionary()


def node_shared_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``, all of it on one node.

    The shared memory is taken at the first call and kept for ``comm``. Raises UsageError over several nodes,
    MissingCapabilityError where no memory can be shared.
    """
    combine = combiner(buffer, op)
    if comm.size == 1:
        return
    shared = _shared_of(comm)
    host = backend.to_host(buffer)
    for piece in cut(Range(0, host.size), PIECE_BYTES // host.itemsize):
        views = [half.view(host.dtype)[: piece.size] for half in shared.next_half()]
        _reduce_piece(comm, host[piece.slice], views, combine if host is buffer else combiner(host, op))
    if host is not buffer:
        buffer[...] = backend.namespace(buffer).asarray(host)


def _reduce_piece(comm: Communicator, data: np.ndarray, views: list[np.ndarray], combine: Combine) -> None:
    """Reduce ``data`` over the ranks; ``views`` hold as many elements of each."""
    slices = [part.slice for part in split(data.size, comm.size, data.itemsize)]
    own = slices[comm.rank]
    # Nobody else reads the own slice before the sum is in it, so it takes the sum, and the operand stays in `data`.
    views[comm.rank][: own.start] = data[: own.start]
    views[comm.rank][own.stop :] = data[own.stop :]
    comm.barrier()
    operands = [data[own] if rank == comm.rank else view[own] for rank, view in enumerate(views)]
    total = views[comm.rank][own]
    combine(operands[0], operands[1], total)
    for operand in operands[2:]:
        combine(total, operand, total)
    comm.barrier()
    for view, part in zip(views, slices, strict=True):
        data[part] = view[part]


def _shared_of(comm: Communicator) -> _Shared:
    found = _shared.get(comm)
    if found is None:
        nodes = comm.nodes()
        if nodes.count > 1:
            raise UsageError(
                f"node_shared needs all ranks on one node, and the {comm.size} ranks of {comm.name} are on "
                f"{nodes.count}; choose hierarchical, or another algorithm that sends messages"
            )
        found = _shared[comm] = _Shared(comm.shared(2 * PIECE_BYTES))
        workspace.count(found.block.views[comm.rank])
    return found


def release(comm: Communicator) -> None:
    """Give back what is shared for ``comm``, if anything is. Collective over ``comm``."""
    found = _shared.pop(comm, None)
    if found is not None:
        found.block.close()
