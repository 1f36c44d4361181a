"""Ring allreduce: a reduce-scatter, then an all-gather, each passing chunks around a ring of ranks.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009) 117-124. With chunks of n/p bytes:

    reduce_scatter    (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather        (p-1) α + (p-1)/p n β
    ring_allreduce  2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

No allreduce sends fewer bytes per rank than 2 (p-1)/p n; the latency grows with p, so small buffers want
recursive doubling. ``bidirectional`` sends one half of each chunk clockwise and the other counter-clockwise at the
same time: the same bytes, half the time per step where a rank's links to its two neighbours are separate.

Each chunk is summed once, by one rank after the other, and its owner's bits are handed on: all ranks end with the same
bits, and the same (p, size, direction) always gives the same sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import check_buffer, combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

CLOCKWISE, COUNTER_CLOCKWISE = 1, -1


def ring_allreduce(comm: Communicator, buffer: Array, op: str = "sum", *, bidirectional: bool = False) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    reduce_scatter(comm, buffer, chunks, op, bidirectional=bidirectional)
    all_gather(comm, buffer, chunks, bidirectional=bidirectional)


def reduce_scatter(
    comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum", *, bidirectional: bool = False
) -> None:
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result, the rest undefined. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty.
    """
    combine = combiner(buffer, op)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
    arrivals = [
        scratch(f"ring {lane.direction}", max(r.size for r in lane.chunks), buffer.dtype, buffer) for lane in lanes
    ]
    for step in range(comm.size - 1):
        # The chunk of rank r starts one behind r and has gone all the way round when it arrives there.
        outgoing = [buffer[lane.behind(step + 1).slice] for lane in lanes]
        kept = [buffer[lane.behind(step + 2).slice] for lane in lanes]
        incoming = [arrival[: keep.size] for arrival, keep in zip(arrivals, kept, strict=True)]
        _pass_on(comm, lanes, outgoing, incoming)
        for partial, keep in zip(incoming, kept, strict=True):
            combine(partial, keep, keep)


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range], *, bidirectional: bool = False) -> None:
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty. Any dtype: nothing is computed.
    """
    check_buffer(buffer)
    lanes = _lanes(comm, buffer, ranges, bidirectional)
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
    if len(ranges) != comm.size or any(part.stop > buffer.size for part in ranges):
        raise UsageError(
            f"a ring of {comm.size} ranks over {buffer.size} elements needs one range inside them for each rank, "
            f"got {[(part.start, part.stop) for part in ranges]}"
        )
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
    for request in requests:
        request.wait()
