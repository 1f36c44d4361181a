"""One-sided memory windows: put, get and flush (MPI-3 passive target RMA).

Nobody on the other side takes part in a transfer, so nobody there learns of it either: whoever has put something
flushes it and then says so by a message, and whoever got that message may look, after `sync`. That order is all the
synchronisation there is; two ranks must never touch the same bytes without such a message between them.

mpi4py is handed in by `mpi.communicator.MpiCommunicator`, never imported. Ranks that are threads have
`DeferredWindow`, which moves nothing before it is flushed: code that forgets to flush fails there too.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.comm.events import EventSink
from hpcdist.comm.mpi import ulfm
from hpcdist.errors import MissingCapabilityError, UsageError

PROBE_BYTES: Final = 8  # behind the memory of each rank: the window is tried out there when it is made
_MAGIC: Final = 0x6870_6364_0000_0000


class Window(Protocol):
    """``memory`` of each member (bytes, possibly none) that all members reach. All calls but `close` are local.

    A buffer that is put must not change, and one that is got must not be read, before the `flush`.
    """

    memory: np.ndarray  # (bytes of this rank,) uint8

    def put(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write ``buffer`` into the memory of ``peer``, from byte ``at_bytes`` on."""
        ...

    def get(self, buffer: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read the memory of ``peer``, from byte ``at_bytes`` on, into ``buffer``."""
        ...

    def flush(self, peer: int) -> None:
        """Return when all that this rank has begun with ``peer`` is complete on both sides."""
        ...

    def sync(self) -> None:
        """Order own reads and writes of ``memory`` with those of the others: after a notice, and before one."""
        ...

    def close(self) -> None:
        """Give the memory back; nothing may be under way. Collective."""
        ...


class Transfers(Protocol):
    """The bare transport of a window, in bytes."""

    memory: np.ndarray

    def put(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        ...

    def get(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        ...

    def flush(self, peer: int) -> None:
        """Complete what was begun with ``peer``."""
        ...

    def sync(self) -> None:
        """Order reads and writes."""
        ...

    def close(self) -> None:
        """Give the memory back. Collective."""
        ...


class ObservedWindow:
    """A window whose operations are checked and reported. What is put or got counts as sent by the rank that asked."""

    def __init__(self, transfers: Transfers, name: str, sizes: list[int], events: Callable[[], EventSink]) -> None:
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
        """Complete what was begun with ``peer``."""
        token = self._events().begin(self._name, "flush", "uint8", 0, 0, peer, 0)
        self._transfers.flush(peer)
        self._events().end(token)

    def sync(self) -> None:
        """Order reads and writes."""
        self._transfers.sync()

    def close(self) -> None:
        """Give the memory back. Collective."""
        self.memory = self.memory[:0]
        self._transfers.close()

    def _checked(self, buffer: np.ndarray, peer: int, at_bytes: int) -> np.ndarray:
        """Return the bytes of ``buffer``; the library would write past the end of a window without a word."""
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
    """An MPI window in one access epoch from its making to its end (lock_all)."""

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        self._mpi, self._comm = mpi, comm
        # Allocated by the library: on one node it is then memory that all ranks map, and a put is a copy.
        self._window = mpi.Win.Allocate(nbytes, 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self.memory = np.frombuffer(self._window.tomemory(), np.uint8)
        self.memory[...] = 0
        self.sync()

    def put(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        self._window.Put([octets, self._mpi.BYTE], peer, (at_bytes, octets.size, self._mpi.BYTE))

    def get(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        self._window.Get([octets, self._mpi.BYTE], peer, (at_bytes, octets.size, self._mpi.BYTE))

    def flush(self, peer: int) -> None:
        """Complete what was begun with ``peer``."""
        self._window.Flush(peer)

    def sync(self) -> None:
        """Order reads and writes."""
        self._window.Sync()

    def close(self) -> None:
        """Give the memory back. Collective, unless the communicator was revoked: then it can only be left as it is."""
        self.memory = self.memory[:0]
        if not ulfm.is_given_up(self._mpi, self._comm):
            self._window.Unlock_all()
            self._window.Free()


class DeferredWindow:
    """Memory of ranks that all see each other's, as threads do. What is begun happens in `flush`, and not before."""

    def __init__(self, views: list[np.ndarray], rank: int) -> None:
        self._views = views
        self.memory = views[rank]
        self._begun: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # peer -> (target, source)

    def put(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to write."""
        there = self._views[peer][at_bytes : at_bytes + octets.size]
        self._begun.setdefault(peer, []).append((there, octets))

    def get(self, octets: np.ndarray, peer: int, at_bytes: int) -> None:
        """Begin to read."""
        there = self._views[peer][at_bytes : at_bytes + octets.size]
        self._begun.setdefault(peer, []).append((octets, there))

    def flush(self, peer: int) -> None:
        """Carry out what was begun with ``peer``."""
        for target, source in self._begun.pop(peer, []):
            target[...] = source

    def sync(self) -> None:
        """Nothing has to be ordered: messages between threads do."""

    def close(self) -> None:
        """Drop the views."""
        self._views = []


def allocate(mpi: Any, comm: Any, nbytes: int) -> MpiTransfers:
    """Return a window over ``comm``, an mpi4py communicator, that has been tried out. Collective.

    Raises MissingCapabilityError, on all ranks, where the MPI library makes none or its transfers do not arrive.
    """
    found, reason = None, ""
    try:
        found = MpiTransfers(mpi, comm, nbytes + PROBE_BYTES)
    except mpi.Exception as error:
        reason = f"no window can be made: {error}"
    reasons = comm.allgather(reason)
    if not any(reasons):
        assert found is not None
        reasons = comm.allgather(_verify_window(mpi, comm, found, nbytes))
    told = [f"rank {rank}: {said}" for rank, said in enumerate(reasons) if said]
    if told:
        raise MissingCapabilityError(
            f"this MPI library has no one-sided communication that works here ({'; '.join(told)}); choose another "
            'transport than "rma"'
        )
    assert found is not None
    found.memory = found.memory[:nbytes]
    return found


def _verify_window(mpi: Any, comm: Any, window: MpiTransfers, nbytes: int) -> str:
    """Write to the next rank and read from the one before; return what went wrong, "" where nothing did. Collective."""
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
