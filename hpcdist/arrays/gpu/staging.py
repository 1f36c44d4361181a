"""Pinned memory of the host, and copies between it, a GPU, and pageable memory or files.

Pinned blocks are allocated once and pooled. The driver copies pinned memory by DMA, concurrently with kernels and the
host; from pageable memory it copies twice and blocks the host. Message layers cache registrations by address, so the
pool hands the same blocks out again (sizes are rounded up to powers of two for that). Where the system refuses pinned
memory the blocks are pageable: slower, otherwise the same.

Order of a copy to the host: the producing stream records an event, the copy waits for that event and nothing else,
the host waits for the event behind the copy. Until then the source is referred to here: cupy would give its memory to
the next kernels of the producing stream. Copies to the device are made on the stream of the consumer, which orders
them before its kernels; their block returns to the pool when the event behind the copy has passed.

Long copies to and from places that are not pinned (`to_device_in_blocks`, `to_host_in_blocks`) go through pinned
blocks, two at a time: while one is on the bus, the host fills or empties the other.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import device
from hpcdist.arrays.gpu.device import Event
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range, cut
from hpcdist.errors import MissingCapabilityError

SMALLEST_BYTES: Final = 4096
BUSY_BYTES: Final = 256 << 20  # of copies to the device under way, before the host waits for the oldest (empirical)


class _Block:
    """A block of the pool. Pageable blocks are used once, so that pinned memory is tried again."""

    def __init__(self, memory: Any, nbytes: int, pinned: bool) -> None:
        self.memory, self.nbytes, self.pinned = memory, nbytes, pinned


class _Pool:
    """Pool of the pinned blocks of this process, free ones by size."""

    def __init__(self) -> None:
        # A finalizer runs in whatever thread drops the last view, also inside of `lease` of the same thread: reentrant.
        self._lock = threading.RLock()
        self._free: dict[int, list[_Block]] = {}
        self.refusal = ""

    def lease(self, nbytes: int) -> np.ndarray:
        """Return ``nbytes`` bytes; the block is free again when the array, and every view of it, is collected."""
        size = max(SMALLEST_BYTES, 1 << max(0, nbytes - 1).bit_length())  # the next power of two
        with self._lock:
            blocks = self._free.get(size)
            block = blocks.pop() if blocks else None
        if block is None:
            block = self._take(size)
        # numpy collapses chains of bases only through arrays: the base of this one is a buffer, so that every view has
        # this array as its base and keeps it alive. Its finalizer then means that no view is left.
        array = np.frombuffer(block.memory, np.uint8, nbytes)
        weakref.finalize(array, self._give_back, size, block).atexit = False
        return array

    def _take(self, size: int) -> _Block:
        try:
            block = _Block(device.pinned(size), size, pinned=True)
        except MissingCapabilityError as error:
            self.refusal = str(error)
            block = _Block(bytearray(size), size, pinned=False)
        if _per_thread.ledger is not None:
            _per_thread.ledger.track(block, "communication")  # type: ignore[arg-type]
        return block

    def _give_back(self, size: int, block: _Block) -> None:
        if block.pinned:
            with self._lock:
                self._free.setdefault(size, []).append(block)

    def drop(self) -> None:
        with self._lock:
            self._free.clear()


class _Local(threading.local):
    """State of a thread: its copy stream, and what copies under way still read, on the device and in blocks."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.leaving: deque[tuple[Event, Array]] = deque()
        self.busy: deque[tuple[Event, np.ndarray]] = deque()
        self.busy_bytes = 0
        self.ledger: Ledger | None = None


_pool = _Pool()
_per_thread = _Local()


def lease(size: int, dtype: np.dtype) -> np.ndarray:
    """Return ``size`` uninitialised elements of pinned memory, free again when the last view is collected (local)."""
    _drop_finished_copies()
    return _pool.lease(size * dtype.itemsize).view(dtype)


def refusal() -> str:
    """Return why pinned memory was refused; "" where it was not (local)."""
    return _pool.refusal


def begin_to_host(source: Array, target: np.ndarray, produced: Event | None = None) -> Event:
    """Begin to copy ``source`` into ``target``, and return the event after which ``target`` may be read (local).

    ``produced`` is the event behind the kernels that write ``source``; by default it is recorded now.
    """
    if _per_thread.stream is None:
        _per_thread.stream = device.new_stream()
    (device.record() if produced is None else produced).hold_back(_per_thread.stream)
    # The event only: kernels that the consumer launches meanwhile do not delay the copy.
    device.to_host_on(_per_thread.stream, source, target)
    event = device.record(_per_thread.stream)
    _drop_finished_copies()
    _per_thread.leaving.append((event, source))
    return event


def to_host(source: Array) -> np.ndarray:
    """Return a complete copy of ``source`` in pinned memory (local)."""
    target = lease(source.size, source.dtype)
    begin_to_host(source, target).synchronize()
    _drop_finished_copies()
    return target


def to_device(source: np.ndarray, target: Any) -> Event:
    """Begin to copy ``source`` into ``target`` on the current stream; kernels launched later see it (local).

    Returns the event after which ``source`` may be written; until then its block does not return to the pool.
    """
    target.set(source)
    event = device.record()
    _per_thread.busy.append((event, source))  # this reference keeps the finalizer of the lease from running
    _per_thread.busy_bytes += source.nbytes
    return event


def _drop_finished_copies() -> None:
    """Let go of what finished copies have read; wait for the oldest block while too much is under way."""
    # Oldest first: copies of one stream end in order, so those behind one under way are not looked at.
    busy, leaving = _per_thread.busy, _per_thread.leaving
    while leaving and leaving[0][0].done:
        leaving.popleft()
    while busy:
        event, block = busy[0]
        if not event.done:
            if _per_thread.busy_bytes <= BUSY_BYTES:
                return
            event.synchronize()
        busy.popleft()
        _per_thread.busy_bytes -= block.nbytes


def account(ledger: Ledger | None) -> None:
    """Count the blocks that this thread takes from now on as "communication" of ``ledger``; None stops (local)."""
    _per_thread.ledger = ledger


def release() -> None:
    """Wait for this thread's copies, and give the free blocks back (local)."""
    for copies in (_per_thread.leaving, _per_thread.busy):
        while copies:
            copies.popleft()[0].synchronize()
    _per_thread.busy_bytes = 0
    _pool.drop()


BLOCK_BYTES: Final = 4 << 20

BlockCopy = Callable[[Range, np.ndarray], None]  # (range of the array, block of host memory): fills or reads the block


def to_device_in_blocks(target: Array, fill: BlockCopy) -> None:
    """Copy to ``target``, 1-D on a GPU, the blocks that ``fill`` writes; kernels launched later see them (local)."""
    under_way: list[Event] = []
    for where in cut(Range(0, target.size), BLOCK_BYTES // target.dtype.itemsize):
        if len(under_way) == 2:  # double buffering: one block is on the bus while the host fills the other
            under_way.pop(0).synchronize()
        block = lease(where.size, target.dtype)
        fill(where, block)
        under_way.append(to_device(block, target[where.slice]))


def to_host_in_blocks(source: Array, take: BlockCopy) -> None:
    """Copy ``source``, 1-D on a GPU, block by block and call ``take`` with each; all are taken on return (local)."""
    produced = device.record()
    arriving: tuple[Range, np.ndarray, Event] | None = None
    for where in cut(Range(0, source.size), BLOCK_BYTES // source.dtype.itemsize):
        block = lease(where.size, source.dtype)
        # Begin the next copy before the host works on the block that arrives.
        following = (where, block, begin_to_host(source[where.slice], block, produced))
        _finish_block(arriving, take)
        arriving = following
    _finish_block(arriving, take)
    _drop_finished_copies()


def _finish_block(arriving: tuple[Range, np.ndarray, Event] | None, take: BlockCopy) -> None:
    if arriving is not None:
        where, block, event = arriving
        event.synchronize()
        take(where, block)
