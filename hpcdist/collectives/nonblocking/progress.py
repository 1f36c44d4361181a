"""Progress engine, base class: checks and starts nonblocking collectives; and collectives that come in steps.

`ThreadEngine` and `PollEngine` of `engines` derive from it. It runs on a communicator of its own, refuses bad
arguments before anything is sent, and closes when its context ends.

For progress by polling, an algorithm is a function of a communicator, a `Task`, scratch memory and tags that returns
*lanes*, independent generators that yield the requests they wait for. The engine resumes a lane once all of its last
requests are complete. On p ranks with n bytes, cut into s lanes:

    allreduce, native            one MPI_Iallreduce, whose steps are the library's
    allreduce, segmented ring    2 (p-1) steps, whatever s: 2 s (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ
    reduce_scatter, ring         p-1 steps: s (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather, ring             p-1 steps: s (p-1) α + (p-1)/p n β

The ring is that of `hpcdist.collectives.algorithms.ring`. A lane takes the same part of each rank's chunk around, so
that one lane's messages travel while another's are added up. Where chunks are cut changes no sum: the bits are those
of the blocking ring.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import ClassVar, Final, Protocol, Self, TypeAlias

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.reduction import REFUSALS, Combine, check_buffer, check_op, combiner
from hpcdist.collectives.segments import check_ranges
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.threads.group import CompletedRequest
from hpcdist.errors import HpcdistError, UsageError

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
    arrivals = []
    for size in widest:
        arrivals.append(memory[:size])
        memory = memory[size:]
    return arrivals


def _reduce_scatter(
    comm: Communicator, buffer: Array, chunks: Sequence[Range], combine: Combine, arrival: Array, tag: int
) -> Lane:
    """Reduce ``chunks``, one for each rank, around the ring to their owners."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        # The chunk of rank r starts one ahead of r and has gone all the way round when it arrives there.
        outgoing = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        target = buffer[chunks[(comm.rank - step - 2) % comm.size].slice]
        incoming = arrival[: target.size]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]
        combine(incoming, target, target)


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


class Handle(Protocol):
    """An operation under way. What made it fail is raised by `wait`, and by `test`, each time."""

    def wait(self) -> None:
        """Return when the buffer holds the result (local)."""

    def test(self) -> bool:
        """Whether the buffer holds the result (local)."""


class ProgressEngine(ABC):
    """Runs nonblocking collectives on a communicator of its own, made from ``comm``. Construction is collective.

    A context manager: leaving it closes; an exception ends it without the other ranks. ``own`` is the communicator that
    operations run on: memory that they shall find shared is allocated over that one. ``algorithms`` has the names that
    each operation knows.
    """

    algorithms: ClassVar[Mapping[str, tuple[str, ...]]]

    def __init__(self, comm: Communicator, label: str) -> None:
        self.comm, self.own, self._closed = comm, comm.dup(label), False

    @property
    def busy_s(self) -> float:
        """Time spent in communication so far, hidden or not; NaN where nobody can know."""
        return math.nan

    def iallreduce(self, buffer: Array, algorithm: str | AlgorithmTable = "native", op: str = "sum") -> Handle:
        """Begin to reduce ``buffer`` over all ranks in place. Collective over the communicator: in the same order.

        Arguments and errors are those of `hpcdist.collectives.allreduce`; UsageError also after `close`.
        """
        return self._begin(Task(ALLREDUCE, buffer, str(algorithm), op))

    def ireduce_scatter(
        self, buffer: Array, shares: Sequence[Range], algorithm: str = "native", op: str = "sum"
    ) -> Handle:
        """Begin to reduce ``buffer`` in place; of the result ``buffer[shares[rank]]`` is defined. Collective.

        ``shares`` are those that the same algorithm of `hpcdist.collectives.SHARDED` cuts; so are the errors.
        """
        return self._begin(Task(REDUCE_SCATTER, buffer, algorithm, op, tuple(shares)))

    def iall_gather(self, buffer: Array, shares: Sequence[Range], algorithm: str = "native") -> Handle:
        """Begin to give ``buffer[shares[rank]]`` to all, and to fill the other shares, in place. Collective.

        ``shares`` are those that the same algorithm of `hpcdist.collectives.SHARDED` cuts; so are the errors.
        """
        return self._begin(Task(ALL_GATHER, buffer, algorithm, "", tuple(shares)))

    def _begin(self, task: Task) -> Handle:
        if self._closed:
            raise UsageError(f"i{task.operation} on a Progress that was closed; start it before close()")
        try:
            task = replace(task, algorithm=self._name(task))
            _check(self.own, task)
        except HpcdistError as error:
            if self.own.checked:
                self._refuse(call_of(task), error)
            raise
        if self.comm.size == 1:
            return CompletedRequest()
        events, buffer = self.comm.events, task.buffer
        # From start to end one event of the caller's communicator: a rank that skips the call is named, as in any
        # collective.
        name = f"{task.algorithm}_i{task.operation}"
        token = events.begin(self.comm.name, name, name_of(buffer.dtype), buffer.size, 0, -1, 0)
        try:
            return self._start(task, lambda: events.end(token))
        except REFUSALS:
            events.end(token)
            raise

    def _name(self, task: Task) -> str:
        """Return the algorithm, that for the size of the buffer where it is a table. Raises UsageError."""
        known = self.algorithms[task.operation]
        name = task.algorithm
        if name not in known and task.operation == ALLREDUCE:
            name = parse_algorithm(name).at(task.buffer.nbytes)
        if name not in known:
            raise UsageError(
                f"nonblocking {task.operation} algorithm {name!r} is none of {', '.join(known)}, which this "
                "kind of progress has; choose one of them"
            )
        return name

    @abstractmethod
    def _start(self, task: Task, ended: Callable[[], None]) -> Handle: ...

    @abstractmethod
    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None:
        """Tell the other ranks, in checked mode, that this one raises ``error`` instead of joining in ``call``."""

    @abstractmethod
    def progress(self) -> None:
        """Move what is under way, without waiting (local). Nothing to do where a thread does it."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for all that is under way, and raise what made any of it fail."""

    def close(self) -> None:
        """Wait for all that was started and give everything back. Collective; later calls do nothing.

        Raises what made an operation fail. Handles stay valid: they are done.
        """
        if not self._closed:
            self._closed = True
            self._finish()
            self.own.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True  # the others may never come to a collective end
            self._abandon()

    def _abandon(self) -> None:
        """End what can be ended without the other ranks (local)."""
        return


def call_of(task: Task) -> checks.CollectiveCall:
    """Return the call that ranks compare in checked mode (local)."""
    shares = checks.ranges_fingerprint(task.shares) if task.shares else ""
    return checks.describe_call(f"i{task.operation}", task.algorithm, task.buffer, task.op, shares)


def _check(comm: Communicator, task: Task) -> None:
    if task.operation != ALL_GATHER:
        check_op(task.op)
    check_buffer(task.buffer)
    if task.operation != ALLREDUCE:
        check_ranges(comm, task.buffer, task.shares)
