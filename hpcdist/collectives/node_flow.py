"""Sums and totals inside a node, segment after segment, without the ranks keeping step.

For a pipeline whose other end is the network. Every rank owns a part of each segment:

    sum_next   the own part of the next segment from all ranks of the node, added in the order of the ranks
    spread     the own part of a segment to all, and theirs into place

On m ranks with s bytes a segment: (m-1) messages of s/m bytes each way. All are begun early and waited for late, in
the order that all ranks know, and a rank that waits lets every message move: one that is held up delays the others by
what it owes them, not by a meeting at each step. `node_flow_shared` does the same through the node's memory.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator, Request

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
