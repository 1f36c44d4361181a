"""Flow of segments inside a node: pipelined sums and all-gathers without a barrier at each segment.

The hierarchical allreduce uses it, with the network at the other end of the pipeline. Every rank owns a part of each
segment:

    sum_next   the own part of the next segment from all ranks of the node, added in the order of the ranks
    spread     the own part of a segment to all ranks, and theirs into place

`NodeFlow` sends messages: on m ranks with s bytes a segment, (m-1) messages of s/m bytes each way. All are begun
early and waited for late, in the order that all ranks know, and a rank that waits lets every message move: a late
rank delays the others only by the messages that they need from it.

`SharedFlow` does the same through memory that the ranks share: (m-1)/m s written and as much read for the addends,
and s/m written and (m-1)/m s read for the totals. A rank writes the addends of a segment, and later its total, and
raises a counter; nobody has to be there to receive them. It waits only for slots that are still being read, and for
counters of ranks that are behind; meanwhile it lets the message layer progress. Counters only grow, over all calls.
Slot g of SLOTS is written again when every rank has raised its counter past g. After an interrupted call the counters
differ, and later calls are refused.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.intrinsics import load_acquire, pause, store_release
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import combiner
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator, Request, SharedBlock
from hpcdist.errors import CommunicationError

EARLY: Final = 2  # segments whose addends travel before they are needed, and the scratch for them (empirical)
LATE: Final = 8  # segments whose totals may still be travelling (empirical)
ADDENDS, TOTALS = 1, 2  # tags


class NodeFlow:
    """The ranks of ``intra`` on one call's ``buffer``. Collective: all make the same calls in the same order.

    ``order`` are the segments in the order in which they are summed. The first ``owners`` ranks own a part of each.
    """

    def __init__(self, intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range]) -> None:
        self.buffer, self.combine = buffer, combiner(buffer, op)
        self._intra, self._owners, self._order = intra, owners, order
        self._parts: dict[int, list[Range]] = {}
        self._others = [(intra.rank + step) % intra.size for step in range(1, intra.size)]
        self.longest = max(self.own(segment).size for segment in order)
        self._room = scratch("node flow", (EARLY + 1) * len(self._others) * self.longest, buffer.dtype, buffer)
        self._begun = self._summed = 0
        self._addends: deque[dict[int, tuple[Request, Array]]] = deque()
        self._sends: dict[Range, list[Request]] = {}
        self._totals: deque[list[Request]] = deque()

    def within(self, segment: Range, rank: int) -> Range:
        """Return, relative to ``segment``, the part of it that ``rank`` owns; empty where it owns none (local)."""
        parts = self._parts.get(segment.size)
        if parts is None:
            parts = split(segment.size, self._owners, self.buffer.itemsize)
            parts += [Range(segment.size, segment.size)] * (self._intra.size - self._owners)
            self._parts[segment.size] = parts
        return parts[rank]

    def part(self, segment: Range, rank: int) -> Array:
        """Return the part of ``segment`` that ``rank`` owns (local)."""
        part: Array = self.buffer[self.within(segment, rank).shift(segment.start).slice]
        return part

    def own(self, segment: Range) -> Array:
        """Return the part of ``segment`` that this rank owns (local)."""
        return self.part(segment, self._intra.rank)

    def _begin_next(self) -> None:
        """Begin to send the addends of a segment to their owners, and to receive those of the own part."""
        segment = self._order[self._begun]
        # EARLY + 1 sets of rows in turn: the one that is summed, and those that are begun before it.
        own, slot = self.own(segment), self._begun % (EARLY + 1) * len(self._others)
        addends: dict[int, tuple[Request, Array]] = {}
        if own.size:
            for index, rank in enumerate(self._others):
                row = self._room[(slot + index) * self.longest :][: own.size]
                addends[rank] = self._intra.irecv(row, rank, ADDENDS), row
        self._addends.append(addends)
        theirs = [(rank, self.part(segment, rank)) for rank in self._others]
        self._sends[segment] = [self._intra.isend(part, rank, ADDENDS) for rank, part in theirs if part.size]
        self._begun += 1

    def sum_next(self) -> None:
        """Reduce the own part of the next segment of the order, in place (local, but needs the other ranks)."""
        while self._begun < min(len(self._order), self._summed + EARLY + 1):
            self._begin_next()
        own, addends = self.own(self._order[self._summed]), self._addends.popleft()
        self._summed += 1
        if not addends:
            return
        for request, _ in addends.values():
            request.wait()
        rows = [own if rank == self._intra.rank else addends[rank][1] for rank in range(self._intra.size)]
        self.add(rows, own)

    def add(self, rows: Sequence[Array], own: Array) -> None:
        """Reduce ``rows``, one of each rank, into ``own``, which is one of them; the first may be overwritten."""
        # The first row accumulates, since ``own`` is an operand until its turn; the last sum goes to ``own``. In shared
        # memory the first row lies in the slot of rank 0, in the part of it that this rank alone reads.
        total = rows[0]
        for row in rows[1:-1]:
            self.combine(total, row, total)
        if len(rows) > 1:
            self.combine(total, rows[-1], own)

    def spread(self, segment: Range) -> None:
        """Begin to give the own part of ``segment`` to all and to take theirs; it must not be changed any more."""
        for request in self._sends.pop(segment, ()):
            request.wait()  # what is still being sent must not be received over
        own = self.own(segment)
        theirs = [(rank, self.part(segment, rank)) for rank in self._others]
        requests = [self._intra.irecv(part, rank, TOTALS) for rank, part in theirs if part.size]
        requests += [self._intra.isend(own, rank, TOTALS) for rank in self._others if own.size]
        self._totals.append(requests)
        if len(self._totals) > LATE:
            self._wait_for_totals()

    def _wait_for_totals(self) -> None:
        for request in self._totals.popleft():
            request.wait()

    def finish(self) -> None:
        """Return when all that was spread has come (local, but needs the other ranks)."""
        while self._totals:
            self._wait_for_totals()


SLOTS: Final = 1 + max(EARLY, LATE)  # segments that may be between their writer and the last reader
# A rank stages up to EARLY segments that it has not summed, and lets LATE totals wait before it takes them. With a slot
# more than either, a rank that waits for a slot has published all that the others need to free it: no cycle of waits.
LINE_BYTES: Final = 256
STAGED, SUMMED, GIVEN, TAKEN = 0, 8, 16, 24  # words of 8 bytes, each in a cache line of its own
SPINS: Final = 200  # looks at a number before messages are moved
PATIENCE: Final = 256  # turns of moving messages before asking whether everybody lives
MOST_OWNERS: Final = 8  # the memory of a node grows with their square: 160 MiB for 8 ranks


@jit
def is_reached(lines: Any, word: int, number: int, spins: int) -> bool:
    """Whether the word of every rank has reached ``number``, after ``spins`` looks at most."""
    for rank in range(lines.size):
        # Acquire: what that rank wrote before its release store in `raise_to` is visible once the number is seen.
        while load_acquire(lines[rank] + 8 * word) < number:
            if spins <= 0:
                return False
            spins -= 1
            pause()
    return True


@jit
def raise_to(line: int, word: int, number: int) -> None:
    """Publish ``number`` in the word by a release store: what was written before it can be read."""
    store_release(line + 8 * word, number)


class Counters:
    """Counters of each rank of ``comm``, and ``nbytes`` behind them, in shared memory. Collective over ``comm``.

    A rank raises its own ones, which all can read; where nothing can be shared, ``is_shared`` is false.
    """

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.block: SharedBlock = comm.shared(LINE_BYTES + nbytes)
        self.rank = comm.rank
        self.is_shared = self.block.is_shared
        self.given_up: BaseException | None = None  # what ended a wait before it was over
        if self.is_shared:
            self.lines = np.array([view.ctypes.data for view in self.block.views], np.int64)

    def publish(self, word: int, number: int) -> None:
        """Raise the own ``word`` to ``number``: what was written before it can be read (local)."""
        raise_to(self.lines[self.rank], word, number)

    def wait(self, word: int, number: int) -> None:
        """Return when the word of every rank has reached ``number`` (local)."""
        since, turns = time.monotonic(), 0
        while not is_reached(self.lines, word, number, SPINS):
            turns += 1
            try:
                if turns % PATIENCE == 0:
                    self.block.check_alive(since)
                self.block.progress()
            except Exception as error:
                self.given_up = error
                raise
            time.sleep(0)  # offers the core to a rank that shares it, and Python's lock to other threads


class FlowMemory(Counters):
    """State of the flows that the ranks of ``intra`` keep. Collective over ``intra``."""

    def __init__(self, intra: Communicator, segment_bytes: int, part_bytes: int) -> None:
        super().__init__(intra, SLOTS * (segment_bytes + part_bytes))
        self.segment_bytes, self.part_bytes = segment_bytes, part_bytes
        self.summed = self.spread = 0  # numbers, over all calls
        self.is_busy = False  # from the start of a call to its end; it stays where a call was given up

    def addends(self, rank: int, number: int) -> np.ndarray:
        """Return the slot of ``rank`` for a segment's addends, as bytes."""
        # The memory of a rank: its line of counters, SLOTS slots for addends, SLOTS slots for totals.
        start = LINE_BYTES + number % SLOTS * self.segment_bytes
        return self.block.views[rank][start : start + self.segment_bytes]

    def total(self, rank: int, number: int) -> np.ndarray:
        """Return the slot of ``rank`` for its total, as bytes."""
        start = LINE_BYTES + SLOTS * self.segment_bytes + number % SLOTS * self.part_bytes
        return self.block.views[rank][start : start + self.part_bytes]


_memory: weakref.WeakKeyDictionary[Communicator, FlowMemory] = weakref.WeakKeyDictionary()
_inside: weakref.WeakKeyDictionary[Communicator, Communicator] = weakref.WeakKeyDictionary()  # whose node has memory


def flow_of(
    intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range], part_bytes: int
) -> NodeFlow:
    """Return a flow through shared memory where there can be one, else one of messages. Collective over ``intra``.

    No part of a segment is longer than ``part_bytes``. The memory is kept for ``intra``. Raises CommunicationError
    after a call that was given up half-way.
    """
    if intra.size == 1 or owners > MOST_OWNERS or not isinstance(buffer, np.ndarray):
        return NodeFlow(intra, owners, buffer, op, order)
    memory = _memory.get(intra)
    if memory is not None and memory.is_busy:
        raise CommunicationError(
            f"an earlier collective in the shared memory of {intra.name} was given up half-way, and its ranks are out "
            "of step; end the job, or call collectives.release on all ranks"
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
    """Let `release` of ``comm`` give back what is kept for ``intra``, a node of it (local)."""
    _inside[comm] = intra


def release(comm: Communicator) -> None:
    """Give back what is kept for ``comm``, and for its node. Collective over ``comm``."""
    for owner in (comm, _inside.pop(comm, None)):
        if owner is not None:
            _give_back(owner)


def _give_back(intra: Communicator) -> None:
    memory = _memory.pop(intra, None)
    if memory is not None:
        memory.block.close()


class SharedFlow(NodeFlow):
    """A `NodeFlow` on host memory, through ``memory``, which is shared."""

    def __init__(
        self, intra: Communicator, owners: int, buffer: Array, op: str, order: Sequence[Range], memory: FlowMemory
    ) -> None:
        super().__init__(intra, owners, buffer, op, order)
        self._memory = memory
        self._untaken: deque[tuple[int, Range]] = deque()
        memory.is_busy = True

    def _begin_next(self) -> None:
        memory, segment = self._memory, self._order[self._begun]
        # The number of this segment over all calls: those before this call, and those begun in it.
        number = memory.summed - self._summed + self._begun
        memory.wait(SUMMED, number + 1 - SLOTS)  # all have read segment number - SLOTS, the last one in this slot
        slot = memory.addends(self._intra.rank, number).view(self.buffer.dtype)
        for rank in self._others:
            part = self.within(segment, rank)
            slot[part.slice] = self.part(segment, rank)
        memory.publish(STAGED, number + 1)
        self._begun += 1

    def sum_next(self) -> None:
        """Reduce the own part of the next segment of the order, in place (local, but needs the other ranks)."""
        memory, segment = self._memory, self._order[self._summed]
        while self._begun < min(len(self._order), self._summed + EARLY + 1):
            self._begin_next()
        number, own, part = memory.summed, self.own(segment), self.within(segment, self._intra.rank)
        memory.wait(STAGED, number + 1)
        if own.size:
            rows = [memory.addends(rank, number).view(own.dtype)[part.slice] for rank in range(self._intra.size)]
            rows[self._intra.rank] = own
            self.add(rows, own)
        memory.summed, self._summed = number + 1, self._summed + 1
        memory.publish(SUMMED, number + 1)

    def spread(self, segment: Range) -> None:
        """Begin to give the own part of ``segment`` to all and to take theirs."""
        memory, own = self._memory, self.own(segment)
        number = memory.spread
        memory.wait(TAKEN, number + 1 - SLOTS)  # all have copied the total that was in this slot
        memory.total(self._intra.rank, number).view(own.dtype)[: own.size] = own
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
            part = self.part(segment, rank)
            part[...] = memory.total(rank, number).view(part.dtype)[: part.size]
        memory.publish(TAKEN, number + 1)

    def finish(self) -> None:
        """Return when all that was spread has been taken (local, but needs the other ranks)."""
        while self._untaken:
            self._take()
        self._memory.is_busy = False
