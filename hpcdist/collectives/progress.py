"""Base class of the progress engines of nonblocking collectives, and collectives that run in steps.

Costs with s concurrent segments per buffer (see `ring_lanes`):

    allreduce        2 (p-1) steps: 2 s (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ
    reduce_scatter   p-1 steps: s (p-1) α + (p-1)/p n β + (p-1)/p n γ
    all_gather       p-1 steps: s (p-1) α + (p-1)/p n β
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
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.group import CompletedRequest
from hpcdist.comm.transport import Request
from hpcdist.errors import HpcdistError, UsageError

Lane: TypeAlias = Generator[Sequence[Request], None, None]
Scratch: TypeAlias = Callable[[int], Array]  # number of elements -> scratch buffer of the buffer's dtype
Tags: TypeAlias = Callable[[], int]  # returns a tag that no message in flight uses

SEGMENT_BYTES: Final = 256 << 10  # message size of a lane; large compared with the latency (empirical)
MOST_LANES: Final = 8

ALLREDUCE: Final = "allreduce"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_GATHER: Final = "all_gather"


@dataclass(frozen=True, slots=True)
class Task:
    """Operation, algorithm and arguments of a nonblocking collective, which changes ``buffer`` in place."""

    operation: str
    buffer: Array
    algorithm: str
    op: str = "sum"
    shares: tuple[Range, ...] = ()


def native_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return a list of one generator ("lane") that runs MPI_Iallreduce on the buffer of ``task``.

    The generator yields lists of requests to wait for. ``scratch`` and ``tags`` are not used.
    """

    def lane() -> Lane:
        yield [comm.iallreduce(task.buffer, task.op)]

    return [lane()]


def ring_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return a list of generators that run a ring allreduce of ``task``, one per segment of its buffer.

    A generator yields lists of requests to wait for. The caller may interleave the generators. ``scratch``: function
    that allocates a buffer. ``tags``: function that returns a new tag.
    """
    buffer, combine = task.buffer, combiner(task.buffer, task.op)

    def lane(chunks: Sequence[Range], arrival: Array, tag: int) -> Lane:
        yield from _reduce_scatter(comm, buffer, chunks, combine, arrival, tag)
        yield from _all_gather(comm, buffer, chunks, tag)

    segments = _segments(split(buffer.size, comm.size, buffer.itemsize), buffer.itemsize)
    arrivals = _arrivals(segments, scratch)
    return [lane(chunks, arrival, tags()) for chunks, arrival in zip(segments, arrivals, strict=True)]


def ring_reduce_scatter_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return a list of generators that run a ring reduce-scatter of ``task``. Arguments: see `ring_lanes`."""
    buffer, combine = task.buffer, combiner(task.buffer, task.op)
    segments = _segments(task.shares, buffer.itemsize)
    return [
        _reduce_scatter(comm, buffer, chunks, combine, arrival, tags())
        for chunks, arrival in zip(segments, _arrivals(segments, scratch), strict=True)
    ]


def ring_all_gather_lanes(comm: Communicator, task: Task, scratch: Scratch, tags: Tags) -> list[Lane]:
    """Return a list of generators that run a ring all-gather of ``task``. Arguments: see `ring_lanes`."""
    segments = _segments(task.shares, task.buffer.itemsize)
    return [_all_gather(comm, task.buffer, chunks, tags()) for chunks in segments]


def _segments(chunks: Sequence[Range], itemsize: int) -> list[tuple[Range, ...]]:
    longest = max(chunk.size for chunk in chunks)
    count = max(1, min(MOST_LANES, longest * itemsize // SEGMENT_BYTES))
    parts = [[part.shift(chunk.start) for part in split(chunk.size, count, itemsize)] for chunk in chunks]
    return list(zip(*parts, strict=True))


def _arrivals(segments: Sequence[Sequence[Range]], scratch: Scratch) -> list[Array]:
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
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        # The chunk of rank r starts at rank r + 1 and arrives at r after a full round.
        outgoing = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        target = buffer[chunks[(comm.rank - step - 2) % comm.size].slice]
        incoming = arrival[: target.size]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]
        combine(incoming, target, target)


def _all_gather(comm: Communicator, buffer: Array, chunks: Sequence[Range], tag: int) -> Lane:
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        outgoing = buffer[chunks[(comm.rank - step) % comm.size].slice]
        incoming = buffer[chunks[(comm.rank - step - 1) % comm.size].slice]
        yield [comm.irecv(incoming, behind, tag), comm.isend(outgoing, ahead, tag)]


Lanes: TypeAlias = Callable[[Communicator, Task, Scratch, Tags], list[Lane]]
# operation -> algorithm -> lanes
RESUMABLE: Final[Mapping[str, Mapping[str, Lanes]]] = {
    ALLREDUCE: {"native": native_lanes, "ring": ring_lanes},
    REDUCE_SCATTER: {"ring": ring_reduce_scatter_lanes},
    ALL_GATHER: {"ring": ring_all_gather_lanes},
}


class Handle(Protocol):
    """Handle of an operation in flight. After a failure of the operation, every `wait` and `test` raises the error."""

    def wait(self) -> None:
        """Wait until the operation is complete, so that its buffer holds the result. Local."""

    def test(self) -> bool:
        """Return True if the operation is complete, so that its buffer holds the result. Local."""


class ProgressEngine(ABC):
    """Base class of engines that run nonblocking collectives. Construction is collective over ``comm``."""

    # If the ``with`` block raises an exception, closing does not wait for other ranks.
    algorithms: ClassVar[Mapping[str, tuple[str, ...]]]  # operation -> names of its algorithms

    def __init__(self, comm: Communicator, label: str) -> None:
        self.comm, self.duplicate, self._closed = comm, comm.dup(label), False

    @property
    def busy_s(self) -> float:
        """Total time spent in communication in seconds, or NaN if unknown."""
        return math.nan

    def iallreduce(self, buffer: Array, algorithm: str | AlgorithmTable = "native", op: str = "sum") -> Handle:
        """Start to reduce ``buffer`` in place by ``algorithm`` (a name or a table by buffer size). Return a `Handle`.

        Collective: all ranks must start their operations in the same order.
        """
        return self._begin(Task(ALLREDUCE, buffer, str(algorithm), op))

    def ireduce_scatter(
        self, buffer: Array, shares: Sequence[Range], algorithm: str = "native", op: str = "sum"
    ) -> Handle:
        """Start a reduce-scatter of ``buffer``. Rank r gets ``buffer[shares[r]]``. Return a `Handle`. Collective."""
        return self._begin(Task(REDUCE_SCATTER, buffer, algorithm, op, tuple(shares)))

    def iall_gather(self, buffer: Array, shares: Sequence[Range], algorithm: str = "native") -> Handle:
        """Start an all-gather of ``buffer``. Rank r sends ``buffer[shares[r]]``. Return a `Handle`. Collective."""
        return self._begin(Task(ALL_GATHER, buffer, algorithm, "", tuple(shares)))

    def _begin(self, task: Task) -> Handle:
        if self._closed:
            raise UsageError(f"i{task.operation} was called after close() of the engine; call close() last")
        try:
            task = replace(task, algorithm=self._name(task))
            _check(self.duplicate, task)
        except HpcdistError as error:
            if self.duplicate.checked:
                self._refuse(call_of(task), error)
            raise
        if self.comm.size == 1:
            return CompletedRequest()
        events, buffer = self.comm.events, task.buffer
        # One event on the caller's communicator from start to end, so that the watchdog can name a rank that skips it.
        name = f"{task.algorithm}_i{task.operation}"
        token = events.begin(self.comm.name, name, name_of(buffer.dtype), buffer.size, 0, -1, 0)
        try:
            return self._start(task, lambda: events.end(token))
        except REFUSALS:
            events.end(token)
            raise

    def _name(self, task: Task) -> str:
        supported = self.algorithms[task.operation]
        name = task.algorithm
        if name not in supported and task.operation == ALLREDUCE:
            name = parse_algorithm(name).at(task.buffer.nbytes)
        if name not in supported:
            raise UsageError(
                f"the nonblocking {task.operation} algorithm {name!r} does not exist in this progress engine; "
                f"choose one of {', '.join(supported)}"
            )
        return name

    @abstractmethod
    def _start(self, task: Task, ended: Callable[[], None]) -> Handle: ...

    @abstractmethod
    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None: ...  # see `checks.announce_refusal`

    @abstractmethod
    def progress(self) -> None:
        """Advance all operations in flight, without waiting. Does nothing if a thread advances them. Local."""

    @abstractmethod
    def _finish(self) -> None: ...  # waits for all operations in flight, and raises the error of a failed operation

    def close(self) -> None:
        """Wait for all operations, and free all resources. Raises the error of a failed operation. Collective."""
        if not self._closed:
            self._closed = True
            self._finish()
            self.duplicate.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True  # other ranks may never reach a collective close
            self._abandon()

    def _abandon(self) -> None:
        return


def call_of(task: Task) -> checks.CollectiveCall:
    """Return the operation and arguments of ``task`` as a `CollectiveCall`, to compare them between ranks. Local."""
    shares = checks.ranges_fingerprint(task.shares) if task.shares else ""
    return checks.describe_call(f"i{task.operation}", task.algorithm, task.buffer, task.op, shares)


def _check(comm: Communicator, task: Task) -> None:
    if task.operation != ALL_GATHER:
        check_op(task.op)
    check_buffer(task.buffer)
    if task.operation != ALLREDUCE:
        check_ranges(comm, task.buffer, task.shares)
