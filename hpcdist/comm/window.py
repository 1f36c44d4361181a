"""One-sided memory windows: put, get and flush (MPI-3 passive target RMA).

The target takes no part in a transfer, and is not notified of it: the origin puts, flushes, and then sends a message;
the target may read after it has received that message and called `sync`. There is no other synchronisation: two ranks
must never access the same bytes without such a message between them.

mpi4py is passed in by `mpi.communicator.MpiCommunicator`, never imported. Ranks that are threads use
`DeferredWindow`, which moves nothing before the flush: code that forgets to flush fails there, too.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.comm.events import EventSink
from hpcdist.comm.mpi import large_messages, ulfm
from hpcdist.errors import MissingCapabilityError, UsageError

PROBE_BYTES: Final = 8  # behind the memory of each rank: the window is tested there when it is made
_MAGIC: Final = 0x6870_6364_0000_0000


class Window(Protocol):
    """One-sided access to the ``memory`` (bytes, possibly none) of each member. All calls but `close` are local.

    Before the `flush` the buffer of a put must not change, and that of a get must not be read.
    """

    memory: np.ndarray  # (bytes of this rank,) uint8

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write ``buffer`` into the memory of ``peer``, from byte ``at_bytes`` on."""

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read the memory of ``peer``, from byte ``at_bytes`` on, into ``buffer``."""

    def flush(self, peer: int) -> None:
        """Return when all transfers of this rank with ``peer`` are complete on both sides."""

    def sync(self) -> None:
        """Order own accesses to ``memory`` with those of others: after a notice is received, before one is sent."""

    def close(self) -> None:
        """Free the memory; nothing may be under way. Collective."""


class ObservedWindow:
    """Window over the bare ``transfers`` of bytes: it checks and records each. Put and got bytes count as sent here."""

    def __init__(self, transfers: Window, name: str, sizes: list[int], events: Callable[[], EventSink]) -> None:
        self._transfers, self._name, self._sizes, self._events = transfers, name, sizes, events
        self.memory = transfers.memory

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        octets = self._checked(buffer, peer, at_bytes)
        token = self._events().begin(self._name, "put", str(buffer.dtype), buffer.size, buffer.nbytes, peer, 0)
        self._transfers.put(octets, peer, at_bytes)
        self._events().end(token)

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        octets = self._checked(buffer, peer, at_bytes)
        token = self._events().begin(self._name, "get", str(buffer.dtype), buffer.size, buffer.nbytes, peer, 0)
        self._transfers.get(octets, peer, at_bytes)
        self._events().end(token)

    def flush(self, peer: int) -> None:
        """Complete the transfers with ``peer``."""
        token = self._events().begin(self._name, "flush", "uint8", 0, 0, peer, 0)
        self._transfers.flush(peer)
        self._events().end(token)

    def sync(self) -> None:
        """Order reads and writes."""
        self._transfers.sync()

    def close(self) -> None:
        """Free the memory. Collective."""
        self.memory = self.memory[:0]
        self._transfers.close()

    def _checked(self, buffer: np.ndarray, peer: int, at_bytes: int) -> np.ndarray:
        """Return the bytes of ``buffer`` after bounds checks: MPI would silently write past the end of a window."""
        if not isinstance(buffer, np.ndarray) or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise UsageError(
                f"a window takes 1-D contiguous arrays on the host, got {type(buffer).__name__} of shape "
                f"{buffer.shape}; copy it into one first"
            )
        if not 0 <= peer < len(self._sizes) or at_bytes < 0 or at_bytes + buffer.nbytes > self._sizes[peer]:
            held = f"{self._sizes[peer]} bytes" if 0 <= peer < len(self._sizes) else "no memory"
            raise UsageError(
                f"bytes {at_bytes} to {at_bytes + buffer.nbytes} of rank {peer} in a window of {self._name}, which has "
                f"{held} there; stay inside"
            )
        return buffer.view(np.uint8)


class MpiTransfers:
    """An MPI window with one access epoch (lock_all) for its whole life."""

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        self._mpi, self._comm = mpi, comm
        # Allocated by the library: within a node that is shared memory, where a put is a copy.
        self._window = mpi.Win.Allocate(nbytes, 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self.memory = np.frombuffer(self._window.tomemory(), np.uint8)
        self.memory[...] = 0
        self.sync()

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        for piece in large_messages.pieces(buffer.size):
            self._window.Put(
                [buffer[piece.slice], self._mpi.BYTE], peer, (at_bytes + piece.start, piece.size, self._mpi.BYTE)
            )

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        for piece in large_messages.pieces(buffer.size):
            self._window.Get(
                [buffer[piece.slice], self._mpi.BYTE], peer, (at_bytes + piece.start, piece.size, self._mpi.BYTE)
            )

    def flush(self, peer: int) -> None:
        """Complete the transfers with ``peer``."""
        self._window.Flush(peer)

    def sync(self) -> None:
        """Order reads and writes."""
        self._window.Sync()

    def close(self) -> None:
        """Free the window. Collective; leaves the window as it is where the communicator was revoked."""
        self.memory = self.memory[:0]
        if not ulfm.is_revoked(self._mpi, self._comm):
            self._window.Unlock_all()
            self._window.Free()


class DeferredWindow:
    """Window over memory that all ranks see, as threads do. Transfers happen in `flush`, and not before."""

    def __init__(self, views: list[np.ndarray], rank: int) -> None:
        self._views = views
        self.memory = views[rank]
        self._begun: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # peer -> (target, source)

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        there = self._views[peer][at_bytes : at_bytes + buffer.size]
        self._begun.setdefault(peer, []).append((there, buffer))

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        there = self._views[peer][at_bytes : at_bytes + buffer.size]
        self._begun.setdefault(peer, []).append((buffer, there))

    def flush(self, peer: int) -> None:
        """Carry out the transfers that were begun with ``peer``."""
        for target, source in self._begun.pop(peer, []):
            target[...] = source

    def sync(self) -> None:
        """Do nothing: messages between threads order memory already."""

    def close(self) -> None:
        """Drop the views."""
        self._views = []


def allocate(mpi: Any, comm: Any, nbytes: int) -> MpiTransfers:
    """Return a tested window over ``comm``, an mpi4py communicator. Collective.

    Raises MissingCapabilityError, on all ranks, where the MPI library makes none or its transfers do not arrive.
    """
    transfers, reason = None, ""
    try:
        transfers = MpiTransfers(mpi, comm, nbytes + PROBE_BYTES)
    except mpi.Exception as error:
        reason = f"no window can be made: {error}"
    reasons = comm.allgather(reason)
    if not any(reasons):
        assert transfers is not None
        reasons = comm.allgather(_verify_window(mpi, comm, transfers, nbytes))
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
    if failures:
        raise MissingCapabilityError(
            f"this MPI library has no one-sided communication that works here ({'; '.join(failures)}); choose another "
            'transport than "rma"'
        )
    assert transfers is not None
    transfers.memory = transfers.memory[:nbytes]
    return transfers


def _verify_window(mpi: Any, comm: Any, window: MpiTransfers, nbytes: int) -> str:
    """Put a number to the next rank and get it back; return the fault, "" where there is none. Collective."""
    rank, size = comm.rank, comm.size
    sizes = comm.allgather(nbytes)
    following, before = (rank + 1) % size, (rank - 1) % size
    own, got = np.array([_MAGIC + rank], np.int64), np.zeros(1, np.int64)
    failed = ""
    try:
        window.put(own.view(np.uint8), following, sizes[following])
        window.flush(following)
    except mpi.Exception as error:
        failed = f"a put failed: {error}"
    comm.Barrier()
    window.sync()
    arrived = window.memory[nbytes:].copy().view(np.int64)
    if not failed and arrived[0] != _MAGIC + before:
        failed = f"what rank {before} put did not arrive"
    try:
        window.get(got.view(np.uint8), following, sizes[following])
        window.flush(following)
    except mpi.Exception as error:
        failed = failed or f"a get failed: {error}"
    if not failed and got[0] != _MAGIC + rank:
        failed = f"rank {following} does not give back what was put there"
    return failed
