"""What a communicator knows besides its messages: who looks on, and what its callers have settled for it."""

from typing import Any

from hpcdist.comm.events import NULL_SINK, EventSink


class Watched:
    """Base of `endpoint.Endpoint`."""

    def __init__(self) -> None:
        self._looking_on: list[EventSink] = [NULL_SINK]  # one cell for all communicators made from this one
        self._checked = False
        self.is_comparing = False  # in the exchange before a collective, by which the ranks compare their calls
        self.settled: dict[Any, Any] = {}

    @property
    def events(self) -> EventSink:
        """Where operations of this communicator, and of all that were made from it, are reported."""
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
