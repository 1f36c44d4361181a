"""Allreduce in steps: generators that yield the messages they wait for, so that one thread computes in between.

An algorithm here is a function of a communicator, a buffer, the reduction, scratch memory and tags; it returns *lanes*,
which go on independently of each other. Whoever drives a lane asks it for the next requests once all of the last ones
are complete. On p ranks with n bytes, cut into s lanes:

    native            one MPI_Iallreduce, whose steps are the library's
    segmented ring    2 (p-1) steps one after the other, whatever s: 2 s (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

The ring is that of `hpcdist.collectives.ring` (P. Patarasuk and X. Yuan, 2009). A lane takes the same part of each
rank's chunk around, so that one lane's messages travel while another's are added up. Where chunks are cut changes no
sum: the bits are those of `ring_allreduce`.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeAlias

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.comm.communicator import Communicator, Request

Lane: TypeAlias = Generator[Sequence[Request], None, None]
Scratch: TypeAlias = Callable[[int], Array]  # number of elements -> uninitialised memory, of the buffer's dtype
Tags: TypeAlias = Callable[[], int]  # a tag that no message under way has

SEGMENT_BYTES: Final = 256 << 10  # of a lane, per message: large beside a latency (empirical)
MOST_LANES: Final = 8


def native_lanes(comm: Communicator, buffer: Array, op: str, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the library's own nonblocking allreduce as one lane. Collective over ``comm``, in the order of calls."""

    def lane() -> Lane:
        yield [comm.iallreduce(buffer, op)]

    return [lane()]


def ring_lanes(comm: Communicator, buffer: Array, op: str, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the lanes of a segmented ring. Every rank of ``comm`` drives its own to the end."""
    combine = combiner(buffer, op)
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    longest = max(chunk.size for chunk in chunks)
    count = max(1, min(MOST_LANES, longest * buffer.itemsize // SEGMENT_BYTES))
    parts = [[part.shift(chunk.start) for part in split(chunk.size, count, buffer.itemsize)] for chunk in chunks]
    lanes: list[Lane] = []
    arrivals = scratch(sum(max(part.size for part in segment) for segment in zip(*parts, strict=True)))
    for segment in zip(*parts, strict=True):
        widest = max(part.size for part in segment)
        arrival, arrivals = arrivals[:widest], arrivals[widest:]
        lanes.append(_ring(comm, buffer, segment, combine, arrival, tags()))
    return lanes


def _ring(
    comm: Communicator, buffer: Array, chunks: Sequence[Range], combine: Combine, arrival: Array, tag: int
) -> Lane:
    """Reduce ``chunks``, one for each rank, around the ring, then gather them."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        # The chunk of rank r starts one behind r and has gone all the way round when it arrives there.
        outgoing = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        kept = buffer[chunks[(comm.rank - step - 2) % comm.size].slice]
        incoming = arrival[: kept.size]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]
        combine(incoming, kept, kept)
    for step in range(comm.size - 1):
        outgoing = buffer[chunks[(comm.rank - step) % comm.size].slice]
        incoming = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]


RESUMABLE: Final[dict[str, Callable[[Communicator, Array, str, Scratch, Tags], list[Lane]]]] = {
    "native": native_lanes,
    "ring": ring_lanes,
}
