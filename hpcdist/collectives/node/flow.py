"""Exchange of data inside a node without barriers: pipelined sums of segments, and published arrays.

On m ranks with s bytes per segment, `NodeFlow` sends (m-1) messages of s/m bytes each way. `SharedFlow` uses shared
memory: it writes s bytes and reads 2 (m-1)/m s.

In each round with a `PublishedMemory`, a rank writes its arrays (`part`), calls `publish`, calls `wait`, and reads the
arrays of the other ranks. All ranks make the same rounds in the same order. An array may be overwritten two rounds
later: by then every rank has finished reading.
"""

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.intrinsics import load_acquire, pause, store_release
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up, split
from hpcdist.collectives import segments
from hpcdist.collectives.reduction import combiner
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request, SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError

EARLY: Final = 2  # segments whose addends are sent in advance, with scratch buffers for them (empirical)
LATE: Final = 8  # segments whose totals may be in flight (empirical)
ADDENDS, TOTALS = 1, 2  # tags


class NodeFlow:
    """Reduction of ``buffer`` by messages between the ranks of a node. Construction is collective over ``intra``."""

    def __init__(self, intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range]) -> None:
        # ``order``: segments in the order of their reduction. The first ``owners`` ranks each reduce a part of them.
        self.buffer, self.combine = buffer, combiner(buffer, op)
        self._intra, self._owners, self._order = intra, owners, order
        self._parts: dict[int, list[Range]] = {}
        self._others = [(intra.rank + step) % intra.size for step in range(1, intra.size)]
        self.longest = max(self.local_view(segment).size for segment in order)
        self._room = scratch("node flow", (EARLY + 1) * len(self._others) * self.longest, buffer.dtype, buffer)
        self._begun = self._summed = 0
        self._addends: deque[dict[int, tuple[Request, Array]]] = deque()
        self._sends: dict[Range, list[Request]] = {}
        self._totals: deque[list[Request]] = deque()

    def range_in(self, segment: Range, rank: int) -> Range:
        """Return the range of elements that ``rank`` reduces, relative to the start of ``segment``. Local."""
        parts = self._parts.get(segment.size)
        if parts is None:
            parts = split(segment.size, self._owners, self.buffer.itemsize)
            parts += [Range(segment.size, segment.size)] * (self._intra.size - self._owners)
            self._parts[segment.size] = parts
        return parts[rank]

    def view(self, segment: Range, rank: int) -> Array:
        """Return a view of the buffer elements in ``segment`` that ``rank`` reduces. Local."""
        part: Array = self.buffer[self.range_in(segment, rank).shift(segment.start).slice]
        return part

    def local_view(self, segment: Range) -> Array:
        """Return a view of the buffer elements in ``segment`` that this rank reduces. Local."""
        return self.view(segment, self._intra.rank)

    def _begin_next(self) -> None:
        segment = self._order[self._begun]
        # EARLY + 1 sets of scratch rows in turn: the set that is summed, and the sets in flight.
        local_part, slot = self.local_view(segment), self._begun % (EARLY + 1) * len(self._others)
        addends: dict[int, tuple[Request, Array]] = {}
        if local_part.size:
            for index, rank in enumerate(self._others):
                row = self._room[(slot + index) * self.longest :][: local_part.size]
                addends[rank] = self._intra.irecv(row, rank, ADDENDS), row
        self._addends.append(addends)
        theirs = [(rank, self.view(segment, rank)) for rank in self._others]
        self._sends[segment] = [self._intra.isend(part, rank, ADDENDS) for rank, part in theirs if part.size]
        self._begun += 1

    def sum_next(self) -> None:
        """Wait for the other ranks' data of the next segment, then reduce this rank's range of this segment."""
        while self._begun < min(len(self._order), self._summed + EARLY + 1):
            self._begin_next()
        local_part, addends = self.local_view(self._order[self._summed]), self._addends.popleft()
        self._summed += 1
        if not addends:
            return
        for request, _ in addends.values():
            request.wait()
        rows = [local_part if rank == self._intra.rank else addends[rank][1] for rank in range(self._intra.size)]
        self.add(rows, local_part)

    def add(self, rows: Sequence[Array], local_part: Array) -> None:
        """Reduce ``rows``, one array per rank, and write the result to ``local_part``. May overwrite ``rows[0]``."""
        # Row 0 accumulates, since ``local_part`` is an operand; the last sum goes to ``local_part``. In shared
        # memory row 0 is in the slot of rank 0, in the part that only this rank reads.
        total = rows[0]
        for row in rows[1:-1]:
            self.combine(total, row, total)
        if len(rows) > 1:
            self.combine(total, rows[-1], local_part)

    def spread(self, segment: Range) -> None:
        """Start to exchange the results of ``segment``. Every rank sends its range, and receives the other ranges."""
        for request in self._sends.pop(segment, ()):
            request.wait()  # do not receive into memory that is still being sent
        local_part = self.local_view(segment)
        theirs = [(rank, self.view(segment, rank)) for rank in self._others]
        requests = [self._intra.irecv(part, rank, TOTALS) for rank, part in theirs if part.size]
        requests += [self._intra.isend(local_part, rank, TOTALS) for rank in self._others if local_part.size]
        self._totals.append(requests)
        if len(self._totals) > LATE:
            self._wait_for_totals()

    def _wait_for_totals(self) -> None:
        for request in self._totals.popleft():
            request.wait()

    def finish(self) -> None:
        """Wait until this rank has sent and received all data of the segments passed to `spread`."""
        while self._totals:
            self._wait_for_totals()


SLOTS: Final = 1 + max(EARLY, LATE)  # segments between their writer and the last reader
# A rank stages up to EARLY segments before their sum, and leaves LATE totals untaken. With one slot more, a rank that
# waits for a slot has published everything that the others need to free the slot: no deadlock.
LINE_BYTES: Final = 256
STAGED, SUMMED, GIVEN, TAKEN = 0, 8, 16, 24  # 8-byte words, each in its own cache line
SPINS: Final = 200  # polls of a counter before messages are progressed
PATIENCE: Final = 256  # progress calls before checking for dead ranks
MOST_OWNERS: Final = 8  # the memory of a node grows quadratically: 160 MiB for 8 ranks


@jit
def _is_reached(counters: Any, word: int, number: int, spins: int) -> bool:
    for rank in range(counters.size):  # an address for each rank
        # Acquire: data written before the release store in `_raise_to` is visible once the number is.
        while load_acquire(counters[rank] + 8 * word) < number:
            if spins <= 0:
                return False
            spins -= 1
            pause()
    return True


@jit
def _raise_to(counters: int, word: int, number: int) -> None:
    store_release(counters + 8 * word, number)


class Counters:
    """Shared memory with progress counters and ``nbytes`` bytes of data for each rank. Construction is collective."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.block: SharedBlock = comm.shared(LINE_BYTES + nbytes)
        self.rank = comm.rank
        self.is_shared = self.block.is_shared  # False if sharing failed
        self.given_up: BaseException | None = None  # the error that aborted a wait
        if self.is_shared:
            self.lines = np.array([view.ctypes.data for view in self.block.views], np.int64)

    def publish(self, word: int, number: int) -> None:
        """Set this rank's counter ``word`` to ``number``. Ranks that read ``number`` see all earlier writes. Local."""
        _raise_to(self.lines[self.rank], word, number)

    def wait(self, word: int, number: int) -> None:
        """Wait until the counter with index ``word`` has reached ``number`` on every rank. Local."""
        since, turns = time.monotonic(), 0
        while not _is_reached(self.lines, word, number, SPINS):
            turns += 1
            try:
                if turns % PATIENCE == 0:
                    self.block.check_alive(since)
                self.block.progress()
            except Exception as error:
                self.given_up = error
                raise
            time.sleep(0)  # yields the core to other ranks and the GIL to other threads


class FlowMemory(Counters):
    """Memory that the ranks of a node share for reductions. Construction is collective over ``intra``."""

    def __init__(self, intra: Communicator, segment_bytes: int, part_bytes: int) -> None:
        super().__init__(intra, SLOTS * (segment_bytes + part_bytes))
        self.segment_bytes, self.part_bytes = segment_bytes, part_bytes
        self.summed = self.spread = 0  # numbers of segments, over all calls
        self.is_busy = False  # True during a call, and after an aborted call

    def addends(self, rank: int, number: int) -> np.ndarray:
        """Return a byte view of the shared memory for the input of ``rank`` to the segment with index ``number``."""
        # Memory of a rank: a line of counters, SLOTS slots for addends, SLOTS slots for totals.
        start = LINE_BYTES + number % SLOTS * self.segment_bytes
        return self.block.views[rank][start : start + self.segment_bytes]

    def total(self, rank: int, number: int) -> np.ndarray:
        """Return a byte view of the shared memory for the sums by ``rank`` of the segment with index ``number``."""
        start = LINE_BYTES + SLOTS * self.segment_bytes + number % SLOTS * self.part_bytes
        return self.block.views[rank][start : start + self.part_bytes]


_memory: weakref.WeakKeyDictionary[Communicator, FlowMemory] = weakref.WeakKeyDictionary()
_inside: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # communicator -> its node


def flow_of(
    intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range], part_bytes: int
) -> NodeFlow:
    """Return a `NodeFlow` that reduces ``buffer`` over a node's ranks, in shared memory if possible. Collective.

    ``order``: ranges of the buffer (segments) in the order of their reduction. The first ``owners`` ranks each reduce
    at most ``part_bytes`` bytes of every segment.
    """
    if intra.size == 1 or owners > MOST_OWNERS or not isinstance(buffer, np.ndarray):
        return NodeFlow(intra, owners, buffer, op, order)
    memory = _memory.get(intra)
    if memory is not None and memory.is_busy:
        raise CommunicationError(
            f"an earlier collective in the shared memory of {intra.name} was aborted, so the ranks may be at "
            "different calls; end the job, or call collectives.release on all ranks"
        ) from memory.given_up
    if memory is None or memory.segment_bytes < owners * part_bytes or memory.part_bytes < part_bytes:
        sizes = (0, 0) if memory is None else (memory.segment_bytes, memory.part_bytes)
        _give_back(intra)
        memory = FlowMemory(intra, max(sizes[0], owners * part_bytes), max(sizes[1], part_bytes))
        _memory[intra] = memory
    if not memory.is_shared:
        return NodeFlow(intra, owners, buffer, op, order)
    return SharedFlow(intra, owners, buffer, op, order, memory)


def keep_for(comm: Communicator, intra: Communicator) -> None:
    """Let ``release(comm)`` also free the shared memory of ``intra``, the communicator of this node. Local."""
    _inside[comm] = intra


def release(comm: Communicator) -> None:
    """Free the shared memory of ``comm`` and of the communicator set by `keep_for`. Collective over ``comm``."""
    for owner in (comm, _inside.pop(comm, None)):
        if owner is not None:
            _give_back(owner)


def _give_back(intra: Communicator) -> None:
    memory = _memory.pop(intra, None)
    if memory is not None:
        memory.block.close()


class SharedFlow(NodeFlow):
    """A `NodeFlow` that exchanges host buffers through ``memory``, which all ranks of the node share."""

    def __init__(
        self, intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range], memory: FlowMemory
    ) -> None:
        super().__init__(intra, owners, buffer, op, order)
        self._memory = memory
        self._untaken: deque[tuple[int, Range]] = deque()
        memory.is_busy = True

    def _begin_next(self) -> None:
        memory, segment = self._memory, self._order[self._begun]
        # The number of this segment over all calls: the segments of earlier calls, and those begun in this call.
        number = memory.summed - self._summed + self._begun
        memory.wait(SUMMED, number + 1 - SLOTS)  # all ranks have read segment number - SLOTS, the last in this slot
        slot = memory.addends(self._intra.rank, number).view(self.buffer.dtype)
        for rank in self._others:
            part = self.range_in(segment, rank)
            slot[part.slice] = self.view(segment, rank)
        memory.publish(STAGED, number + 1)
        self._begun += 1

    def sum_next(self) -> None:
        memory, segment = self._memory, self._order[self._summed]
        while self._begun < min(len(self._order), self._summed + EARLY + 1):
            self._begin_next()
        number, local_part, part = memory.summed, self.local_view(segment), self.range_in(segment, self._intra.rank)
        memory.wait(STAGED, number + 1)
        if local_part.size:
            rows = [memory.addends(rank, number).view(local_part.dtype)[part.slice] for rank in range(self._intra.size)]
            rows[self._intra.rank] = local_part
            self.add(rows, local_part)
        memory.summed, self._summed = number + 1, self._summed + 1
        memory.publish(SUMMED, number + 1)

    def spread(self, segment: Range) -> None:
        memory, local_part = self._memory, self.local_view(segment)
        number = memory.spread
        memory.wait(TAKEN, number + 1 - SLOTS)  # all ranks have copied the previous total of this slot
        memory.total(self._intra.rank, number).view(local_part.dtype)[: local_part.size] = local_part
        memory.publish(GIVEN, number + 1)
        memory.spread = number + 1
        self._untaken.append((number, segment))
        if len(self._untaken) > LATE:
            self._take()

    def _take(self) -> None:
        memory = self._memory
        number, segment = self._untaken.popleft()
        memory.wait(GIVEN, number + 1)
        for rank in self._others:
            part = self.view(segment, rank)
            part[...] = memory.total(rank, number).view(part.dtype)[: part.size]
        memory.publish(TAKEN, number + 1)

    def finish(self) -> None:
        while self._untaken:
            self._take()
        self._memory.is_busy = False


_TURNS: Final = 0  # index of the counter word


def part_bytes(nbytes: int) -> int:
    """Return the number of bytes to allocate for ``nbytes`` bytes of data: 25 % more, to avoid reallocations."""
    return align_up(nbytes + nbytes // 4, ALIGN_BYTES)


class PublishedMemory:
    """Named arrays in shared memory. Each rank writes its arrays and reads all arrays. Construction is collective."""

    def __init__(self, comm: Communicator, numbers: int) -> None:
        self._comm, self._turns = comm, 0
        self._counters = Counters(comm, 8 * numbers)
        self._parts: SharedBlock | None = None
        self._sizes: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self.is_shared = self._counters.is_shared
        # For each rank, an array of ``numbers`` int64 values.
        self.head = [view[view.size - 8 * numbers :].view(np.int64) for view in self._counters.block.views]

    def grow(self, sizes: Mapping[str, int]) -> None:
        """Enlarge arrays to ``sizes[name]`` bytes. Any growth clears all. Raises MissingCapabilityError. Collective."""
        short = {name: size for name, size in sizes.items() if size > self._sizes.get(name, 0)}
        if not short:
            return
        self._sizes |= {name: part_bytes(size) for name, size in short.items()}
        *starts, total = accumulate(self._sizes.values(), initial=0)
        self._starts = dict(zip(self._sizes, starts, strict=True))
        if self._parts is not None:
            self._parts.close()
        self._parts = self._comm.shared(total)
        if not self._parts.is_shared:
            raise MissingCapabilityError(
                f"the {self._comm.size} ranks of {self._comm.name} cannot share {total} bytes each; free "
                "memory or enlarge /dev/shm, or set communication.algorithm = 'native'"
            )
        segments.count_in_ledger(self._parts.views[self._comm.rank])

    def part(self, rank: int, name: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> np.ndarray:
        """Return a view of the first elements of the array ``name`` of ``rank``, with this shape and dtype. Local."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        assert self._parts is not None and nbytes <= self._sizes[name], f"{nbytes} bytes of {name}: call `grow` first"
        start = self._starts[name]
        array: np.ndarray = self._parts.views[rank][start : start + nbytes].view(dtype).reshape(shape)
        return array

    def publish(self) -> None:
        """Let all ranks see this rank's writes. Raises CommunicationError if an earlier `wait` was aborted. Local."""
        if self._counters.given_up is not None:
            raise CommunicationError(
                f"an earlier exchange in the shared memory of {self._comm.name} was aborted, so the ranks cannot "
                "continue; end the job"
            ) from self._counters.given_up
        self._turns += 1
        self._counters.publish(_TURNS, self._turns)

    def wait(self) -> None:
        """Wait until each rank has called `publish` as often as this rank. Local."""
        self._counters.wait(_TURNS, self._turns)
