"""Scratch memory of the algorithms, segments of a buffer, and receives posted ahead of their use.

Scratch is reused from call to call: a fresh array in every step would cause page faults again and again, and caches
of registered memory in the message layer are keyed by address. Each thread has its own, so that a collective may run
beside another one.

Pipelined algorithms cut a buffer into segments: while one is combined or passed on, the next are on their way. Sender
and receiver cut alike, because both cut the ranges that all ranks know; messages between two ranks with one tag arrive
in the order in which they were sent.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range, split
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import UsageError

AHEAD: Final = 2  # receives posted at any time: one that is waited for, one that may already arrive

Buffers: TypeAlias = dict[tuple[str, str], Array]  # (name, "cpu" or "gpu") -> bytes


class _Workspace(threading.local):
    """Scratch of one thread, by name, and the ledger that counts it."""

    def __init__(self) -> None:
        self.arrays: Buffers = {}
        self.ledger: Ledger | None = None


_here = _Workspace()


def scratch(name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return ``size`` uninitialised elements where ``like`` lives; the next call of this name overwrites them (local).

    Callers that may be active at once use different names.
    """
    return scratch_in(_here.arrays, name, size, dtype, like)


def scratch_in(buffers: Buffers, name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return the same as `scratch`, out of ``buffers``, which belong to the caller (local)."""
    nbytes = size * dtype.itemsize
    key = (name, "gpu" if backend.is_device(like) else "cpu")
    if key not in buffers or buffers[key].nbytes < nbytes:
        buffers.pop(key, None)  # before the larger one is allocated: never both at once
        buffers[key] = count_in_ledger(backend.empty(nbytes, np.dtype(np.uint8), key[1]))
    return buffers[key][:nbytes].view(dtype)


def count_in_ledger(array: Array) -> Array:
    """Enter ``array`` in this thread's ledger, if it has one, and return it (local)."""
    return array if _here.ledger is None else _here.ledger.track(array, "communication")


def account(ledger: Ledger | None) -> None:
    """Count the scratch of this thread, held now or later, as "communication" of ``ledger``; None stops (local)."""
    if ledger is not None and ledger is not _here.ledger:
        for array in _here.arrays.values():
            ledger.track(array, "communication")
    _here.ledger = ledger
    staging.account(ledger)


def ledger() -> Ledger | None:
    """Return the ledger that counts the scratch of this thread, for a thread that works for it (local)."""
    return _here.ledger


def release() -> None:
    """Drop the scratch of this thread, and pinned memory that nobody uses (local)."""
    _here.arrays.clear()
    staging.release()


def check_ranges(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Raise UsageError unless ``ranges`` are one for each rank and inside ``buffer`` (local)."""
    if len(ranges) != comm.size or any(part.stop > buffer.size for part in ranges):
        raise UsageError(
            f"a collective of {comm.size} ranks over {buffer.size} elements needs one range inside them for each rank, "
            f"got {[(part.start, part.stop) for part in ranges]}"
        )


def gather_counts(comm: Communicator, own: np.ndarray) -> np.ndarray:
    """Return ``own``, int64 of the same shape on all ranks, of every rank: (ranks, ...). Collective over ``comm``."""
    everybody = np.empty((comm.size, *own.shape), np.int64)
    everybody[comm.rank] = own
    comm.all_gather(everybody.reshape(-1), [Range(own.size * rank, own.size * (rank + 1)) for rank in range(comm.size)])
    return everybody


def check_segment(segment_bytes: int) -> None:
    """Raise UsageError unless pieces can have ``segment_bytes`` (local)."""
    if segment_bytes < 1:
        raise UsageError(f"segment_bytes = {segment_bytes}; it must be at least 1, and the same on every rank")


def cut_evenly(part: Range, itemsize: int, segment_bytes: int) -> list[Range]:
    """Cut ``part`` into as few pieces as keep to ``segment_bytes``, balanced in blocks of 64 bytes.

    A piece may be one block longer than ``segment_bytes``; an empty range has no pieces.
    """
    count = -(-part.size * itemsize // segment_bytes)
    return [piece.shift(part.start) for piece in split(part.size, count, itemsize) if piece] if count else []


def join(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges with neighbours made one and empty ones left out, in the order given."""
    runs: list[Range] = []
    for part in ranges:
        if part and runs and runs[-1].stop == part.start:
            runs[-1] = Range(runs[-1].start, part.stop)
        elif part:
            runs.append(part)
    return runs


def slots(name: str, pieces: Sequence[Range], dtype: np.dtype, like: Array) -> list[Array]:
    """Return scratch for each of ``pieces``, to be received one after the other by `PostedReceives` (local).

    Piece i lies where piece i - AHEAD did: little memory, which stays in the cache.
    """
    longest = max((piece.size for piece in pieces), default=0)
    memory = scratch(name, AHEAD * longest, dtype, like)
    starts = [index % AHEAD * longest for index in range(len(pieces))]
    return [memory[start : start + piece.size] for start, piece in zip(starts, pieces, strict=True)]


class PostedReceives:
    """The messages of one rank with one tag, into ``targets`` in this order; AHEAD of them are posted at any time."""

    def __init__(self, comm: Communicator, source: int, targets: Sequence[Array], tag: int = 0) -> None:
        self._comm, self._source, self._targets, self._tag = comm, source, targets, tag
        self._posted: deque[Request] = deque()
        self._taken = 0
        self._post()

    def _post(self) -> None:
        first = self._taken + len(self._posted)
        for target in self._targets[first : self._taken + AHEAD]:
            self._posted.append(self._comm.irecv(target, self._source, self._tag))

    def take(self) -> Array:
        """Wait for the next message and return its target, which is the caller's until the next call (local)."""
        # With targets of `slots` the receive posted here reuses the memory of the piece that was returned last.
        self._post()
        self._posted.popleft().wait()
        self._taken += 1
        return self._targets[self._taken - 1]


def wait_all(requests: Iterable[Request]) -> None:
    """Return when all of ``requests`` are complete (local)."""
    for request in requests:
        request.wait()
