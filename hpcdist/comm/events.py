"""Events of a communicator: the sink that is told of every operation, and the base class that holds it.

The flight recorder, the timing of operations and the counting of traffic are sinks (see `comm.record`).
"""

from typing import Any, Final, Protocol

UNKNOWN_BYTES: Final = -1  # the MPI library chose the algorithm: how much it sends is its own affair


class EventSink(Protocol):
    """Looks on: told when an operation begins and when it ends.

    An operation that raises never ends, so that the last open event is the place of the failure.
    """

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Note an operation on ``count`` elements and return a token for `end`.

        ``sent_bytes`` is what this rank puts on the wire as messages, or `UNKNOWN_BYTES`; ``peer`` is -1 where
        there is none.
        """
        ...

    def end(self, token: int) -> None:
        """Note that the operation behind ``token`` is complete."""
        ...


class _NullSink:
    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        return 0

    def end(self, token: int) -> None:
        return None


NULL_SINK: Final[EventSink] = _NullSink()


class Observable:
    """Base of `endpoint.Endpoint`."""

    def __init__(self) -> None:
        self._looking_on: list[EventSink] = [NULL_SINK]  # one cell for all communicators made from this one
        self._checked = False
        self.is_comparing = False  # in the exchange before a collective, by which the ranks compare their calls
        self.settled: dict[Any, Any] = {}

    @property
    def events(self) -> EventSink:
        """The sink that operations of this communicator, and of all that were made from it, are reported to."""
        return self._looking_on[0]

    @events.setter
    def events(self, sink: EventSink) -> None:
        self._looking_on[0] = sink

    @property
    def checked(self) -> bool:
        """Whether the ranks compare their calls before each collective. Those made from this one take it over."""
        return self._checked

    @checked.setter
    def checked(self, checked: bool) -> None:
        self._checked = checked
        self.settled.clear()
