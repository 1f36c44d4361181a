"""Interfaces of a communicator to its transport and its observers: requests, messages, shared memory and event sinks.

MPI libraries without the large counts of MPI-4 need messages of at most 2^31 - 1 elements. A collective is split into
`pieces`. A message is sent as one element of a derived datatype.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.ranges import Range
from hpcdist.errors import CommunicationError

LARGEST_TAG: Final = 32767  # every MPI library supports tags up to this value


UNKNOWN_BYTES: Final = -1  # the MPI library chose the algorithm, so the volume is unknown


class CallSite(NamedTuple):
    """A line of code that requested an operation. It may differ from the line that executes the operation."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """Number of the line in its file. Computed when asked for, because that takes longer than a small message."""
        lines = self.code.co_lines()
        return next((line or 0 for start, stop, line in lines if start <= self.instruction < stop), 0)


def call_site_outside(frame: FrameType | None, outside: tuple[str, ...]) -> CallSite | None:
    """Return the innermost call in the stack of ``frame`` whose file is not in the directories ``outside``, or None."""
    while frame is not None and frame.f_code.co_filename.startswith(outside):
        frame = frame.f_back
    return None if frame is None else CallSite(frame.f_code, frame.f_lasti)


attributed: Final[dict[int, CallSite]] = {}  # by thread: the call site of its operations, instead of the calling line


def attribute(site: CallSite | None) -> None:
    """Report ``site`` as the call site of this thread's next operations. None: report the real call sites. Local."""
    if site is None:
        attributed.pop(get_ident(), None)
    else:
        attributed[get_ident()] = site


members: Final[dict[str, str]] = {}  # communicator name -> its ranks, as ranks of the job: text of `rank_runs`
LONGEST_RUNS: Final = 800  # bytes of this text, which fits into the flight recorder


def rank_runs(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as short text that keeps the order, such as "0-3,8-12:2,7" for 0 1 2 3 8 10 12 7."""
    runs, at = [], 0
    while at < len(ranks):
        step = max(1, ranks[at + 1] - ranks[at]) if at + 1 < len(ranks) else 1
        count = 1
        while at + count < len(ranks) and ranks[at + count] == ranks[at] + count * step:
            count += 1
        if step > 1 and count < 3:
            step = count = 1
        runs.append(
            f"{ranks[at]}" + (f"-{ranks[at + count - 1]}" if count > 1 else "") + (f":{step}" if step > 1 else "")
        )
        at += count
    return ",".join(runs)


def note_members(name: str, runs: str) -> None:
    """Note the ranks of communicator ``name`` for `hpcdist hang`. ``runs``: text of `rank_runs`, or "" if unknown."""
    if 0 < len(runs) <= LONGEST_RUNS:
        members[name] = runs
    else:
        members.pop(name, None)


def parse_runs(text: str, most: int) -> tuple[int, ...]:
    """Return the ranks of the ``text`` of `rank_runs`. Raises ValueError for invalid text, or for ranks >= ``most``."""
    ranks: list[int] = []
    for run in text.split(","):
        span, _, step = run.partition(":")
        first, _, last = span.partition("-")
        if int(last or first) >= most or len(ranks) >= most:
            raise ValueError(f"the ranks {text[:50]} are not below {most}")
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)


class EventSink:
    """Observer that a communicator calls at the start and end of each operation. This base class does nothing."""

    # An operation that raises an error has no end, which shows the failure.
    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Record the start of operation ``op`` on ``count`` elements. Return a token to pass to `end`.

        ``comm``: communicator name. ``sent_bytes``: bytes that this rank sends. ``peer``: rank of the peer, or -1.
        """
        return 0

    def end(self, token: int) -> None:
        """Record the end of the operation for which `begin` returned ``token``."""


NULL_SINK: Final = EventSink()


class Request(Protocol):
    """An operation in flight. Its buffer must not be used before `wait` has returned or `test` has returned True."""

    def wait(self) -> None:
        """Wait until the operation is complete. Local."""

    def test(self) -> bool:
        """Return True if the operation is complete. Does not wait. Local."""


class Message(Protocol):
    """A message that a probe has matched and reserved. Only the method `recv` of this object can receive it."""

    source: int
    tag: int
    nbytes: int

    def recv(self, buffer: Array) -> None:
        """Receive the message into ``buffer``, which must have ``nbytes`` bytes. Local."""


class SharedBlock(Protocol):
    """Memory that all ranks of a node can read and write, or private memory if the ranks cannot share memory."""

    views: list[np.ndarray]  # bytes of each rank; private memory has only this rank's view
    is_shared: bool

    def progress(self) -> None:
        """Let the MPI library progress messages. Call this while waiting for a value in the shared memory. Local."""
        # A rank failure may go unnoticed here, so call `check_alive` from time to time as well.

    def check_alive(self, since: float) -> None:
        """Progress messages. Raises RankDiedError if a rank has died. ``since``: monotonic start of the wait. Local."""

    def close(self) -> None:
        """Free the memory. Collective, but local after `Communicator.revoke`."""


class PendingRequest:
    """Request that waits for ``transport`` and then records the end of the operation in the event sink."""

    def __init__(self, events: EventSink, token: int, transport: Request, finish: Callable[[], object] | None) -> None:
        self._events, self._token, self._transport, self._finish = events, token, transport, finish
        self.done = False

    def _complete(self) -> None:
        if self._finish is not None:
            self._finish()
        self._events.end(self._token)
        self.done = True

    def wait(self) -> None:
        if not self.done:
            self._transport.wait()
            self._complete()

    def test(self) -> bool:
        if not self.done and self._transport.test():
            self._complete()
        return self.done


LARGEST_COUNT = 2**31 - 1  # elements of one call; tests lower it on all ranks
PAIR_TAG: Final = LARGEST_TAG - 2  # messages of a large all-to-all


def check_size(nbytes: int, source: int, tag: int, buffer: Array, receiver: str = "") -> None:
    """Raise CommunicationError unless ``buffer`` has exactly the ``nbytes`` bytes of a received message. Local."""
    if nbytes != buffer.nbytes:
        raise CommunicationError(
            f"{receiver}a message of {nbytes} bytes from rank {source} (tag {tag}) arrived for a buffer of "
            f"{buffer.nbytes} bytes; both must have the same size"
        )


def pieces(size: int, largest: int | None = None) -> list[Range]:
    """Return ranges of at most ``largest`` (default: `LARGEST_COUNT`) elements that cover ``size`` elements. Local."""
    largest = largest or LARGEST_COUNT
    return [Range(start, min(start + largest, size)) for start in range(0, size, largest)]


def within(piece: Range, ranges: Sequence[Range]) -> list[Range]:
    """Return the intersection of each of ``ranges`` with ``piece``, as offsets from the start of ``piece``. Local."""
    return [part.intersect(piece).shift(-piece.start) for part in ranges]


def as_one_element(mpi: Any, message: Array) -> list[Any]:
    """Return an mpi4py buffer specification of ``message`` as one element of a derived datatype. Local."""
    return [message, 1, _datatype(mpi, message.dtype.char, message.size, LARGEST_COUNT)]


@functools.cache  # a program has few sizes; the datatypes live as long as MPI
def _datatype(mpi: Any, code: str, size: int, largest: int) -> Any:
    starts, itemsize = range(0, size, largest), np.dtype(code).itemsize
    counts = [min(largest, size - start) for start in starts]
    return mpi.Datatype.fromcode(code).Create_hindexed(counts, [start * itemsize for start in starts]).Commit()


def scratch_for(buffer: Array, ranges: Sequence[Range], largest: int) -> tuple[Array, list[Range]]:
    """Allocate one scratch array for copies of ``ranges`` of ``buffer``. Return (array, list of ranges of the copies).

    A range of more than ``largest`` elements is not copied. Its range in the returned list is empty.
    """
    sizes = [part.size if part.size <= largest else 0 for part in ranges]
    slots = [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return namespace(buffer).empty(slots[-1].stop, buffer.dtype), slots
