"""Hierarchical allreduce: reduce-scatter in each node, allreduce between nodes, all-gather in each node.

With m ranks on each of k nodes, local rank i of every node reduces part i of m between the nodes:

    inside   2 (m-1) α + 2 (m-1)/m n β + (m-1)/m n γ
    between  2 (k-1) α + 2 (k-1)/k (n/m) β + (k-1)/k (n/m) γ          (k = 2: α and n/m γ instead)

This is the 2D torus of H. Mikami et al., arXiv:1811.05233 (2018). If nodes have unequal numbers of ranks, m is the
smallest number, and the other ranks only help inside their node. The order of all sums depends only on the sizes.
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
from hpcdist.comm.communicator import Communicator, Nodes
from hpcdist.comm.transport import Request

SEGMENT_BYTES: Final = 256 << 10  # message size: large compared with the latency, small against a buffer (empirical)
AHEAD: Final = 16  # messages in flight after the one to wait for (empirical)


def hierarchical_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place, first in each node, then between nodes. Equal bits on every rank. Collective."""
    combiner(buffer, op)  # reject invalid arguments before the first split, on any number of ranks
    nodes = comm.nodes()
    if nodes.count == 1 and shared_memory.is_available(comm):
        shared_memory.node_shared_allreduce(comm, buffer, op)
        return
    streams = min(len(members) for members in nodes.members)
    keep_for(comm, nodes.intra)
    _reduce(_place_in(nodes, streams), buffer, op)


def hierarchical(intra: Communicator, inter: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` over ``intra`` (this node's ranks), then ``inter`` (one rank of every node). Collective."""
    # All nodes have equally many ranks. `collectives.release(intra)` frees the shared memory of a node.
    combiner(buffer, op)
    place = _Place(intra, inter, inter.rank, inter.size, intra.size, tuple(range(inter.size)))
    _reduce(place, buffer, op)


@dataclass(frozen=True, slots=True)
class _Place:
    intra: Communicator
    inter: Communicator  # of the ranks that send to other nodes: the first ``streams`` of each node
    index: int  # of this node, among ``count`` nodes
    count: int
    streams: int
    ranks: tuple[int, ...]  # rank in ``inter`` of the peer on each node; empty if this rank does not send

    def peer(self, distance: int) -> int:
        return -1 if not self.ranks else self.ranks[(self.index + distance) % self.count]


def _place_in(nodes: Nodes, streams: int) -> _Place:
    column = [members[nodes.intra.rank] for members in nodes.members if nodes.intra.rank < streams]
    ranks = tuple(sorted(column).index(rank) for rank in column)  # ranks may be numbered in any order over nodes
    return _Place(nodes.intra, nodes.peers, nodes.index, nodes.count, streams, ranks)


def _reduce(place: _Place, buffer: Array, op: str) -> None:
    chunks = split(buffer.size, place.count if place.count > 2 else 1, buffer.itemsize)
    # A segment is one message of SEGMENT_BYTES for each rank that sends to other nodes. All chunks have equally many
    # segments, although sizes may differ by a block, so that all nodes count the same hops.
    longest = place.streams * SEGMENT_BYTES // buffer.itemsize
    count = max(1, -(-chunks[0].size // longest))
    segments = [[part.shift(chunk.start) for part in split(chunk.size, count, buffer.itemsize)] for chunk in chunks]
    # The chunk of node i starts at node i + 1, as in a ring of ranks: begin with the chunk of the previous node.
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
    node, first = wire.node, wire.place.index == 0
    # A segment is sent AHEAD steps before the other node's sum of this segment is waited for.
    for step in range(len(segments) + AHEAD):
        if step < len(segments):
            wire.receive(segments[step], 1)
            node.sum_next()
            wire.send(segments[step], 1)
        if step >= AHEAD:
            arrived, local_part = wire.complete(), node.local_view(segments[step - AHEAD])
            if arrived is not None:
                # Node 0's operand first, on both nodes: they compute the same bits.
                node.combine(local_part if first else arrived, arrived if first else local_part, local_part)
            node.spread(segments[step - AHEAD])


def _ring(wire: "_Wire", turns: Sequence[Sequence[Range]]) -> None:
    # ``turns[h]``: buffer ranges that this node sends in step h and in step h + k, of k nodes.
    node, nodes = wire.node, wire.place.count
    expected = [(hop, segment) for hop in range(2 * nodes - 2) for segment in turns[(hop + 1) % nodes]]
    ahead = min(AHEAD, len(turns[0]))  # do not receive a total into a sum that is still being sent

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
            local_part = node.local_view(segment)
            node.combine(arrived, local_part, local_part)
        if hop < 2 * nodes - 3:  # do not forward the last total: the next node computed it
            wire.send(segment, 1)
        if hop >= nodes - 2:  # from hop k - 2 on, the sum contains all nodes
            node.spread(segment)


class _Wire:
    def __init__(self, place: _Place, node: NodeFlow) -> None:
        self.place, self.node = place, node
        self._ready: deque[tuple[Array, int]] = deque()
        self._sends: deque[Request | None] = deque()
        self._arrivals: deque[tuple[Request, Array] | None] = deque()
        self._room = node.longest
        self._slots = scratch("hierarchical", (AHEAD + 1) * self._room, node.buffer.dtype, node.buffer)
        self._taken = 0

    def send(self, segment: Range, distance: int) -> None:
        self._ready.append((self.node.local_view(segment), self.place.peer(distance)))
        self._begin_sends()

    def _begin_sends(self) -> None:
        while self._ready and len(self._sends) <= AHEAD:
            part, peer = self._ready.popleft()
            self._sends.append(self.place.inter.isend(part, peer) if part.size else None)

    def receive(self, segment: Range, distance: int, *, into_place: bool = False) -> None:
        part = self.node.local_view(segment)
        if not part.size:
            self._arrivals.append(None)
            return
        if not into_place:
            self._taken = (self._taken + 1) % (AHEAD + 1)  # the least recently used slot
            part = self._slots[self._taken * self._room :][: part.size]
        self._arrivals.append((self.place.inter.irecv(part, self.place.peer(distance)), part))

    def complete(self) -> Array | None:
        arrival, send = self._arrivals.popleft(), self._sends.popleft()
        if arrival is not None:
            arrival[0].wait()
        if send is not None:
            send.wait()
        self._begin_sends()
        return None if arrival is None else arrival[1]
