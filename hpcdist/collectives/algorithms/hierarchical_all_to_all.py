"""Hierarchical all-to-all of uneven parts: one message between two nodes each way, and the rest inside of nodes.

Between two nodes one rank of each stands for its node; the ranks of a node take turns, by the number of the other node.
The ranks of a node bring it what they have for the other one, it sends all of that in one message, and the rank that
stands there hands it out. On N nodes of m ranks, p in all, with n bytes each, that is for a rank

    (N-1)/m messages of about m n/N bytes between nodes, in the place of p - m messages of n/p bytes
    two exchanges inside of the node of (N-1)/N n bytes, and one of n/N: what stays in the node

so it pays where parts are small: many ranks, few tokens for each expert. As much goes between nodes, and up to three
times as much inside of them. The sizes of all parts of a node are gathered in it first.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, consecutive
from hpcdist.collectives.segments import gather_counts, scratch, wait_all
from hpcdist.comm.communicator import Communicator, Nodes

TAG = 11
Parts = list[list[Array]]  # for each rank of a node


def hierarchical_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Exchange by way of ranks that stand for their nodes. Collective over ``comm``."""
    nodes = comm.nodes()
    here = nodes.members[nodes.index]
    own_ranges = [send_ranges[rank] for rank in here], [receive_ranges[rank] for rank in here]
    nodes.intra.all_to_all(send, receive, *own_ranges)
    if nodes.count == 1:
        return
    others = [node for node in range(nodes.count) if node != nodes.index]
    stands = [[node for node in others if node % len(here) == place] for place in range(len(here))]
    mine = stands[nodes.intra.rank]  # the nodes towards which this rank stands for its own
    sizes = gather_sizes(nodes.intra, send_ranges, receive_ranges)
    # Inside: what each rank here has for the ranks of a node, to the one that stands for us there.
    own = [[send[send_ranges[rank].slice] for node in of for rank in nodes.members[node]] for of in stands]
    targets = [rank for node in mine for rank in nodes.members[node]]
    brought = _exchange(nodes.intra, "brought", own, [[int(row[0, rank]) for rank in targets] for row in sizes], send)
    arrived = _between(comm, nodes, mine, brought, sizes, send)
    # Inside again: what came for each rank here, from the one that stands for us.
    sources = [[rank for node in of for rank in nodes.members[node]] for of in stands]
    expected = [[receive_ranges[rank].size for rank in of] for of in sources]
    handed = _exchange(nodes.intra, "handed", arrived, expected, send)
    for ranks, parts in zip(sources, handed, strict=True):
        for rank, part in zip(ranks, parts, strict=True):
            receive[receive_ranges[rank].slice] = part


def _between(
    comm: Communicator, nodes: Nodes, mine: list[int], brought: Parts, sizes: np.ndarray, like: Array
) -> Parts:
    """Exchange one message with each node of ``mine``; return what came for each rank here, by node and sender.

    ``brought`` has what each rank here has for the ranks of these nodes. A message is sorted by receiver and sender.
    """
    arrived: Parts = [[] for _ in brought]
    requests, first, opened = [], 0, []
    for node in mine:
        theirs = nodes.members[node]
        peer = theirs[nodes.index % len(theirs)]
        leaving = [parts[first + place] for place in range(len(theirs)) for parts in brought]
        first += len(theirs)
        out = scratch(f"to node {node}", sum(part.size for part in leaving), like.dtype, like)
        _views(out, [part.size for part in leaving], leaving)
        lengths = [int(row[1, rank]) for row in sizes for rank in theirs]
        into = scratch(f"from node {node}", sum(lengths), like.dtype, like)
        requests += [comm.irecv(into, peer, TAG), comm.isend(out, peer, TAG)]
        opened.append((len(theirs), _views(into, lengths)))
    wait_all(requests)
    for count, parts in opened:
        for place, own in enumerate(arrived):
            own += parts[place * count : (place + 1) * count]
    return arrived


def gather_sizes(comm: Communicator, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> np.ndarray:
    """Return the sizes that ranks send and receive: (rank of ``comm``, sent or received, of which rank). Collective."""
    own = [[part.size for part in ranges] for ranges in (send_ranges, receive_ranges)]
    return gather_counts(comm, np.array(own, np.int64))


def _exchange(intra: Communicator, name: str, parts: Parts, expected: list[list[int]], like: Array) -> Parts:
    """Give each rank of the node its ``parts``; return those of each, so long as ``expected``. Collective."""
    flat, lengths = [part for own in parts for part in own], [size for own in expected for size in own]
    send = scratch(f"{name} out", sum(part.size for part in flat), like.dtype, like)
    _views(send, [part.size for part in flat], flat)
    receive = scratch(f"{name} in", sum(lengths), like.dtype, like)
    sent = consecutive(sum(part.size for part in own) for own in parts)
    intra.all_to_all(send, receive, sent, consecutive(map(sum, expected)))
    views = iter(_views(receive, lengths))
    return [[next(views) for _ in own] for own in expected]


def _views(buffer: Array, sizes: Sequence[int], values: Sequence[Array] = ()) -> list[Array]:
    """Return the parts of ``buffer`` of these sizes, one behind the other, with ``values`` in them if given."""
    views: list[Array] = [buffer[part.slice] for part in consecutive(sizes)]
    for view, value in zip(views, values, strict=False):
        view[...] = value
    return views
