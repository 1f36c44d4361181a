"""Hierarchical allreduce: much traffic inside the nodes, little between them.

With m ranks on each of k nodes, rank i of every node owns chunk i:

    reduce_scatter inside the node,  allreduce of the own chunk between the nodes,  all_gather inside the node

    inside   2 (m-1) α + 2 (m-1)/m n β + (m-1)/m n γ
    between  2 (k-1) α + 2 (k-1)/k (n/m) β + (k-1)/k (n/m) γ

Between nodes a rank sends 1/m of what a flat ring would, and all ranks of a node use the network at once. Where nodes
have unequal numbers of ranks, chunks of one node are not those of another, and one leader per node speaks for it: n
instead of n/m bytes through the leader. The first form is the 2D torus of H. Mikami et al., arXiv:1811.05233 (2018),
the second that of X. Jia et al., arXiv:1807.11205 (2018).

All ranks end with the same bits: a ring's result is the same on its members, and is handed on unchanged.
"""

from collections.abc import Sequence

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import combiner
from hpcdist.collectives.ring import all_gather, reduce_scatter, ring_allreduce
from hpcdist.comm.communicator import Communicator

LEADER = 0


def hierarchical_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``, which is cut by node."""
    combiner(buffer, op)  # refuse before the first split, on any number of ranks
    nodes = comm.nodes()
    if nodes.uniform:
        hierarchical(nodes.intra, nodes.peers, buffer, op)
    else:
        leader_allreduce(nodes.intra, nodes.leaders, buffer, op)


def hierarchical(intra: Communicator, inter: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place over the product of ``intra`` and ``inter``. Collective over both.

    Every ``intra`` must have the same size, and ``inter`` must join the ranks of equal number in their ``intra``.
    """
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    reduce_scatter(intra, buffer, chunks, op)
    ring_allreduce(inter, buffer[chunks[intra.rank].slice], op)
    all_gather(intra, buffer, chunks)


def leader_allreduce(intra: Communicator, leaders: Communicator | None, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place over all ranks of all ``intra``, of any sizes. Collective over both.

    ``leaders`` joins rank 0 of every ``intra`` and is None on the others.
    """
    reduce_to_leader(intra, buffer, op)
    if leaders is not None:
        ring_allreduce(leaders, buffer, op)
    spread_from_leader(intra, buffer)


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
