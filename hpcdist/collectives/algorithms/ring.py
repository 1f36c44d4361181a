"""Ring allreduce: a reduce-scatter, then an all-gather, each passing chunks around a ring of ranks.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009) 117-124. With chunks of n/p bytes:

    reduce_scatter    (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather        (p-1) α + (p-1)/p n β
    ring_allreduce  2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

No allreduce sends fewer bytes per rank than 2 (p-1)/p n; the latency grows with p, so small buffers want recursive
doubling. ``bidirectional`` sends one half of each chunk clockwise and the other counter-clockwise at the same time:
the same bytes, half the time per step where a rank's links to its two neighbours are separate.

Chunks longer than ``segment_bytes`` pass in segments: a segment is sent on as soon as it has been combined, while the
next ones arrive, so that γ hides behind β. With m segments a chunk each α above becomes m α, most of them hidden too.

Each chunk is summed once, by one rank after the other, and its owner's bits are handed on: all ranks end with the
same bits, and the same (p, size, direction) always gives the same sum, whatever the segments.

`reduce_to_leader` and `broadcast_from_leader` serve strategies in which one rank of a node speaks for the others (a
parameter server, a gossip partner): the ring's halves, joined by a gather to the leader or a scatter from it. With n
bytes on m ranks, each direction costs

    (m-1) α + (m-1)/m n β + α + (m-1)/m n β

the second part of which passes through the leader alone.
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
from hpcdist.comm.communicator import Communicator, Request

CLOCKWISE, COUNTER_CLOCKWISE = 1, -1
SEGMENT_BYTES: Final = 2 << 20  # through shared memory: no slower than whole chunks; shorter ones are


def ring_allreduce(
    comm: Communicator,
    buffer: Array,
    op: str = "sum",
    *,
    bidirectional: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    reduce_scatter(comm, buffer, chunks, op, bidirectional=bidirectional, segment_bytes=segment_bytes)
    all_gather(comm, buffer, chunks, bidirectional=bidirectional, segment_bytes=segment_bytes)


def ring_bidirectional_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place, half of it each way round. Collective over ``comm``."""
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
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result, the rest undefined. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty.
    """
    combine = combiner(buffer, op)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
    if _in_segments(buffer, lanes, segment_bytes):
        # The chunk of rank r starts one ahead of r and has gone all the way round when it arrives there.
        _relay(buffer, lanes, 1, segment_bytes, combine)
        return
    arrivals = [
        scratch(f"ring {lane.direction}", max(r.size for r in lane.chunks), buffer.dtype, buffer) for lane in lanes
    ]
    # Step s sends the chunk of the rank s + 1 behind, to which the step before has added, and adds what arrives to the
    # chunk s + 2 behind. After p - 1 steps that is the chunk p behind: the own one.
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
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty. Any dtype: nothing is computed.
    """
    check_buffer(buffer)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
    if _in_segments(buffer, lanes, segment_bytes):
        _relay(buffer, lanes, 0, segment_bytes, None)
        return
    # Step s passes on the chunk of the rank s behind, at first the own one, and receives the one behind that in place.
    for step in range(comm.size - 1):
        outgoing = [buffer[lane.behind(step).slice] for lane in lanes]
        incoming = [buffer[lane.behind(step + 1).slice] for lane in lanes]
        _pass_on(comm, lanes, outgoing, incoming)


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction around the ring and the chunks, one for each rank, that go that way."""

    comm: Communicator
    direction: int
    chunks: Sequence[Range]

    def neighbour(self, distance: int) -> int:
        """Return the rank ``distance`` ahead of this one."""
        return (self.comm.rank + self.direction * distance) % self.comm.size

    def behind(self, distance: int) -> Range:
        """Return the chunk of the rank ``distance`` behind this one."""
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
    """Send one chunk ahead and receive one from behind, on all lanes at the same time."""
    if len(lanes) == 1:
        comm.sendrecv(outgoing[0], lanes[0].neighbour(1), incoming[0], lanes[0].neighbour(-1))
        return
    # Among two ranks both lanes join the same pair: the tag tells them apart.
    requests = [comm.irecv(incoming[tag], lane.neighbour(-1), tag) for tag, lane in enumerate(lanes)]
    requests += [comm.isend(outgoing[tag], lane.neighbour(1), tag) for tag, lane in enumerate(lanes)]
    wait_all(requests)


def _in_segments(buffer: Array, lanes: Sequence[_Lane], segment_bytes: int) -> bool:
    """Return whether any chunk is longer than a segment: the same on all ranks, which know the same chunks.

    Two ranks pass nothing on: segments would only be more messages.
    """
    check_segment(segment_bytes)
    return (
        lanes[0].comm.size > 2
        and max(chunk.size for lane in lanes for chunk in lane.chunks) * buffer.itemsize > segment_bytes
    )


def _relay(buffer: Array, lanes: Sequence[_Lane], first: int, segment_bytes: int, combine: Combine | None) -> None:
    """Send the chunk ``first`` behind, and pass the p-1 further behind on as they arrive; the last one stays.

    With ``combine`` what arrives is combined into the own elements of the chunk, without it replaces them.
    """
    sends: list[Request] = []
    inboxes, arrivals = [], []
    for tag, lane in enumerate(lanes):
        # steps[s] are the pieces of the chunk first + s behind: steps[0] leave at once, the others arrive in order.
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
    # A segment of one step is only waited for after those of the steps before, on all lanes: nobody waits in a circle.
    for step, chunks in enumerate(zip(*arrivals, strict=True)):
        for row in zip_longest(*chunks):  # lanes in turn; one may have fewer pieces
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


def reduce_to_leader(intra: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` to rank 0 in place; on the others it is undefined afterwards. Collective over ``intra``."""
    chunks = split(buffer.size, intra.size, buffer.itemsize)
    reduce_scatter(intra, buffer, chunks, op)
    _gather(intra, buffer, chunks)


def broadcast_from_leader(intra: Communicator, buffer: Array) -> None:
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
    wait_all(requests)


def _scatter(comm: Communicator, buffer: Array, chunks: Sequence[Range]) -> None:
    """Bring the chunk of each rank from the leader."""
    if comm.rank != LEADER:
        comm.recv(buffer[chunks[comm.rank].slice], LEADER)
        return
    requests = [comm.isend(buffer[chunks[peer].slice], peer) for peer in range(1, comm.size)]
    wait_all(requests)
