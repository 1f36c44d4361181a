"""Hierarchical allreduce: reduce-scatter in each node, allreduce between nodes, all-gather in each node.

With m ranks on each of k nodes, rank i of every node carries part i of m between the nodes:

    reduce_scatter inside the node,  allreduce of the own part between the nodes,  all_gather inside the node

    inside   2 (m-1) α + 2 (m-1)/m n β + (m-1)/m n γ
    between  2 (k-1) α + 2 (k-1)/k (n/m) β + (k-1)/k (n/m) γ          (k = 2: α and n/m γ instead)

Between nodes a rank sends 1/m of what a flat ring would, and all ranks of a node use the network at once: the 2D
torus of H. Mikami et al., arXiv:1811.05233 (2018). Where nodes have unequal numbers of ranks, m is the smallest, and
the other ranks help inside their node only.

The buffer goes through in segments, so that nothing waits for a whole phase: while segments are on the wire, the node
sums those that leave next and hands round those that have arrived. What is not hidden is one segment at either end.
On one node there is no wire, and the buffer is summed in the memory that its ranks share, if they can share any. Two
nodes exchange their sums of a segment (the bytes of a ring of 2, but no message waits for another); more nodes form a
ring in which each node starts at another chunk of the buffer, its messages queued one chunk ahead.

The order of all sums follows from the sizes alone, so the same call gives the same bits. They are handed on
unchanged, or computed from the same operands in the same order, so all ranks end with the same bits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.node.flow import NodeFlow, flow_of, keep_for
from hpcdist.collectives.reduction import combiner
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator, Nodes, Request

SEGMENT_BYTES: Final = 256 << 10  # of a message: large beside its latency, small beside a buffer (empirical)
AHEAD: Final = 16  # messages that are under way behind the one that is waited for (empirical)


def hierarchical_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``, which is cut by node."""
    combiner(buffer, op)  # refuse before the first split, on any number of ranks
    nodes = comm.nodes()
    if nodes.count == 1 and shared_memory.is_available(comm):
        shared_memory.node_shared_allreduce(comm, buffer, op)
        return
    streams = min(len(members) for members in nodes.members)
    keep_for(comm, nodes.intra)
    _reduce(_place_in(nodes, streams), buffer, op)


def hierarchical(intra: Communicator, inter: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place over the product of ``intra`` and ``inter``. Collective over both.

    Every ``intra`` must have the same size, and ``inter`` must join the ranks of equal number in their ``intra``, in
    the same order for all ranks of an ``intra``. Memory is kept for ``intra``, until its `collectives.release`.
    """
    combiner(buffer, op)
    place = _Place(intra, inter, inter.rank, inter.size, intra.size, tuple(range(inter.size)))
    _reduce(place, buffer, op)


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of this rank: node ``index`` of ``count``, of whose ranks the first ``streams`` send to other nodes.

    ``ranks`` are, for each node, the rank in ``inter`` that carries the same part as this one; none on ranks that send
    nothing to other nodes.
    """

    intra: Communicator
    inter: Communicator
    index: int
    count: int
    streams: int
    ranks: tuple[int, ...]

    def peer(self, distance: int) -> int:
        """Return the rank in ``inter`` of the node ``distance`` ahead in the ring of nodes; -1 where there is none."""
        return -1 if not self.ranks else self.ranks[(self.index + distance) % self.count]


def _place_in(nodes: Nodes, streams: int) -> _Place:
    column = [members[nodes.intra.rank] for members in nodes.members if nodes.intra.rank < streams]
    ranks = tuple(sorted(column).index(rank) for rank in column)  # ranks need not fill node by node
    return _Place(nodes.intra, nodes.peers, nodes.index, nodes.count, streams, ranks)


def _reduce(place: _Place, buffer: Array, op: str) -> None:
    chunks = split(buffer.size, place.count if place.count > 2 else 1, buffer.itemsize)
    # A segment is one message of SEGMENT_BYTES for each of the ranks that send to other nodes. All chunks have the same
    # number of segments, also where they differ by a block: all nodes then count the same hops.
    longest = place.streams * SEGMENT_BYTES // buffer.itemsize
    count = max(1, -(-chunks[0].size // longest))
    segments = [[part.shift(chunk.start) for part in split(chunk.size, count, buffer.itemsize)] for chunk in chunks]
    # As in a ring of ranks, the chunk of node i starts at the node ahead of it: here that of the node behind is first.
    turns = [segments[(place.index - 1 - turn) % len(segments)] for turn in range(len(segments))]
    order = [segment for turn in turns for segment in turn]
    node = flow_of(place.intra, place.streams, buffer, op, order, SEGMENT_BYTES)
    if place.count == 1:
        for segment in segments[0]:
            node.sum_next()
            node.spread(segment)
    elif place.count == 2:
        _exchange(_Wire(place, node), segments[0])
    else:
        _ring(_Wire(place, node), turns)
    node.finish()


def _exchange(wire: "_Wire", segments: Sequence[Range]) -> None:
    """Reduce over two nodes: each sends its sum of every segment, and both add the two."""
    node, first = wire.node, wire.place.index == 0
    # Segments leave AHEAD steps before the other node's sums of them are waited for.
    for step in range(len(segments) + AHEAD):
        if step < len(segments):
            wire.receive(segments[step], 1)
            node.sum_next()
            wire.send(segments[step], 1)
        if step >= AHEAD:
            arrived, own = wire.complete(), node.own(segments[step - AHEAD])
            if arrived is not None:
                # Node 0's operand first, on both nodes: they compute the same bits.
                node.combine(own if first else arrived, arrived if first else own, own)
            node.spread(segments[step - AHEAD])


def _ring(wire: "_Wire", turns: Sequence[Sequence[Range]]) -> None:
    """Reduce over the ring of k nodes: chunks of sums go round once, and the totals once more.

    ``turns`` are the segments of each chunk, that of the node behind first. What is received in hop h is that of turn
    h+1: a sum to be completed for h < k-1, a total from then on. It is sent on in the next hop.
    """
    node, nodes = wire.node, wire.place.count
    expected = [(hop, segment) for hop in range(2 * nodes - 2) for segment in turns[(hop + 1) % nodes]]
    ahead = min(AHEAD, len(turns[0]))  # a total must not be received over a sum that is still being sent

    def expect(step: int) -> None:
        if step < len(expected):
            hop, segment = expected[step]
            wire.receive(segment, -1, into_place=hop >= nodes - 1)

    for step in range(ahead):
        expect(step)
    for segment in turns[0]:
        node.sum_next()
        wire.send(segment, 1)
    for step, (hop, segment) in enumerate(expected):
        expect(step + ahead)
        if hop < nodes - 1:
            node.sum_next()
        arrived = wire.complete()
        if arrived is not None and hop < nodes - 1:
            own = node.own(segment)
            node.combine(arrived, own, own)
        if hop < 2 * nodes - 3:  # the last is not passed on: the node ahead completed it itself
            wire.send(segment, 1)
        if hop >= nodes - 2:  # from hop k - 2 on, the sum is that of all nodes
            node.spread(segment)


class _Wire:
    """Messages between nodes, completed in the order in which they were begun.

    No more than AHEAD + 1 each way are under way: Open MPI's TCP serves many at once, and then all of them slowly.
    """

    def __init__(self, place: _Place, node: NodeFlow) -> None:
        self.place, self.node = place, node
        self._ready: deque[tuple[Array, int]] = deque()
        self._sends: deque[Request | None] = deque()
        self._arrivals: deque[tuple[Request, Array] | None] = deque()
        self._room = node.longest
        self._slots = scratch("hierarchical", (AHEAD + 1) * self._room, node.buffer.dtype, node.buffer)
        self._taken = 0

    def send(self, segment: Range, distance: int) -> None:
        """Send the own part of ``segment`` to the node ``distance`` ahead, after what was to be sent before (local)."""
        self._ready.append((self.node.own(segment), self.place.peer(distance)))
        self._begin_sends()

    def _begin_sends(self) -> None:
        while self._ready and len(self._sends) <= AHEAD:
            part, peer = self._ready.popleft()
            self._sends.append(self.place.inter.isend(part, peer) if part.size else None)

    def receive(self, segment: Range, distance: int, *, into_place: bool = False) -> None:
        """Begin to receive the part of the node ``distance`` ahead, into scratch or where it belongs (local).

        At most AHEAD + 1 receives may be under way, or not yet used.
        """
        part = self.node.own(segment)
        if not part.size:
            self._arrivals.append(None)
            return
        if not into_place:
            self._taken = (self._taken + 1) % (AHEAD + 1)  # the slot that has been used for longest
            part = self._slots[self._taken * self._room :][: part.size]
        self._arrivals.append((self.place.inter.irecv(part, self.place.peer(distance)), part))

    def complete(self) -> Array | None:
        """Wait for the oldest receive, then the oldest send; return what came, None where nothing had to (local)."""
        arrival, send = self._arrivals.popleft(), self._sends.popleft()
        if arrival is not None:
            arrival[0].wait()
        if send is not None:
            send.wait()
        self._begin_sends()
        return None if arrival is None else arrival[1]
