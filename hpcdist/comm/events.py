"""Events of a communicator: the sink that gets every operation, and the base class that holds it.

The flight recorder, the timing of operations and the counting of traffic are sinks (see `comm.record`).
"""

from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

UNKNOWN_BYTES: Final = -1  # the MPI library chose the algorithm, so the volume is not known


class CallSite(NamedTuple):
    """Line of a program: what asked for an operation that another thread, or a later call, makes."""

    code: CodeType
    instruction: int
    line: int


def call_site(frame: FrameType | None, outside: tuple[str, ...]) -> CallSite | None:
    """Return the innermost line at or above ``frame`` in a file that begins with none of ``outside`` (local)."""
    while frame is not None and frame.f_code.co_filename.startswith(outside):
        frame = frame.f_back
    return None if frame is None else CallSite(frame.f_code, frame.f_lasti, frame.f_lineno)


attributed: Final[dict[int, CallSite]] = {}  # by thread: the line of all that it begins, instead of the one that calls


def attribute(site: CallSite | None) -> None:
    """Let ``site`` be the line of all that this thread begins from now on; None: the line that calls (local)."""
    attributed.pop(get_ident(), None)
    if site is not None:
        attributed[get_ident()] = site


class EventSink:
    """Observer of a communicator, called when an operation begins and when it ends; this one observes nothing.

    An operation that raises never ends, so that the last open event shows where the failure happened.
    """

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Note an operation on ``count`` elements and return a token for `end`.

        ``sent_bytes`` is what this rank puts on the wire as messages, or `UNKNOWN_BYTES`; ``peer`` is -1 where
        there is none.
        """
        return 0

    def end(self, token: int) -> None:
        """Note that the operation behind ``token`` is complete."""


NULL_SINK: Final = EventSink()


class Observable:
    """Base of `endpoint.Endpoint`: the event sink, checked mode, and a cache for callers."""

    def __init__(self) -> None:
        self._sink_cell: list[EventSink] = [NULL_SINK]  # one cell, shared with all communicators made from this one
        self._checked = False
        self.is_comparing = False  # in the exchange before a collective, by which the ranks compare their calls
        self.settled: dict[Any, Any] = {}

    @property
    def events(self) -> EventSink:
        """The sink of the operations of this communicator and of all that were made from it."""
        return self._sink_cell[0]

    @events.setter
    def events(self, sink: EventSink) -> None:
        self._sink_cell[0] = sink

    def observe_like(self, other: "Observable") -> None:
        """Report to the event sink of ``other``, also when it gets another one, and check calls as it does (local)."""
        self._sink_cell = other._sink_cell
        self.checked = other.checked

    @property
    def checked(self) -> bool:
        """Whether the ranks compare their calls before each collective; communicators made from this one inherit it."""
        return self._checked

    @checked.setter
    def checked(self, checked: bool) -> None:
        self._checked = checked
        self.settled.clear()
