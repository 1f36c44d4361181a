"""The flow of segments inside a node through memory that its ranks share; see `node_flow` for what it promises.

On m ranks with s bytes a segment: (m-1)/m s written and as much read for the addends, and s/m written and (m-1)/m s
read for the totals.

A rank writes the addends of a segment, and later its total, where the others can read, and raises a number; nobody has
to be there to take them. It waits only for slots that are still being read, and for numbers of ranks that are behind.
While it waits, it lets the message layer move what goes between nodes.

Numbers only grow, over all calls. Slot g of SLOTS is written again when every rank has raised its number past g. After
a call that was given up half-way they are out of step, and later calls are refused.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.atomics import load_acquire, pause, store_release
from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.node_flow import EARLY, LATE, NodeFlow
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import CommunicationError

SLOTS: Final = 1 + max(EARLY, LATE)  # segments that may be between their writer and the last reader
LINE_BYTES: Final = 256
STAGED, SUMMED, GIVEN, TAKEN = 0, 8, 16, 24  # words of 8 bytes, each in a cache line of its own
SPINS: Final = 200  # looks at a number before messages are moved
PATIENCE: Final = 256  # turns of moving messages before asking whether everybody lives
MOST_OWNERS: Final = 8  # the memory of a node grows with their square: 160 MiB for 8 ranks


@jit
def is_reached(lines: Any, word: int, number: int, spins: int) -> bool:
    """Whether the word of every rank has reached ``number``, after ``spins`` looks at most."""
    for rank in range(lines.size):
        while load_acquire(lines[rank] + 8 * word) < number:
            if spins <= 0:
                return False
            spins -= 1
            pause()
    return True


@jit
def raise_to(line: int, word: int, number: int) -> None:
    """Tell the others: what was written before can be read."""
    store_release(line + 8 * word, number)


class FlowMemory:
    """What the ranks of ``intra`` keep for their flows. Collective over ``intra``."""

    def __init__(self, intra: Communicator, segment_bytes: int, part_bytes: int) -> None:
        self.segment_bytes, self.part_bytes = segment_bytes, part_bytes
        self.block: SharedBlock = intra.shared(LINE_BYTES + SLOTS * (segment_bytes + part_bytes))
        self.rank = intra.rank
        self.is_shared = self.block.is_shared
        self.summed = self.spread = 0  # numbers, over all calls
        self.is_busy = False  # from the start of a call to its end; it stays where a call was given up,
        self.given_up: BaseException | None = None  # because of this, if it was while it waited
        if self.is_shared:
            self.lines = np.array([view.ctypes.data for view in self.block.views], np.int64)

    def addends(self, rank: int, number: int) -> np.ndarray:
        """Return the slot of ``rank`` for a segment's addends, as bytes."""
        start = LINE_BYTES + number % SLOTS * self.segment_bytes
        return self.block.views[rank][start : start + self.segment_bytes]

    def total(self, rank: int, number: int) -> np.ndarray:
        """Return the slot of ``rank`` for its total, as bytes."""
        start = LINE_BYTES + SLOTS * self.segment_bytes + number % SLOTS * self.part_bytes
        return self.block.views[rank][start : start + self.part_bytes]

    def tell(self, word: int, number: int) -> None:
        """Raise the own ``word`` to ``number``: what was written before can be read (local)."""
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
            time.sleep(0)


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
        kept = (0, 0) if memory is None else (memory.segment_bytes, memory.part_bytes)
        _give_back(intra)
        memory = FlowMemory(intra, max(kept[0], owners * part_bytes), max(kept[1], part_bytes))
        _memory[intra] = memory
    if not memory.is_shared:
        return NodeFlow(intra, owners, buffer, op, order)
    return SharedFlow(intra, owners, buffer, op, order, memory)


def keep_for(comm: Communicator, intra: Communicator) -> None:
    """Let `release` of ``comm`` give back what is kept for ``intra``, a node of it (local)."""
    _inside[comm] = intra


def release(comm: Communicator) -> None:
    """Give back what is kept for ``comm``, and for its node. Collective over ``comm``."""
    for one in (comm, _inside.pop(comm, None)):
        if one is not None:
            _give_back(one)


def _give_back(intra: Communicator) -> None:
    found = _memory.pop(intra, None)
    if found is not None:
        found.block.close()


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
        number = memory.summed - self._summed + self._begun
        memory.wait(SUMMED, number + 1 - SLOTS)
        slot = memory.addends(self._intra.rank, number).view(self.buffer.dtype)
        for rank in self._others:
            part = self.within(segment, rank)
            slot[part.slice] = self.part(segment, rank)
        memory.tell(STAGED, number + 1)
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
        memory.tell(SUMMED, number + 1)

    def spread(self, segment: Range) -> None:
        """Begin to give the own part of ``segment`` to all and to take theirs."""
        memory, own = self._memory, self.own(segment)
        number = memory.spread
        memory.wait(TAKEN, number + 1 - SLOTS)
        memory.total(self._intra.rank, number).view(own.dtype)[: own.size] = own
        memory.tell(GIVEN, number + 1)
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
        memory.tell(TAKEN, number + 1)

    def finish(self) -> None:
        """Return when all that was spread has been taken (local, but needs the other ranks)."""
        while self._untaken:
            self._take()
        self._memory.is_busy = False
