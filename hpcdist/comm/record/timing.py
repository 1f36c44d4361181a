"""Totals of communication: event sinks that add up calls, seconds and bytes by operation."""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count as counter
from typing import Final, NamedTuple

from hpcdist.arrays.dtypes import FLOATS, INTEGERS
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import NULL_SINK, UNKNOWN_BYTES, EventSink
from hpcdist.reporting.units import format_bytes


class MessageTraffic(EventSink):
    """Event sink that counts the calls of each operation and all sent bytes, and calls the event sink ``inner``."""

    def __init__(self, inner: EventSink = NULL_SINK) -> None:
        self.inner = inner
        self._lock = threading.Lock()  # a thread may send at the same time as the main thread
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.unknown: Counter[str] = Counter()  # operations whose volume only the MPI library knows

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        with self._lock:
            self.calls[op] += 1
            if sent_bytes == UNKNOWN_BYTES:
                self.unknown[op] += 1
            else:
                self.sent_bytes += sent_bytes
        return self.inner.begin(comm, op, dtype, count, sent_bytes, peer, tag)

    def end(self, token: int) -> None:
        self.inner.end(token)


@contextmanager
def count_traffic(comm: Communicator) -> Iterator[MessageTraffic]:
    """Context manager that yields a counter of the messages on ``comm`` and on its derived communicators. Local."""
    before = comm.events
    traffic = MessageTraffic(before)
    comm.events = traffic
    try:
        yield traffic
    finally:
        comm.events = before


_now: Final = time.perf_counter_ns  # bound once: saves two look-ups per event
_ITEM_BYTES: Final = {name: dtype.itemsize for name, dtype in (FLOATS | INTEGERS).items()}
_STARTED: Final = frozenset({"isend", "irecv", "iallreduce", "nccl"})  # non-blocking: they end in a wait or test
_STARTED_ENDINGS: Final = ("_iallreduce", "_ireduce_scatter", "_iall_gather")
_RECEIVING: Final = frozenset({"recv", "irecv", "probe", "barrier", "flush"})  # their bytes are counted by the sender

# The two lowest bits of a token select the action of `end`; the rest is the token of the inner sink, or a number.
_OUTERMOST, _STARTED_ONLY = 1, 2


class OperationTotal(NamedTuple):
    """Totals of one operation, such as allreduce, on a rank. ``bytes / seconds`` is the algorithm bandwidth."""

    calls: int  # ended calls
    seconds: float
    bytes: float  # size of the buffers that the caller passed, or NaN for Python objects


class BytesMoved(NamedTuple):
    """Bytes that a rank sent: in messages, through shared memory, and by MPI's collectives (unknown traffic)."""

    messages: float = 0.0  # in messages of this package
    shared: float = 0.0  # read by other ranks of the node in shared memory
    unknown: float = 0.0  # buffers passed to MPI's collectives, which do not report their traffic

    def described(self) -> str:
        """Return the nonzero byte counts as text, such as "3 MB in messages, 1 MB by the MPI library", or "nothing"."""
        ways = ("in messages", "through shared memory", "by the MPI library")
        parts = [f"{format_bytes(round(nbytes))} {way}" for nbytes, way in zip(self, ways, strict=True) if nbytes]
        return ", ".join(parts) or "nothing"

    def since(self, before: "BytesMoved") -> "BytesMoved":
        """Return the bytes that were moved after the earlier counts ``before`` were taken."""
        return BytesMoved(self.messages - before.messages, self.shared - before.shared, self.unknown - before.unknown)


class _Kind:
    __slots__ = ("bytes", "calls", "is_library", "is_started", "ns", "receives")

    def __init__(self, op: str) -> None:
        self.receives, self.is_library = op in _RECEIVING, op.startswith("nccl")
        self.is_started = op in _STARTED or op.endswith(_STARTED_ENDINGS)
        self.calls = self.ns = 0
        self.bytes: float = 0


class _ThreadTotals:  # only the thread writes its totals
    __slots__ = ("began", "inside", "kinds", "sends", "sent_bytes", "shared", "size", "unknown", "unknown_calls")

    def __init__(self) -> None:
        self.kinds: dict[str, _Kind] = {}
        self.sent_bytes = self.unknown_calls = 0
        self.shared = self.unknown = 0.0
        self.sends = False  # the outermost operation, or an operation within it, sends or receives
        self.inside: _Kind | None = None
        self.size: float = 0
        self.began = 0


class OperationTiming(EventSink):
    """Event sink that adds up calls, seconds and bytes by operation, and calls the sink ``inner``. Thread-safe."""

    def __init__(self, inner: EventSink = NULL_SINK) -> None:
        # Non-blocking operations last until they complete. After a failed operation, create a new object.
        self.inner = inner
        self._inner_begin, self._inner_end = inner.begin, inner.end
        self._local = threading.local()
        self._threads: list[_ThreadTotals] = []
        self._under_way: dict[int, tuple[int, str, float, int]] = {}  # inner token, operation, bytes, start in ns
        self._number = counter().__next__

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        try:
            mine: _ThreadTotals = self._local.mine
        except AttributeError:
            mine = self._new_thread()
        if sent_bytes > 0:
            mine.sent_bytes += sent_bytes
        elif sent_bytes == UNKNOWN_BYTES:
            mine.unknown_calls += 1
            if count:  # objects have no count: their size is unknown, and small
                mine.unknown += count * _ITEM_BYTES.get(dtype, 1)
        token = self._inner_begin(comm, op, dtype, count, sent_bytes, peer, tag)
        if mine.inside is not None:
            mine.sends = mine.sends or sent_bytes != 0 or op in _RECEIVING
            return token << 2
        kind = mine.kinds.get(op) or mine.kinds.setdefault(op, _Kind(op))
        size = count * _ITEM_BYTES.get(dtype, math.nan) if count or sent_bytes != UNKNOWN_BYTES else math.nan
        if kind.is_started:
            number = self._number() << 2 | _STARTED_ONLY
            self._under_way[number] = token, op, size, _now()
            return number
        mine.sends = sent_bytes != 0 or kind.receives
        mine.inside, mine.size, mine.began = kind, size, _now()
        return token << 2 | _OUTERMOST

    def end(self, token: int) -> None:
        if not token & 3:
            self._inner_end(token >> 2)
            return
        now = _now()
        try:
            mine: _ThreadTotals = self._local.mine
        except AttributeError:
            mine = self._new_thread()  # a thread may end an operation that another thread started
        if token & _OUTERMOST:
            inner, kind, size, began, mine.inside = token >> 2, mine.inside, mine.size, mine.began, None
            if not mine.sends and kind is not None:
                if kind.is_library:
                    mine.unknown += size
                else:
                    mine.shared += size
        else:
            inner, op, size, began = self._under_way.pop(token)
            kind = mine.kinds.get(op) or mine.kinds.setdefault(op, _Kind(op))
        if kind is not None:
            kind.calls += 1
            kind.ns += now - began
            kind.bytes += size
        self._inner_end(inner)

    def _new_thread(self) -> _ThreadTotals:
        self._local.mine = mine = _ThreadTotals()
        self._threads.append(mine)
        return mine

    def totals(self) -> Mapping[str, OperationTotal]:
        """Return {operation: `OperationTotal`} since this object was created, summed over all threads. Local."""
        added: dict[str, OperationTotal] = {}
        for mine in self._threads.copy():  # copies, because the threads continue
            for op, kind in mine.kinds.copy().items():
                calls, seconds, size = added.get(op, (0, 0.0, 0.0))
                added[op] = OperationTotal(calls + kind.calls, seconds + kind.ns / 1e9, size + kind.bytes)
        return {op: total for op, total in added.items() if total.calls}

    @property
    def sent_bytes(self) -> int:
        """Bytes sent since the creation of this object, except in the operations that `unknown_calls` counts."""
        return sum(mine.sent_bytes for mine in self._threads.copy())

    def moved(self) -> BytesMoved:
        """Return the bytes that this rank has sent since the creation of this object, by transport. Local."""
        threads = self._threads.copy()
        return BytesMoved(self.sent_bytes, sum(mine.shared for mine in threads), sum(mine.unknown for mine in threads))

    @property
    def unknown_calls(self) -> int:
        """Number of counted operations whose sent bytes are unknown, such as MPI's allreduce."""
        return sum(mine.unknown_calls for mine in self._threads.copy())
