"""Hierarchical all-to-all of uneven parts, with one message each way between two nodes.

For each pair of nodes, one rank of each node (the local ranks take turns) is the gateway, which sends all parts of its
node for the other node. On N nodes of m ranks, p in all, with n bytes each, a rank sends

    (N-1)/m messages of about m n/N bytes between nodes, instead of p - m messages of n/p bytes
    inside the node: two exchanges of (N-1)/N n bytes, and one of n/N
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, consecutive
from hpcdist.collectives.segments import gather_counts, scratch, wait_all
from hpcdist.comm.communicator import Communicator, Nodes

TAG = 11
Parts = list[list[Array]]  # one list per rank of a node


def hierarchical_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Send ``send[send_ranges[r]]`` to each rank r, and receive ``receive[receive_ranges[r]]`` from it. Collective.

    Parts for another node go through a gateway rank, one per pair of nodes.
    """
    nodes = comm.nodes()
    here = nodes.members[nodes.index]
    own_ranges = [send_ranges[rank] for rank in here], [receive_ranges[rank] for rank in here]
    nodes.intra.all_to_all(send, receive, *own_ranges)
    if nodes.count == 1:
        return
    others = [node for node in range(nodes.count) if node != nodes.index]
    peers = [[node for node in others if node % len(here) == local_rank] for local_rank in range(len(here))]
    mine = peers[nodes.intra.rank]  # the nodes for which this rank is the gateway
    sizes = gather_sizes(nodes.intra, send_ranges, receive_ranges)
    # Inside the node: send the parts for other nodes to their gateways.
    out = [[send[send_ranges[rank].slice] for node in group for rank in nodes.members[node]] for group in peers]
    targets = [rank for node in mine for rank in nodes.members[node]]
    brought = _exchange(nodes.intra, "brought", out, [[int(row[0, rank]) for rank in targets] for row in sizes], send)
    arrived = _between(comm, nodes, mine, brought, sizes, send)
    # Inside the node: send the received parts from the gateways to their receivers.
    sources = [[rank for node in group for rank in nodes.members[node]] for group in peers]
    expected = [[receive_ranges[rank].size for rank in group] for group in sources]
    handed = _exchange(nodes.intra, "handed", arrived, expected, send)
    for ranks, parts in zip(sources, handed, strict=True):
        for rank, part in zip(ranks, parts, strict=True):
            receive[receive_ranges[rank].slice] = part


def _between(
    comm: Communicator, nodes: Nodes, mine: list[int], brought: Parts, sizes: np.ndarray, like: Array
) -> Parts:
    # This rank is the gateway of its node to the nodes ``mine``. ``brought[i]``: arrays from local rank i, one per rank
    # of these nodes. ``like``: array of the same dtype and device. Returns the received arrays of each local rank.
    arrived: Parts = [[] for _ in brought]
    requests, first, opened = [], 0, []
    for node in mine:
        theirs = nodes.members[node]
        peer = theirs[nodes.index % len(theirs)]
        leaving = [parts[first + index] for index in range(len(theirs)) for parts in brought]
        first += len(theirs)
        out = scratch(f"to node {node}", sum(part.size for part in leaving), like.dtype, like)
        _views(out, [part.size for part in leaving], leaving)
        lengths = [int(row[1, rank]) for row in sizes for rank in theirs]
        into = scratch(f"from node {node}", sum(lengths), like.dtype, like)
        requests += [comm.irecv(into, peer, TAG), comm.isend(out, peer, TAG)]
        opened.append((len(theirs), _views(into, lengths)))
    wait_all(requests)
    for count, parts in opened:
        for index, incoming in enumerate(arrived):
            incoming += parts[index * count : (index + 1) * count]
    return arrived


def gather_sizes(comm: Communicator, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> np.ndarray:
    """Return the message sizes in elements: an array indexed [rank, 0 (send) or 1 (receive), peer]. Collective."""
    local_sizes = [[part.size for part in ranges] for ranges in (send_ranges, receive_ranges)]
    return gather_counts(comm, np.array(local_sizes, np.int64))


def _exchange(intra: Communicator, name: str, parts: Parts, expected: list[list[int]], like: Array) -> Parts:
    # ``expected[i]``: sizes of the arrays from local rank i.
    flat, lengths = [part for row in parts for part in row], [size for row in expected for size in row]
    send = scratch(f"{name} out", sum(part.size for part in flat), like.dtype, like)
    _views(send, [part.size for part in flat], flat)
    receive = scratch(f"{name} in", sum(lengths), like.dtype, like)
    sent = consecutive(sum(part.size for part in row) for row in parts)
    intra.all_to_all(send, receive, sent, consecutive(map(sum, expected)))
    views = iter(_views(receive, lengths))
    return [[next(views) for _ in row] for row in expected]


def _views(buffer: Array, sizes: Sequence[int], values: Sequence[Array] = ()) -> list[Array]:
    views: list[Array] = [buffer[part.slice] for part in consecutive(sizes)]
    for view, value in zip(views, values, strict=False):
        view[...] = value
    return views
