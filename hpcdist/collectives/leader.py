"""One leader for a node: the sum of its ranks to the leader, and the leader's buffer to them.

For strategies in which one rank of a node deals with the others (a parameter server, a gossip partner). With n bytes on
m ranks, each way

    (m-1) α + (m-1)/m n β + α + (m-1)/m n β

the second half through the leader alone.
"""

from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.ring import all_gather, reduce_scatter
from hpcdist.comm.communicator import Communicator

LEADER: Final = 0


def reduce_to_leader(intra: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` to rank 0 in place; on the others it is undefined afterwards. Collective over ``intra``."""
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    reduce_scatter(intra, buffer, chunks, op)
    _gather(intra, buffer, chunks)


def spread_from_leader(intra: Communicator, buffer: Array) -> None:
    """Give the ``buffer`` of rank 0 to all, in place. Collective over ``intra``."""
    # To send n/m to each and have them pass it on is cheaper than to send n to each.
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    _scatter(intra, buffer, chunks)
    all_gather(intra, buffer, chunks)


def _gather(comm: Communicator, buffer: Array, chunks: Sequence[Range]) -> None:
    """Bring the chunk of each rank to the leader."""
    if comm.rank != LEADER:
        comm.send(buffer[chunks[comm.rank].slice], LEADER)
        return
    requests = [comm.irecv(buffer[chunks[peer].slice], peer) for peer in range(1, comm.size)]
    for request in requests:
        request.wait()


def _scatter(comm: Communicator, buffer: Array, chunks: Sequence[Range]) -> None:
    """Bring the chunk of each rank from the leader."""
    if comm.rank != LEADER:
        comm.recv(buffer[chunks[comm.rank].slice], LEADER)
        return
    requests = [comm.isend(buffer[chunks[peer].slice], peer) for peer in range(1, comm.size)]
    for request in requests:
        request.wait()
