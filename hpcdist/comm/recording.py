"""Counting what an algorithm sends: claims about volumes are asserted on this."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import UNKNOWN_BYTES, Tee


class Traffic:
    """Calls by operation and bytes sent as messages, summed over all communicators that share the sink."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.unknown: Counter[str] = Counter()  # operations whose algorithm, and so volume, is the MPI library's

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Count an operation."""
        self.calls[op] += 1
        if sent_bytes == UNKNOWN_BYTES:
            self.unknown[op] += 1
        else:
            self.sent_bytes += sent_bytes
        return 0

    def end(self, token: int) -> None:
        """Nothing is measured at the end."""
        return None


@contextmanager
def recording(comm: Communicator) -> Iterator[Traffic]:
    """Count what ``comm``, and the communicators made from it, send (local)."""
    traffic = Traffic()
    before = comm.events
    comm.events = Tee(before, traffic)
    try:
        yield traffic
    finally:
        comm.events = before
