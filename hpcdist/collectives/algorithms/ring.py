"""Ring allreduce: a reduce-scatter, then an all-gather, each passing chunks around a ring of ranks.

P. Patarasuk and X. Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124. With chunks of n/p bytes:

    reduce_scatter    (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather        (p-1) α + (p-1)/p n β
    ring_allreduce  2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

``bidirectional`` sends half of each chunk in each direction, which halves the time per step if the links to both
neighbours are separate. Chunks longer than ``segment_bytes`` are pipelined in m segments: γ overlaps with β, and α
becomes m α, mostly hidden. The result depends only on p, size and direction.

`reduce_to_leader` and `broadcast_from_leader` each cost m α + 2 (m-1)/m n β on the m ranks of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, check_buffer, combiner
from hpcdist.collectives.segments import (
    PostedReceives,
    check_ranges,
    check_segment,
    cut_evenly,
    scratch,
    slots,
    wait_all,
)
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request

CLOCKWISE, COUNTER_CLOCKWISE = 1, -1
SEGMENT_BYTES: Final = 2 << 20  # through shared memory: as fast as whole chunks; shorter segments are slower


def ring_allreduce(
    comm: Communicator,
    buffer: Array,
    op: str = "sum",
    *,
    bidirectional: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce ``buffer`` in place around a ring, with equal bits on every rank. Collective over ``comm``."""
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    reduce_scatter(comm, buffer, chunks, op, bidirectional=bidirectional, segment_bytes=segment_bytes)
    all_gather(comm, buffer, chunks, bidirectional=bidirectional, segment_bytes=segment_bytes)


def ring_bidirectional_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place around a ring. The halves of a chunk travel in opposite directions. Collective."""
    ring_allreduce(comm, buffer, op, bidirectional=True)


def reduce_scatter(
    comm: Communicator,
    buffer: Array,
    ranges: Sequence[Range],
    op: str = "sum",
    *,
    bidirectional: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce ``buffer`` around a ring. On rank r, only ``buffer[ranges[r]]`` is defined afterwards. Collective."""
    combine = combiner(buffer, op)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
    if _in_segments(buffer, lanes, segment_bytes):
        # The chunk of rank r starts at rank r + 1 and arrives at r after a full round.
        _relay(buffer, lanes, 1, segment_bytes, combine)
        return
    arrivals = [
        scratch(f"ring {lane.direction}", max(r.size for r in lane.chunks), buffer.dtype, buffer) for lane in lanes
    ]
    # Step s sends the chunk of rank r - s - 1, which the step before has updated, and adds the received data to the
    # chunk of rank r - s - 2. After p - 1 steps this is the chunk of rank r.
    for step in range(comm.size - 1):
        outgoing = [buffer[lane.behind(step + 1).slice] for lane in lanes]
        targets = [buffer[lane.behind(step + 2).slice] for lane in lanes]
        incoming = [arrival[: target.size] for arrival, target in zip(arrivals, targets, strict=True)]
        _pass_on(comm, lanes, outgoing, incoming)
        for partial, target in zip(incoming, targets, strict=True):
            combine(partial, target, target)


def all_gather(
    comm: Communicator,
    buffer: Array,
    ranges: Sequence[Range],
    *,
    bidirectional: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """All-gather ``buffer`` (any dtype) around a ring. Rank r contributes ``buffer[ranges[r]]``. Collective."""
    check_buffer(buffer)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
    if _in_segments(buffer, lanes, segment_bytes):
        _relay(buffer, lanes, 0, segment_bytes, None)
        return
    # Step s sends the chunk of rank r - s, and receives the chunk of rank r - s - 1 in place.
    for step in range(comm.size - 1):
        outgoing = [buffer[lane.behind(step).slice] for lane in lanes]
        incoming = [buffer[lane.behind(step + 1).slice] for lane in lanes]
        _pass_on(comm, lanes, outgoing, incoming)


@dataclass(frozen=True, slots=True)
class _Lane:
    comm: Communicator
    direction: int
    chunks: Sequence[Range]  # a range of the buffer per rank

    def neighbour(self, distance: int) -> int:
        return (self.comm.rank + self.direction * distance) % self.comm.size

    def behind(self, distance: int) -> Range:
        return self.chunks[self.neighbour(-distance)]


def _lanes(comm: Communicator, buffer: Array, ranges: Sequence[Range], bidirectional: bool) -> list[_Lane]:
    check_ranges(comm, buffer, ranges)
    if not bidirectional:
        return [_Lane(comm, CLOCKWISE, ranges)]
    halves = [[half.shift(part.start) for half in split(part.size, 2, buffer.itemsize)] for part in ranges]
    return [
        _Lane(comm, CLOCKWISE, [first for first, _ in halves]),
        _Lane(comm, COUNTER_CLOCKWISE, [second for _, second in halves]),
    ]


def _pass_on(comm: Communicator, lanes: Sequence[_Lane], outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
    if len(lanes) == 1:
        comm.sendrecv(outgoing[0], lanes[0].neighbour(1), incoming[0], lanes[0].neighbour(-1))
        return
    # On two ranks both lanes connect the same pair: tags distinguish the lanes.
    requests = [comm.irecv(incoming[tag], lane.neighbour(-1), tag) for tag, lane in enumerate(lanes)]
    requests += [comm.isend(outgoing[tag], lane.neighbour(1), tag) for tag, lane in enumerate(lanes)]
    wait_all(requests)


def _in_segments(buffer: Array, lanes: Sequence[_Lane], segment_bytes: int) -> bool:
    check_segment(segment_bytes)
    return (
        lanes[0].comm.size > 2  # two ranks forward nothing
        and max(chunk.size for lane in lanes for chunk in lane.chunks) * buffer.itemsize > segment_bytes
    )


def _relay(buffer: Array, lanes: Sequence[_Lane], first: int, segment_bytes: int, combine: Combine | None) -> None:
    # Rank r first sends chunk r - ``first``, then the chunks it receives, reduced with its data if ``combine`` is not
    # None.
    sends: list[Request] = []
    inboxes, arrivals = [], []
    for tag, lane in enumerate(lanes):
        # steps[s] are the pieces of the chunk first + s ranks before: steps[0] leave at once, the others arrive later.
        steps = [
            cut_evenly(lane.behind(first + step), buffer.itemsize, segment_bytes) for step in range(lane.comm.size)
        ]
        pieces = [piece for step in steps[1:] for piece in step]
        if combine is None:
            targets = [buffer[piece.slice] for piece in pieces]
        else:
            targets = slots(f"ring {lane.direction}", pieces, buffer.dtype, buffer)
        inboxes.append(PostedReceives(lane.comm, lane.neighbour(-1), targets, tag))
        sends += [lane.comm.isend(buffer[piece.slice], lane.neighbour(1), tag) for piece in steps[0]]
        arrivals.append(steps[1:])
    # Wait for a segment of a step only after all segments of earlier steps, on all lanes: no deadlock.
    for step, chunks in enumerate(zip(*arrivals, strict=True)):
        for row in zip_longest(*chunks):  # alternate between lanes, which may differ in their number of pieces
            for tag, piece in enumerate(row):
                if piece is None:
                    continue
                segment, arrived = buffer[piece.slice], inboxes[tag].take()
                if combine is not None:
                    combine(arrived, segment, segment)
                if step < len(arrivals[tag]) - 1:
                    sends.append(lanes[tag].comm.isend(segment, lanes[tag].neighbour(1), tag))
    wait_all(sends)


LEADER: Final = 0


def reduce_to_leader(intra: Communicator, buffer: Array) -> None:
    """Sum ``buffer`` on rank 0. ``buffer`` becomes undefined on the other ranks. Collective over ``intra``."""
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    reduce_scatter(intra, buffer, chunks)
    _gather(intra, buffer, chunks)


def broadcast_from_leader(intra: Communicator, buffer: Array) -> None:
    """Overwrite ``buffer`` on all ranks with the ``buffer`` of rank 0. Collective over ``intra``."""
    # Sending n/m to each rank and forwarding is cheaper than sending n to each rank.
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    _scatter(intra, buffer, chunks)
    all_gather(intra, buffer, chunks)


def _gather(comm: Communicator, buffer: Array, chunks: Sequence[Range]) -> None:
    if comm.rank != LEADER:
        comm.send(buffer[chunks[comm.rank].slice], LEADER)
        return
    requests = [comm.irecv(buffer[chunks[peer].slice], peer) for peer in range(1, comm.size)]
    wait_all(requests)


def _scatter(comm: Communicator, buffer: Array, chunks: Sequence[Range]) -> None:
    if comm.rank != LEADER:
        comm.recv(buffer[chunks[comm.rank].slice], LEADER)
        return
    requests = [comm.isend(buffer[chunks[peer].slice], peer) for peer in range(1, comm.size)]
    wait_all(requests)
