"""Step-wise collectives: generators that yield the requests they wait for, for progress by polling.

An algorithm here is a function of a communicator, a `Task`, scratch memory and tags; it returns *lanes*, which go on
independently of each other. Whoever drives a lane asks it for the next requests once all of the last ones are
complete. On p ranks with n bytes, cut into s lanes:

    allreduce, native            one MPI_Iallreduce, whose steps are the library's
    allreduce, segmented ring    2 (p-1) steps, whatever s: 2 s (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ
    reduce_scatter, ring         p-1 steps: s (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather, ring             p-1 steps: s (p-1) α + (p-1)/p n β

The ring is that of `hpcdist.collectives.algorithms.ring` (P. Patarasuk and X. Yuan, 2009). A lane takes the same part
of each rank's chunk around, so that one lane's messages travel while another's are added up. Where chunks are cut
changes no sum: the bits are those of `hpcdist.collectives.algorithms.ring`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
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

ALLREDUCE: Final = "allreduce"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_GATHER: Final = "all_gather"


@dataclass(frozen=True, slots=True)
class Task:
    """A collective that is to go on beside something else, on ``buffer``, in place.

    ``shares``, one range for each rank, are those of a reduce-scatter or an all-gather; an allreduce has none.
    """

    operation: str
    buffer: Array
    algorithm: str
    op: str = "sum"
    shares: tuple[Range, ...] = ()


def native_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the library's own nonblocking allreduce as one lane. Collective over ``comm``, in the order of calls."""

    def lane() -> Lane:
        yield [comm.iallreduce(task.buffer, task.op)]

    return [lane()]


def ring_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the lanes of a segmented ring, to the owners and back. Every rank drives its own to the end."""
    buffer, combine = task.buffer, combiner(task.buffer, task.op)

    def lane(chunks: Sequence[Range], arrival: Array, tag: int) -> Lane:
        yield from _reduce_scatter(comm, buffer, chunks, combine, arrival, tag)
        yield from _all_gather(comm, buffer, chunks, tag)

    segments = _segments(split(buffer.size, comm.size, buffer.itemsize), buffer.itemsize)
    arrivals = _arrivals(segments, scratch)
    return [lane(chunks, arrival, tags()) for chunks, arrival in zip(segments, arrivals, strict=True)]


def ring_reduce_scatter_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the lanes of the first half: afterwards each rank's share is reduced, the rest undefined."""
    buffer, combine = task.buffer, combiner(task.buffer, task.op)
    segments = _segments(task.shares, buffer.itemsize)
    return [
        _reduce_scatter(comm, buffer, chunks, combine, arrival, tags())
        for chunks, arrival in zip(segments, _arrivals(segments, scratch), strict=True)
    ]


def ring_all_gather_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return the lanes of the second half: each rank's share comes to all."""
    segments = _segments(task.shares, task.buffer.itemsize)
    return [_all_gather(comm, task.buffer, chunks, tags()) for chunks in segments]


def _segments(chunks: Sequence[Range], itemsize: int) -> list[tuple[Range, ...]]:
    """Return the part of each of ``chunks`` that every lane takes around."""
    longest = max(chunk.size for chunk in chunks)
    count = max(1, min(MOST_LANES, longest * itemsize // SEGMENT_BYTES))
    parts = [[part.shift(chunk.start) for part in split(chunk.size, count, itemsize)] for chunk in chunks]
    return list(zip(*parts, strict=True))


def _arrivals(segments: Sequence[Sequence[Range]], scratch: Scratch) -> list[Array]:
    """Return memory for what comes in, one array for each lane."""
    widest = [max(part.size for part in segment) for segment in segments]
    memory = scratch(sum(widest))
    found = []
    for size in widest:
        found.append(memory[:size])
        memory = memory[size:]
    return found


def _reduce_scatter(
    comm: Communicator, buffer: Array, chunks: Sequence[Range], combine: Combine, arrival: Array, tag: int
) -> Lane:
    """Reduce ``chunks``, one for each rank, around the ring to their owners."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        # The chunk of rank r starts one behind r and has gone all the way round when it arrives there.
        outgoing = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        kept = buffer[chunks[(comm.rank - step - 2) % comm.size].slice]
        incoming = arrival[: kept.size]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]
        combine(incoming, kept, kept)


def _all_gather(comm: Communicator, buffer: Array, chunks: Sequence[Range], tag: int) -> Lane:
    """Hand ``chunks`` on around the ring."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        outgoing = buffer[chunks[(comm.rank - step) % comm.size].slice]
        incoming = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]


Lanes: TypeAlias = Callable[[Communicator, Task, Scratch, Tags], list[Lane]]
# operation -> algorithm -> its lanes
RESUMABLE: Final[Mapping[str, Mapping[str, Lanes]]] = {
    ALLREDUCE: {"native": native_lanes, "ring": ring_lanes},
    REDUCE_SCATTER: {"ring": ring_reduce_scatter_lanes},
    ALL_GATHER: {"ring": ring_all_gather_lanes},
}
