"""Requests, matched messages and shared memory, which a communicator gets from its transport."""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.comm.events import EventSink

LARGEST_TAG: Final = 32767  # every MPI library supports tags up to this value


class Request(Protocol):
    """An operation in flight. Its buffer must not be used before `wait` has returned or `test` has returned True."""

    def wait(self) -> None:
        """Wait until the operation is complete. Local."""

    def test(self) -> bool:
        """Return True if the operation is complete. Local."""


class Message(Protocol):
    """A message that a matched probe has reserved: only `recv` of this object can receive it."""

    source: int
    tag: int
    nbytes: int

    def recv(self, buffer: Array) -> None:
        """Receive the message into ``buffer``, which must have ``nbytes`` bytes. Local."""


class SharedBlock(Protocol):
    """Memory that all ranks of a node can read and write, or private memory if the ranks cannot share memory.

    ``views``: bytes of each rank. If ``is_shared`` is False, only the view of the calling rank exists.
    """

    views: list[np.ndarray]
    is_shared: bool

    def progress(self) -> None:
        """Let the MPI library progress messages. Call this while waiting for a value in the memory. Local."""
        # A rank failure may go unnoticed here, so call `check_alive` from time to time as well.

    def check_alive(self, since: float) -> None:
        """Let messages progress, and raise RankDiedError if a rank of the communicator has died. Local.

        ``since``: value of `time.monotonic` at the start of the wait.
        """

    def close(self) -> None:
        """Free the memory. Collective; local after `Communicator.revoke`."""


class PendingRequest:
    """A request whose end is recorded in the event log. ``finish``: called once after completion, or None."""

    def __init__(self, events: EventSink, token: int, transport: Request, finish: Callable[[], None] | None) -> None:
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
