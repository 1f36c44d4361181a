"""Event sink that receives every operation of a communicator, and the base class that holds the sink."""

from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

UNKNOWN_BYTES: Final = -1  # the MPI library chose the algorithm, so the volume is unknown


class CallSite(NamedTuple):
    """Line of code that requested an operation, which may be executed later or by another thread."""

    code: CodeType
    instruction: int
    line: int


def call_site(frame: FrameType | None, outside: tuple[str, ...]) -> CallSite | None:
    """Return the innermost call in the stack of ``frame`` whose file is not in the folders ``outside``, or None."""
    while frame is not None and frame.f_code.co_filename.startswith(outside):
        frame = frame.f_back
    return None if frame is None else CallSite(frame.f_code, frame.f_lasti, frame.f_lineno)


attributed: Final[dict[int, CallSite]] = {}  # by thread: the call site of its operations, instead of the calling line


def attribute(site: CallSite | None) -> None:
    """Record ``site`` as the calling line of this thread's later operations. None restores the actual line. Local."""
    attributed.pop(get_ident(), None)
    if site is not None:
        attributed[get_ident()] = site


class EventSink:
    """Observer of a communicator's operations. This base class does nothing.

    `end` is not called for an operation that raises an error. So the last operation without an end shows the failure.
    """

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Record the start of operation ``op`` on ``count`` elements. Return a token to pass to `end`.

        ``sent_bytes``: bytes that this rank sends, or `UNKNOWN_BYTES`. ``peer``: the other rank, or -1.
        """
        return 0

    def end(self, token: int) -> None:
        """Record the end of the operation for which `begin` returned ``token``."""


NULL_SINK: Final = EventSink()


class Observable:
    """Base class of communicators (`endpoint.Endpoint`) that report their operations to an event sink."""

    def __init__(self) -> None:
        self._sink_cell: list[EventSink] = [NULL_SINK]  # shared with all communicators derived from this one
        self._checked = False
        self.is_comparing = False  # True while the ranks compare their calls before a collective
        self.settled: dict[Any, Any] = {}

    @property
    def events(self) -> EventSink:
        """The event sink of this communicator and of all communicators derived from it."""
        return self._sink_cell[0]

    @events.setter
    def events(self, sink: EventSink) -> None:
        self._sink_cell[0] = sink

    def observe_like(self, other: "Observable") -> None:
        """Use the same event sink as ``other``, and copy `checked` (whether ranks compare their calls). Local."""
        self._sink_cell = other._sink_cell
        self.checked = other.checked

    @property
    def checked(self) -> bool:
        """True if ranks compare their calls before each collective. Derived communicators inherit this value."""
        return self._checked

    @checked.setter
    def checked(self, checked: bool) -> None:
        self._checked = checked
        self.settled.clear()
