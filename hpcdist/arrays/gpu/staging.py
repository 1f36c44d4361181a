"""Pinned host memory, and copies between pinned memory, a GPU, pageable memory and files.

Pinned memory is pooled by size. If pinning is refused, pageable memory is used, which is slower. A copy to the device
is queued on the current stream.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.gpu import device
from hpcdist.arrays.gpu.device import Event
from hpcdist.arrays.ranges import Range, cut
from hpcdist.errors import MissingCapabilityError

SMALLEST_BYTES: Final = 4096
BUSY_BYTES: Final = 256 << 20  # limit of copies to the device in flight; then the host waits for the oldest (empirical)


class _Block:
    def __init__(self, memory: Any, nbytes: int, pinned: bool) -> None:
        self.memory, self.nbytes, self.pinned = memory, nbytes, pinned


class _Pool:
    def __init__(self) -> None:
        # Reentrant: a finalizer runs in the thread that drops the last view, perhaps inside `lease` of that thread.
        self._lock = threading.RLock()
        self._free: dict[int, list[_Block]] = {}
        self.refusal = ""

    def lease(self, nbytes: int) -> np.ndarray:
        size = max(SMALLEST_BYTES, 1 << max(0, nbytes - 1).bit_length())  # the next power of two
        with self._lock:
            blocks = self._free.get(size)
            block = blocks.pop() if blocks else None
        if block is None:
            block = self._take(size)
        # The base of this array is a buffer and not an array, so numpy gives every view this array as its base.
        # The finalizer of this array therefore runs when no view is left.
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
    def __init__(self) -> None:
        self.stream: Any = None
        self.leaving: deque[tuple[Event, Array]] = deque()
        self.busy: deque[tuple[Event, np.ndarray]] = deque()
        self.busy_bytes = 0
        self.ledger: Ledger | None = None


_pool = _Pool()
_per_thread = _Local()


def lease(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array of ``size`` elements in pinned memory. Local."""
    _drop_finished_copies()
    return _pool.lease(size * dtype.itemsize).view(dtype)


def refusal() -> str:
    """Return the driver's error message if it has refused pinned memory, else "". Local."""
    return _pool.refusal


def begin_to_host(source: Array, target: np.ndarray, produced: Event | None = None) -> Event:
    """Start to copy ``source`` to the host array ``target`` after the event ``produced``. Return the end event."""
    if _per_thread.stream is None:
        _per_thread.stream = device.new_stream()
    (device.record() if produced is None else produced).hold_back(_per_thread.stream)
    # Wait only for the event: kernels that the consumer launches meanwhile do not delay the copy.
    device.to_host_on(_per_thread.stream, source, target)
    event = device.record(_per_thread.stream)
    _drop_finished_copies()
    _per_thread.leaving.append((event, source))
    return event


def to_host(source: Array) -> np.ndarray:
    """Return a copy of the GPU array ``source`` in pinned host memory. Waits for the copy. Local."""
    target = lease(source.size, source.dtype)
    begin_to_host(source, target).synchronize()
    _drop_finished_copies()
    return target


def to_device(source: np.ndarray, target: Any) -> Event:
    """Start to copy ``source`` to the GPU array ``target``. Do not change ``source`` before the returned event."""
    target.set(source)
    event = device.record()
    _per_thread.busy.append((event, source))  # the reference keeps the leased block out of the pool
    _per_thread.busy_bytes += source.nbytes
    return event


def _drop_finished_copies() -> None:
    # Copies of one stream finish in order: stop at the first copy in flight.
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
    """Let ``ledger`` count the pinned memory that this thread allocates from now on. None stops the counting."""
    _per_thread.ledger = ledger


def release() -> None:
    """Wait for this thread's copies, and free the pool's unused pinned blocks. Local."""
    for copies in (_per_thread.leaving, _per_thread.busy):
        while copies:
            copies.popleft()[0].synchronize()
    _per_thread.busy_bytes = 0
    _pool.drop()


BLOCK_BYTES: Final = 4 << 20

BlockCopy = Callable[[Range, np.ndarray], None]  # (range of the array, host block): fills or reads the block


def to_device_in_blocks(target: Array, fill: BlockCopy) -> None:
    """Fill the 1-D GPU array ``target`` in blocks. ``fill(range, block)`` writes elements ``range`` to ``block``."""
    in_flight: list[Event] = []
    for where in cut(Range(0, target.size), BLOCK_BYTES // target.dtype.itemsize):
        if len(in_flight) == 2:  # double buffering: one block is on the bus while the host fills the other
            in_flight.pop(0).synchronize()
        block = lease(where.size, target.dtype)
        fill(where, block)
        in_flight.append(to_device(block, target[where.slice]))


def to_host_in_blocks(source: Array, take: BlockCopy) -> None:
    """Copy the 1-D GPU array ``source`` to the host in blocks. Call ``take(range, block)`` for each block. Local."""
    produced = device.record()
    arriving: tuple[Range, np.ndarray, Event] | None = None
    for where in cut(Range(0, source.size), BLOCK_BYTES // source.dtype.itemsize):
        block = lease(where.size, source.dtype)
        # Start the next copy before the host reads the current block.
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
