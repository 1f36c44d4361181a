"""Streams, events, graphs, pinned memory and shared handles of the double: copies are late, and early reads show.


A copy between the device and pinned memory is deferred until somebody waits for it, like DMA in the worst case. Until
then the target is full of 0xFF. Kernels run immediately, but in stream order: deferred work of the stream runs first. A
copy on one stream of data that a kernel on another stream writes raises without an event between them. Reading memory
that another "process" (a thread) shares also raises while its kernels may still write it.

While a stream is captured, kernels are recorded and not run. Calls that CUDA does not capture raise, and so does memory
that does not come from a separate `MemoryPool`. A graph works on the addresses that it was captured with. Its launch
raises if memory there was freed.
"""

import ctypes
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class StreamOrderError(AssertionError):
    """Work on one stream uses data that another stream may still be writing."""


class CUDARuntimeError(RuntimeError):
    """An error of the driver."""


class Local(threading.local):
    """The state of a process, which is a thread here."""

    def __init__(self) -> None:
        self.null: Stream | None = None
        self.entered: list[Stream] = []  # streams entered by ``with``, the current stream last
        self.pool: MemoryPool | None = None  # where memory is taken from
        self.opened: set[int] = set()
        OPENED.append(self.opened)


class Stream:
    """Work in order.

    ``_given`` counts it, and ``_done`` is the number of the last work that the host knows to be done.
    """

    _numbers = iter(range(16, 1 << 60, 16))

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = next(Stream._numbers)
        self.thread = threading.current_thread().name
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._given = self._done = 0
        self._behind: dict[Stream, int] = {}  # other stream -> number of its last work that precedes the next work here
        self._is_null, self._non_blocking = null, non_blocking
        self._recorded: list[Recorded] | None = None  # kernels recorded by the current capture
        STREAMS[self.ptr] = self

    def __enter__(self) -> "Stream":
        LOCAL.entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert LOCAL.entered.pop() is self

    def begin_capture(self, mode: int | None = None) -> None:
        if self._is_null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        assert self._non_blocking, "work on the default stream, of any thread, would end the capture"
        if self._recorded is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the operation cannot be performed in the present state")
        self._recorded = []

    def end_capture(self) -> "Graph":
        if self._recorded is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the operation cannot be performed in the present state")
        recorded, self._recorded = self._recorded, None
        return Graph(recorded)

    def is_capturing(self) -> bool:
        return self._recorded is not None

    def _give(self, work: Callable[[], None] | None = None) -> int:
        """Defer ``work`` and return its number. ``work`` is None for a kernel that has already run."""
        with self._lock:
            self._given += 1
            if work is not None:
                self._late.append((self._given, work))
            return self._given

    def _run(self, number: int) -> None:
        """Run the deferred work up to ``number``."""
        with self._lock:
            while self._late and self._late[0][0] <= number:
                self._late.pop(0)[1]()

    def _finish(self, number: int) -> None:
        """Mark work up to ``number`` as done, after a wait of the host."""
        self._run(number)
        self._done = max(self._done, number)

    def _comes_behind(self, other: "Stream", number: int) -> bool:
        return other is self or self._behind.get(other, 0) >= number or other._done >= number

    def synchronize(self) -> None:
        check_not_captured("a wait of the host")
        WAITED(self, self._given)

    def wait_event(self, event: "Event") -> None:
        check_not_captured("an event of another stream")
        stream, number = event._behind()

        def wait() -> None:
            stream._run(number)

        self._behind[stream] = max(self._behind.get(stream, 0), number)
        for other, far in stream._behind.items():
            self._behind[other] = max(self._behind.get(other, 0), far)
        self._give(wait)

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    @property
    def done(self) -> bool:
        return self._done >= self._given


class Event:
    """A position in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._place: tuple[Stream, int] | None = None
        self._timed = not disable_timing

    def _behind(self) -> tuple[Stream, int]:
        if self._place is None:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the event was never recorded")
        return self._place

    def record(self, stream: Stream | None = None) -> None:
        check_not_captured("an event that the host looks at")
        stream = stream or current_stream()
        self._place = stream, stream._given
        self._time_s = time.perf_counter()

    def synchronize(self) -> None:
        check_not_captured("a wait of the host")
        WAITED(*self._behind())

    @property
    def done(self) -> bool:
        check_not_captured("a look at an event")
        stream, number = self._behind()
        return stream._done >= number


STREAMS: "weakref.WeakValueDictionary[int, Stream]" = weakref.WeakValueDictionary()  # by their pointers
OPENED: list[set[int]] = []  # handles opened by each process
LOCAL = Local()
WRITTEN: dict[int, tuple[Stream, int]] = {}  # address of an allocation -> the last kernel that wrote to it
UNSEEN: list[tuple[int, int, Stream, int]] = []  # parts of shared memory, and kernels that wrote to them
READING: list[tuple[int, int]] = []  # pinned memory that copies to the device have still to read


def current_stream() -> Stream:
    if LOCAL.entered:
        return LOCAL.entered[-1]
    if LOCAL.null is None:
        LOCAL.null = Stream(null=True)
    return LOCAL.null


def check_not_captured(what: str) -> None:
    if LOCAL.entered and LOCAL.entered[-1].is_capturing():
        raise CUDARuntimeError(
            f"cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing: {what}"
        )


def _waited(stream: Stream, number: int) -> None:
    """Mark as done, in every stream, the work that precedes ``number`` of ``stream``, because the host waited."""
    for other, far in stream._behind.items():
        other._finish(far)
    stream._finish(number)


WAITED: Callable[[Stream, int], None] = _waited  # the double of cupy counts the call as well


def elapsed_ms(start: Event, end: Event) -> float:
    if not (start._timed and end._timed):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
    return (end._time_s - start._time_s) * 1e3


def allocation_of(host: np.ndarray) -> np.ndarray:
    """Return the allocation that contains an array."""
    while isinstance(host.base, np.ndarray):
        host = host.base
    return host


def root_of(host: np.ndarray) -> int:
    """Return the address of the allocation that contains an array."""
    return int(allocation_of(host).__array_interface__["data"][0])


def wrote(host: np.ndarray, stream: Stream | None = None, root: int | None = None) -> None:
    """Record that a kernel on ``stream`` (default: the current one) wrote ``host`` in the allocation ``root``."""
    stream, root = stream or current_stream(), root_of(host) if root is None else root
    number = stream._give()
    WRITTEN[root] = stream, number
    if root in SHARED:
        UNSEEN[:] = [row for row in UNSEEN if row[2]._done < row[3]]
        UNSEEN.append((*_extent(host), stream, number))


def _extent(host: np.ndarray) -> tuple[int, int]:
    start = int(host.__array_interface__["data"][0])
    return start, start + host.nbytes


def forget(host: np.ndarray) -> None:
    """Drop the records of earlier writes to newly allocated memory."""
    start, end = _extent(host)
    WRITTEN.pop(root_of(host), None)
    UNSEEN[:] = [row for row in UNSEEN if row[1] <= start or end <= row[0]]


def check_read(host: np.ndarray, root: int | None = None) -> None:
    """Check a read of ``host`` on the current stream: the writer of shared memory must be known to be done."""
    if (root_of(host) if root is None else root) in SHARED:
        start, end = _extent(host)
        for first, last, stream, number in tuple(UNSEEN):
            if start < last and first < end and not current_stream()._comes_behind(stream, number):
                raise StreamOrderError(f"{stream.thread} may still be writing what this kernel reads")


def check_copy(host: np.ndarray, stream: Stream) -> None:
    """Check that a copy on ``stream`` is ordered after the kernel that writes ``host``."""
    writer, number = WRITTEN.get(root_of(host), (stream, 0))
    if writer.thread == threading.current_thread().name and not stream._comes_behind(writer, number):
        raise StreamOrderError("a copy is given to a stream that does not wait for the kernels that write its source")


# Kernels, at once or captured
ISSUED: Counter[tuple[str, str]] = Counter()  # (thread, "kernel", "captured" or "graph") -> calls from Python
Work = Callable[..., object]  # of the arrays of a kernel


class Place:
    """The address of an array. It does not keep the memory alive."""

    def __init__(self, host: np.ndarray) -> None:
        allocation = allocation_of(host)
        self._allocation, self.root = weakref.ref(allocation), root_of(host)
        self._low, self._high = np.lib.array_utils.byte_bounds(host)
        self._about = host.shape, host.dtype, int(host.__array_interface__["data"][0]) - self._low, host.strides

    def array(self) -> np.ndarray:
        """Return the array that is at the address now. Raises if its memory was freed."""
        if self._allocation() is None:
            raise CUDARuntimeError("cudaErrorIllegalAddress: memory that a graph was captured with is freed")
        shape, dtype, offset, strides = self._about
        if self._high == self._low:
            return np.empty(shape, dtype)
        memory = np.frombuffer((ctypes.c_uint8 * (self._high - self._low)).from_address(self._low), np.uint8)
        return np.ndarray(shape, dtype, memory, offset, strides)


Recorded = tuple[Work, Sequence[Place], Sequence[int]]  # work, its arrays, and which of them it writes


class Graph:
    """Captured kernels, which are launched together."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._recorded = tuple(recorded)

    def launch(self, stream: Stream | None = None) -> None:
        check_not_captured("the launch of a graph")
        stream = stream or current_stream()
        ISSUED[threading.current_thread().name, "graph"] += 1
        stream._run(stream._given)
        for work, places, written in self._recorded:
            arrays = [place.array() for place in places]
            for array, place in zip(arrays, places, strict=True):
                check_read(array, place.root)
            work(*arrays)
            for number in written:
                wrote(arrays[number], stream, places[number].root)


def run(work: Work, arrays: Sequence[np.ndarray], written: Sequence[int]) -> None:
    """Run ``work`` on ``arrays``, or record it during a capture.

    ``written`` are the indices of the arrays that it writes.
    """
    stream, name = current_stream(), threading.current_thread().name
    if stream._recorded is not None:
        ISSUED[name, "captured"] += 1
        stream._recorded.append((work, [Place(array) for array in arrays], written))
        return
    ISSUED[name, "kernel"] += 1
    if arrays:
        stream._run(stream._given)
    for array in arrays:
        check_read(array)
    work(*arrays)
    for number in written:
        wrote(arrays[number])


class MemoryPool:
    """Memory that is returned to this pool only. The pool keeps all memory that was ever allocated from it."""

    def __init__(self) -> None:
        self.taken: list[np.ndarray] = []

    def malloc(self, size: int) -> "MemoryPointer":
        raise NotImplementedError("memory is taken within `using_allocator`")

    def total_bytes(self) -> int:
        return sum(array.nbytes for array in self.taken)


@contextmanager
def using_allocator(allocator: Callable[[int], Any]) -> Iterator[None]:
    """Allocate memory of this thread from the pool of ``allocator``."""
    before, LOCAL.pool = LOCAL.pool, allocator.__self__  # type: ignore[attr-defined]
    try:
        yield
    finally:
        LOCAL.pool = before


def allocated(host: np.ndarray) -> None:
    """Record an allocation from the pool of this thread, which is required while a stream is captured."""
    if LOCAL.pool is None:
        check_not_captured("memory of the common pool, which is given to others before the graph is launched")
    else:
        LOCAL.pool.taken.append(allocation_of(host))


# Pinned memory: known by its addresses
_PINNED: dict[int, int] = {}
LIMIT: dict[str, int] = {}  # "pinned": how many bytes of pinned memory there may be; none: no limit


class Pinned(bytearray):
    """Page-locked memory of the host, filled with values that reveal a read before a write."""


def alloc_pinned_memory(nbytes: int) -> Pinned:
    check_not_captured("pinned memory")
    if sum(end - start for start, end in list(_PINNED.items())) + nbytes > LIMIT.get("pinned", 1 << 62):
        raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
    made = Pinned(b"\xff" * nbytes)
    start = int(np.frombuffer(made, np.uint8).ctypes.data)
    _PINNED[start] = start + nbytes
    weakref.finalize(made, _PINNED.pop, start, None).atexit = False
    return made


def is_pinned(array: np.ndarray) -> bool:
    address = int(array.__array_interface__["data"][0])
    # A copy in one step: while a list is made, the collector may run finalizers, which take entries away.
    return any(start <= address < end for start, end in _PINNED.copy().items())


def copy_to_host(source: np.ndarray, target: np.ndarray, stream: Stream, blocking: bool) -> None:
    """Copy in stream order: immediately if the host waits or its memory is pageable."""
    check_not_captured("a copy to the host")
    check_copy(source, stream)
    if blocking or not is_pinned(target):
        _waited(stream, stream._given)
        target[...] = source
        return
    start, end = _extent(target)
    if not any(start < last and first < end for first, last in list(READING)):
        target.view(np.uint8)[...] = 0xFF
    stream._give(lambda: np.copyto(target, source))


def copy_to_device(source: np.ndarray, target: np.ndarray, stream: Stream) -> None:
    check_not_captured("a copy from the host")
    if is_pinned(source):
        extent = _extent(source)
        READING.append(extent)

        def copy() -> None:
            target[...] = source
            READING.remove(extent)

        number = stream._give(copy)
    else:
        stream._run(stream._given)
        target[...] = source
        number = stream._give()
    WRITTEN[root_of(target)] = stream, number


# Memory straight from the driver, which processes can share
SHARED: "weakref.WeakValueDictionary[int, np.ndarray]" = weakref.WeakValueDictionary()


class Memory:
    """A separate allocation that is not a part of a pool."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.ptr = int(self.bytes.ctypes.data)
        forget(self.bytes)
        SHARED[self.ptr] = self.bytes


class MemoryAsync(Memory):
    """An allocation of cudaMallocAsync."""


class UnownedMemory:
    """Memory of another owner, at an address."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        if ptr not in SHARED:
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        self.ptr, self.size, self.owner = ptr, size, owner
        self.bytes = SHARED[ptr][:size]


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


def memory_at(pointer: MemoryPointer, nbytes: int) -> np.ndarray:
    start = pointer.ptr - pointer.mem.ptr
    assert start + nbytes <= pointer.mem.size
    result: np.ndarray = pointer.mem.bytes[start : start + nbytes]
    return result


def ipcGetMemHandle(ptr: int) -> bytes:
    if ptr not in SHARED:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    return f"{ptr} {threading.current_thread().name}".encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:
    assert len(handle) == 64
    ptr, owner = handle.rstrip(b"\0").decode().split(" ", 1)
    if owner == threading.current_thread().name:
        raise CUDARuntimeError("cudaErrorDeviceUninitialized: invalid device context")
    if int(ptr) not in SHARED or LIMIT.get("ipc", 1) == 0:
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
    LOCAL.opened.add(int(ptr))
    return int(ptr)


def ipcCloseMemHandle(ptr: int) -> None:
    # Where the collector closes it, it does so in any thread.
    opened = next((local_data for local_data in (LOCAL.opened, *OPENED) if ptr in local_data), None)
    if opened is None:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    opened.remove(ptr)
