"""Scratch buffers of the algorithms, segments of a buffer, and receives posted in advance.

Each thread reuses its scratch buffers between calls, because fresh arrays would cause page faults.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.ranges import Range, split
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request
from hpcdist.errors import UsageError

AHEAD: Final = 2  # receives posted at any time: the one to wait for, and the next

Buffers: TypeAlias = dict[tuple[str, str], Array]  # (name, "cpu" or "gpu") -> bytes


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.arrays: Buffers = {}
        self.ledger: Ledger | None = None


_here = _Workspace()


def scratch(name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return this thread's scratch buffer ``name`` of ``size`` elements, on the device of the array ``like``. Local."""
    return scratch_in(_here.arrays, name, size, dtype, like)


def scratch_in(buffers: Buffers, name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return the array ``name`` of ``size`` elements from the dict ``buffers``. Local.

    If the array is missing or too small, allocate a new array on the device of the array ``like``.
    """
    nbytes = size * dtype.itemsize
    key = (name, "gpu" if backend.is_device(like) else "cpu")
    if key not in buffers or buffers[key].nbytes < nbytes:
        buffers.pop(key, None)  # free the old buffer before the allocation of the new one
        buffers[key] = count_in_ledger(backend.empty(nbytes, np.dtype(np.uint8), key[1]))
    return buffers[key][:nbytes].view(dtype)


def count_in_ledger(array: Array) -> Array:
    """Count ``array`` as communication memory in this thread's memory statistics, and return ``array``. Local."""
    return array if _here.ledger is None else _here.ledger.track(array, "communication")


def account(ledger: Ledger | None) -> None:
    """Count the scratch buffers of this thread in the memory statistics ``ledger``. None stops the count. Local."""
    if ledger is not None and ledger is not _here.ledger:
        for array in _here.arrays.values():
            ledger.track(array, "communication")
    _here.ledger = ledger
    staging.account(ledger)


def ledger() -> Ledger | None:
    """Return the memory statistics of this thread, set by `account`, or None. Local."""
    return _here.ledger


def release() -> None:
    """Free this thread's scratch buffers and all unused pinned memory. Local."""
    _here.arrays.clear()
    staging.release()


def check_ranges(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Raise UsageError unless ``ranges`` has one range per rank of ``comm``, each inside ``buffer``. Local."""
    if len(ranges) != comm.size or any(part.stop > buffer.size for part in ranges):
        raise UsageError(
            f"a collective of {comm.size} ranks over a buffer of {buffer.size} elements needs one range of the buffer "
            f"for each rank, got the ranges {[(part.start, part.stop) for part in ranges]}"
        )


def gather_counts(comm: Communicator, row: np.ndarray) -> np.ndarray:
    """Return an int64 array with one row per rank: row r is the int64 array ``row`` of rank r. Collective."""
    gathered = np.empty((comm.size, *row.shape), np.int64)
    gathered[comm.rank] = row
    comm.all_gather(gathered.reshape(-1), [Range(row.size * rank, row.size * (rank + 1)) for rank in range(comm.size)])
    return gathered


def check_segment(segment_bytes: int) -> None:
    """Raise UsageError unless ``segment_bytes`` is at least 1. Local."""
    if segment_bytes < 1:
        raise UsageError(f"segment_bytes must be at least 1, and equal on all ranks, got {segment_bytes}")


def cut_evenly(part: Range, itemsize: int, segment_bytes: int) -> list[Range]:
    """Split the range ``part`` into the fewest equal ranges of at most about ``segment_bytes`` bytes. Return the list.

    ``itemsize``: bytes per element. The ranges are aligned to 64 bytes.
    """
    count = -(-part.size * itemsize // segment_bytes)
    return [piece.shift(part.start) for piece in split(part.size, count, itemsize) if piece] if count else []


def join(ranges: Iterable[Range]) -> list[Range]:
    """Return the non-empty ranges of ``ranges`` in order, with adjacent ranges merged."""
    runs: list[Range] = []
    for part in ranges:
        if part and runs and runs[-1].stop == part.start:
            runs[-1] = Range(runs[-1].start, part.stop)
        elif part:
            runs.append(part)
    return runs


def slots(name: str, pieces: Sequence[Range], dtype: np.dtype, like: Array) -> list[Array]:
    """Return a list of scratch buffers, one for each range in ``pieces``. Buffers i and i + 2 share memory. Local.

    ``name``: key of the scratch memory. ``like``: array on the device to use.
    """
    longest = max((piece.size for piece in pieces), default=0)
    memory = scratch(name, AHEAD * longest, dtype, like)
    starts = [index % AHEAD * longest for index in range(len(pieces))]
    return [memory[start : start + piece.size] for start, piece in zip(starts, pieces, strict=True)]


class PostedReceives:
    """Sequence of receives from rank ``source``, one into each array of ``targets``. At most two are in flight."""

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
        """Wait for the next message. Return the array that holds the message until the next call. Local."""
        # With targets from `slots`, the receive posted here reuses the memory that the previous call returned.
        self._post()
        self._posted.popleft().wait()
        self._taken += 1
        return self._targets[self._taken - 1]


def wait_all(requests: Iterable[Request]) -> None:
    """Wait until all ``requests`` are complete. Local."""
    for request in requests:
        request.wait()
