"""A message under way, its event, and the copy that may still have to be made."""

from collections.abc import Callable

from hpcdist.comm.communicator import Request
from hpcdist.comm.events import EventSink


class Pending:
    """A request together with its event and the copy that may still have to be made."""

    def __init__(self, events: EventSink, token: int, transport: Request, finish: Callable[[], None] | None) -> None:
        self._events, self._token, self._transport, self._finish = events, token, transport, finish
        self.done = False

    def _complete(self) -> None:
        if self._finish is not None:
            self._finish()
        self._events.end(self._token)
        self.done = True

    def wait(self) -> None:
        """Return when the message is complete."""
        if not self.done:
            self._transport.wait()
            self._complete()

    def test(self) -> bool:
        """Whether the message is complete."""
        if not self.done and self._transport.test():
            self._complete()
        return self.done
