"""How long a rank spends in each kind of operation, and on how many bytes: an event sink that only adds up."""

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count as counter
from typing import Final, NamedTuple

from hpcdist.arrays.dtypes import FLOATS, INTEGERS
from hpcdist.comm.events import NULL_SINK, UNKNOWN_BYTES, EventSink

_now: Final = time.perf_counter_ns  # bound once: a look-up less, twice an event
_ITEM_BYTES: Final = {name: dtype.itemsize for name, dtype in (FLOATS | INTEGERS).items()}
_STARTED: Final = frozenset({"isend", "irecv", "iallreduce"})  # they end when somebody waits for them
_STARTED_ENDINGS: Final = ("_iallreduce", "_ireduce_scatter", "_iall_gather")

# The lowest bits of a token say what its end has to do; the rest is the token of the inner sink, or a number.
_WITHIN, _OUTERMOST, _BESIDE = 0, 1, 2


class Total(NamedTuple):
    """What a rank spent in one kind of operation: ended ``calls``, their ``seconds`` and ``bytes``.

    ``bytes`` is the size of the buffers handed over, so that bytes over seconds is the algorithm bandwidth, whoever
    chose the algorithm; NaN where objects travel, whose size nobody tells.
    """

    calls: int
    seconds: float
    bytes: float


class _OfThread:
    """What one thread has added up; no other one writes it."""

    __slots__ = ("inside", "sent_bytes", "totals", "unknown")

    def __init__(self) -> None:
        self.inside: tuple[str, float, int] | None = None  # the outermost operation: its kind, bytes, start in ns
        self.totals: dict[str, tuple[int, int, float]] = {}  # calls, ns, bytes, replaced as one
        self.sent_bytes = 0
        self.unknown: dict[str, int] = {}


class Timing:
    """Event sink that adds up calls, seconds and bytes by operation; every event goes on to ``inner``.

    Counted is what a caller sees: the messages of which a ring allreduce is made belong to it. So an operation that
    begins while the same thread is in another is a part of that one. Operations that are only started (isend,
    ring_iallreduce, ...) last until they are complete, and several may be under way. Any thread may report.

    An operation that raises never ends, and what its thread does afterwards belongs to it: who goes on after a failure
    makes a Timing of its own. ``sent_bytes`` and ``unknown`` are those of `recording.Traffic`, whose place it can take.
    """

    def __init__(self, inner: EventSink = NULL_SINK) -> None:
        self.inner = inner
        self._begin, self._end = inner.begin, inner.end
        self._local = threading.local()
        self._threads: list[_OfThread] = []
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[int, str, float, int]] = {}  # inner token, kind, bytes, start in ns
        self._number = counter().__next__

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Take note of the start of an operation, and pass it on."""
        try:
            mine: _OfThread = self._local.mine
        except AttributeError:
            mine = self._new_thread()
        if sent_bytes > 0:
            mine.sent_bytes += sent_bytes
        elif sent_bytes == UNKNOWN_BYTES:
            mine.unknown[op] = mine.unknown.get(op, 0) + 1
        token = self._begin(comm, op, dtype, count, sent_bytes, peer, tag)
        if mine.inside is not None:
            return token << 2
        size = count * _ITEM_BYTES.get(dtype, math.nan) if count or sent_bytes != UNKNOWN_BYTES else math.nan
        if op in _STARTED or op.endswith(_STARTED_ENDINGS):
            number = self._number() << 2 | _BESIDE
            self._under_way[number] = token, op, size, _now()
            return number
        mine.inside = op, size, _now()
        return token << 2 | _OUTERMOST

    def end(self, token: int) -> None:
        """Add the operation to its kind where it is an outermost one, and pass the end on."""
        kind = token & 3
        if kind == _WITHIN:
            self._end(token >> 2)
            return
        now = _now()
        try:
            mine: _OfThread = self._local.mine
        except AttributeError:
            mine = self._new_thread()  # a thread may end what another one has begun
        if kind == _OUTERMOST:
            inner, found, mine.inside = token >> 2, mine.inside, None
            if found is not None:
                op, size, began = found
                calls, spent, total = mine.totals.get(op, (0, 0, 0))
                mine.totals[op] = calls + 1, spent + now - began, total + size
        else:
            inner, op, size, began = self._under_way.pop(token)
            calls, spent, total = mine.totals.get(op, (0, 0, 0))
            mine.totals[op] = calls + 1, spent + now - began, total + size
        self._end(inner)

    def _new_thread(self) -> _OfThread:
        self._local.mine = mine = _OfThread()
        with self._lock:
            self._threads.append(mine)
        return mine

    def totals(self) -> Mapping[str, Total]:
        """Return what all threads spent since the start, by operation (local)."""
        added: dict[str, tuple[int, int, float]] = {}
        for mine in list(self._threads):
            for op, (calls, spent, size) in mine.totals.copy().items():  # a copy: its thread goes on
                before = added.get(op, (0, 0, 0))
                added[op] = before[0] + calls, before[1] + spent, before[2] + size
        return {op: Total(calls, spent / 1e9, float(size)) for op, (calls, spent, size) in added.items()}

    @property
    def sent_bytes(self) -> int:
        """Bytes sent as messages since the start, of operations whose algorithm is known."""
        return sum(mine.sent_bytes for mine in list(self._threads))

    @property
    def unknown(self) -> Counter[str]:
        """Operations since the start whose algorithm, and so volume, is the MPI library's."""
        found: Counter[str] = Counter()
        for mine in list(self._threads):
            found.update(mine.unknown.copy())
        return found
