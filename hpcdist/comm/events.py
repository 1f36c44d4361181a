"""Event sink that receives every operation of a communicator."""

from threading import get_ident
from types import CodeType, FrameType
from typing import Final, NamedTuple

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

        ``comm``: communicator name. ``sent_bytes``: bytes that this rank sends, or `UNKNOWN_BYTES`. ``peer``: the other
        rank, or -1.
        """
        return 0

    def end(self, token: int) -> None:
        """Record the end of the operation for which `begin` returned ``token``."""


NULL_SINK: Final = EventSink()
