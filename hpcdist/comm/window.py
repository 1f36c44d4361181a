"""One-sided memory windows: put, get and flush (MPI-3 passive target RMA).

A transfer does not notify the target. The origin must put, flush, and send a message. The target may read after it has
received this message and called `sync`. Ranks must not access the same bytes without such a message.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.comm import transport
from hpcdist.comm.mpi import ulfm
from hpcdist.comm.transport import EventSink
from hpcdist.errors import MissingCapabilityError, UsageError

PROBE_BYTES: Final = 8  # after the memory of each rank: tests a new window
_MAGIC: Final = 0x6870_6364_0000_0000


class Window(Protocol):
    """One-sided access to the memory of other ranks. All methods except `close` are local."""

    memory: np.ndarray  # (bytes of this rank, maybe 0) uint8

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Start to write ``buffer`` to rank ``peer`` at byte ``at_bytes``. Do not change ``buffer`` until `flush`."""

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Start to read from rank ``peer`` at byte ``at_bytes`` into ``buffer``, which is valid after `flush`."""

    def flush(self, peer: int) -> None:
        """Wait until all puts and gets of this rank with rank ``peer`` are complete on both ranks."""

    def sync(self) -> None:
        """Synchronise this rank's ``memory`` with remote accesses (MPI_Win_sync)."""

    def close(self) -> None:
        """Free the memory. No transfer may be in flight. Collective."""


class ObservedWindow:
    """Wrapper of the window ``transfers`` that checks the bounds of puts and gets, and records them as events."""

    def __init__(self, transfers: Window, name: str, sizes: list[int], events: Callable[[], EventSink]) -> None:
        self._transfers, self._name, self._sizes, self._events = transfers, name, sizes, events
        self.memory = transfers.memory

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        octets = self._checked(buffer, peer, at_bytes)
        token = self._events().begin(self._name, "put", str(buffer.dtype), buffer.size, buffer.nbytes, peer, 0)
        self._transfers.put(octets, peer, at_bytes)
        self._events().end(token)

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        octets = self._checked(buffer, peer, at_bytes)
        token = self._events().begin(self._name, "get", str(buffer.dtype), buffer.size, buffer.nbytes, peer, 0)
        self._transfers.get(octets, peer, at_bytes)
        self._events().end(token)

    def flush(self, peer: int) -> None:
        token = self._events().begin(self._name, "flush", "uint8", 0, 0, peer, 0)
        self._transfers.flush(peer)
        self._events().end(token)

    def sync(self) -> None:
        self._transfers.sync()

    def close(self) -> None:
        self.memory = self.memory[:0]
        self._transfers.close()

    def _checked(self, buffer: np.ndarray, peer: int, at_bytes: int) -> np.ndarray:
        if not isinstance(buffer, np.ndarray) or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise UsageError(
                f"a window takes 1-D contiguous arrays on the host, got {type(buffer).__name__} of shape "
                f"{buffer.shape}; copy the data into such an array first"
            )
        if not 0 <= peer < len(self._sizes) or at_bytes < 0 or at_bytes + buffer.nbytes > self._sizes[peer]:
            held = f"{self._sizes[peer]} bytes" if 0 <= peer < len(self._sizes) else "no memory"
            raise UsageError(
                f"window of communicator {self._name}: bytes {at_bytes} to {at_bytes + buffer.nbytes} of rank {peer} "
                f"are out of bounds, because rank {peer} has {held} in the window; use offsets inside the window"
            )
        return buffer.view(np.uint8)


class MpiTransfers:
    """MPI window with one access epoch (MPI_Win_lock_all) from creation to `close`."""

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        self._mpi, self._comm = mpi, comm
        # Allocated by the library: shared memory within a node, where a put is a copy.
        self._window = mpi.Win.Allocate(nbytes, 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self.memory = np.frombuffer(self._window.tomemory(), np.uint8)
        self.memory[...] = 0
        self.sync()

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        self._transfer(self._window.Put, buffer, peer, at_bytes)

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        self._transfer(self._window.Get, buffer, peer, at_bytes)

    def _transfer(self, call: Callable[..., None], buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        byte = self._mpi.BYTE
        for piece in transport.pieces(buffer.size):
            call([buffer[piece.slice], byte], peer, (at_bytes + piece.start, piece.size, byte))

    def flush(self, peer: int) -> None:
        self._window.Flush(peer)

    def sync(self) -> None:
        self._window.Sync()

    def close(self) -> None:
        self.memory = self.memory[:0]
        if not ulfm.is_revoked(self._mpi, self._comm):
            self._window.Unlock_all()
            self._window.Free()


class DeferredWindow:
    """Window for ranks that are threads. Data are copied only in `flush`, so that tests detect a missing `flush`."""

    def __init__(self, views: list[np.ndarray], rank: int) -> None:
        self._views = views
        self.memory = views[rank]
        self._begun: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # peer -> (target, source)

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        there = self._views[peer][at_bytes : at_bytes + buffer.size]
        self._begun.setdefault(peer, []).append((there, buffer))

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        there = self._views[peer][at_bytes : at_bytes + buffer.size]
        self._begun.setdefault(peer, []).append((buffer, there))

    def flush(self, peer: int) -> None:
        for target, source in self._begun.pop(peer, []):
            target[...] = source

    def sync(self) -> None:
        """Do nothing, because messages between threads already order memory accesses."""

    def close(self) -> None:
        self._views = []


def allocate(mpi: Any, comm: Any, nbytes: int) -> MpiTransfers:
    """Allocate and test a window of ``nbytes`` bytes. Raises MissingCapabilityError if a test fails. Collective."""
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
            f"this MPI library has no working one-sided communication ({'; '.join(failures)}); choose another "
            'transport than "rma"'
        )
    assert transfers is not None
    transfers.memory = transfers.memory[:nbytes]
    return transfers


def _verify_window(mpi: Any, comm: Any, window: MpiTransfers, nbytes: int) -> str:
    rank, size = comm.rank, comm.size
    sizes = comm.allgather(nbytes)
    following, before = (rank + 1) % size, (rank - 1) % size
    sent, received = np.array([_MAGIC + rank], np.int64), np.zeros(1, np.int64)
    failed = ""
    try:
        window.put(sent.view(np.uint8), following, sizes[following])
        window.flush(following)
    except mpi.Exception as error:
        failed = f"a put failed: {error}"
    comm.Barrier()
    window.sync()
    arrived = window.memory[nbytes:].copy().view(np.int64)
    if not failed and arrived[0] != _MAGIC + before:
        failed = f"the data that rank {before} put did not arrive"
    try:
        window.get(received.view(np.uint8), following, sizes[following])
        window.flush(following)
    except mpi.Exception as error:
        failed = failed or f"a get failed: {error}"
    if not failed and received[0] != _MAGIC + rank:
        failed = f"rank {following} did not return the data that was put there"
    return failed
