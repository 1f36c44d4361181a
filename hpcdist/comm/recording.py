"""Counting what an algorithm sends: claims about volumes are asserted on this."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import NULL_SINK, UNKNOWN_BYTES, EventSink


class Traffic:
    """Calls by operation and bytes sent as messages; every event goes on to ``inner``."""

    def __init__(self, inner: EventSink = NULL_SINK) -> None:
        self.inner = inner
        self._lock = threading.Lock()  # a thread may send beside the rank's own messages
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.unknown: Counter[str] = Counter()  # operations whose algorithm, and so volume, is the MPI library's

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Count an operation and pass it on."""
        with self._lock:
            self.calls[op] += 1
            if sent_bytes == UNKNOWN_BYTES:
                self.unknown[op] += 1
            else:
                self.sent_bytes += sent_bytes
        return self.inner.begin(comm, op, dtype, count, sent_bytes, peer, tag)

    def end(self, token: int) -> None:
        """Pass the end on."""
        self.inner.end(token)


@contextmanager
def recording(comm: Communicator) -> Iterator[Traffic]:
    """Count what ``comm``, and the communicators made from it, send (local)."""
    before = comm.events
    traffic = Traffic(before)
    comm.events = traffic
    try:
        yield traffic
    finally:
        comm.events = before
