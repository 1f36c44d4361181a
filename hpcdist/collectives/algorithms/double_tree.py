"""Double binary tree allreduce: each half of the buffer goes up and down a tree of its own, by segments.

P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009) 581-594. With segments of b bytes, any p:

    about (4 log2(p) + n/b) (α + b β + b γ): 2 n β and n γ for long buffers, in a latency that grows with log2(p)

In a single binary tree the leaves, half of the ranks, have little to do. Of the two trees the first has the even
ranks inside, the second the odd ones (with an odd p also rank 0), so the work is even. In a tree a rank sends its
half of the buffer to its parent, if it has one, and to each of its children: with the children and parents of both
trees

    (parents + children) n/2    at most 2 n, and on average 2 (p-1)/p n as in a ring

Every rank handles its segments in the order of a schedule in which a segment needs one tick for each edge, so segments
follow one another in both directions at once. What a step waits for has an earlier tick at the other rank, or goes up
at the same tick: no cycle of waits. Each element is summed in one tree in one order and the root's bits are handed
down: all ranks end with the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.segments import PostedReceives, check_segment, cut_evenly, slots, wait_all
from hpcdist.comm.communicator import Communicator, Request

SEGMENT_BYTES: Final = 2 << 20  # through shared memory shorter ones are slower, down to a quarter of the speed


def double_tree_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    check_segment(segment_bytes)
    if comm.size == 1:
        return
    lanes = []
    for index, half in enumerate(split(buffer.size, 2, buffer.itemsize)):
        pieces = cut_evenly(half, buffer.itemsize, segment_bytes)
        lanes.append(_Lane(comm, trees(comm.size)[comm.rank][index], index, buffer, pieces, combine))
    # Tuples sort by tick, then reductions (False) before results (True), then by tree and segment: alike on all ranks.
    for _, down, index, segment in sorted(turn for lane in lanes for turn in lane.turns()):
        if down:
            lanes[index].hand_down(segment)
        else:
            lanes[index].reduce_up(segment)
    for lane in lanes:
        lane.finish()


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Place of a rank in a binary tree; the root has no parent and depth 0."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


@lru_cache(maxsize=32)
def trees(size: int) -> tuple[tuple[TreePosition, TreePosition], ...]:
    """Return the places of each rank in the two trees of ``size`` ranks (local)."""
    first = [_place(rank, size) for rank in range(size)]
    # Mirrored, even and odd change places. With an odd size they do not; then all move on by one.
    roles = [size - 1 - rank if size % 2 == 0 else (rank - 1) % size for rank in range(size)]
    ranks = sorted(range(size), key=roles.__getitem__)

    def moved(place: TreePosition) -> TreePosition:
        parent = None if place.parent is None else ranks[place.parent]
        return TreePosition(parent, tuple(ranks[child] for child in place.children), place.depth)

    return tuple((first[rank], moved(first[roles[rank]])) for rank in range(size))


def _place(rank: int, size: int) -> TreePosition:
    """Return the place in the tree that has 1..size-1 in order, odd ones as leaves, and 0 above them all.

    A number with t zeros at its end has one with t-1 zeros on either side below it, or with fewer where that one would
    be ``size`` or more.
    """
    # Number of trailing zero bits, which is the height above the leaves; number 0 is above all others.
    zeros = (rank & -rank).bit_length() - 1 if rank else size.bit_length()
    below = [rank - (1 << (zeros - 1))] if rank and zeros else []
    above = [rank + (1 << power) for power in range(zeros - 1, -1, -1) if rank + (1 << power) < size]
    parent, depth, at = None, 0, rank
    while at:
        at = _parent(at, size)
        parent = at if parent is None else parent
        depth += 1
    return TreePosition(parent, (*below, *above[:1]), depth)


def _parent(number: int, size: int) -> int:
    # The next bit is set in place of the lowest one: 1 and 3 have the parent 2, 2 and 6 have 4. Where that is no rank,
    # the subtree hangs at the number without its lowest bit.
    bit = number & -number
    joined = (number & ~bit) | (bit << 1)
    return joined if joined < size else number & ~bit


class _Lane:
    """One half of the buffer on its tree."""

    def __init__(
        self,
        comm: Communicator,
        place: TreePosition,
        index: int,
        buffer: Array,
        pieces: Sequence[Range],
        combine: Combine,
    ) -> None:
        self.comm, self.place, self.index, self.combine = comm, place, index, combine
        self.up, self.down = 2 * index, 2 * index + 1  # tags: two ranks may be neighbours in both trees
        self.segments = [buffer[piece.slice] for piece in pieces]
        self.inboxes = [
            PostedReceives(comm, child, slots(f"double tree {index} {side}", pieces, buffer.dtype, buffer), self.up)
            for side, child in enumerate(place.children)
        ]
        self.sends_up: list[Request] = []  # to the parent, by segment
        self.receives_down: list[Request] = []  # from the parent, by segment
        self.sends_down: list[Request] = []  # to the children

    def turns(self) -> list[tuple[int, bool, int, int]]:
        """Return (tick, whether down, tree, segment) of every step; at equal ticks all that go up come first.

        Segment s is complete at the root at tick s: depth d has sent it up at tick s - d, and gets it at tick s + d.
        """
        count, depth = len(self.segments), self.place.depth
        turns = [(segment - depth, False, self.index, segment) for segment in range(count)]
        if self.place.parent is not None:
            turns += [(segment + depth, True, self.index, segment) for segment in range(count)]
        return turns

    def reduce_up(self, segment: int) -> None:
        """Add the partial sums of the children and send the sum to the parent; the root sends it down at once."""
        total = self.segments[segment]
        for inbox in self.inboxes:
            self.combine(inbox.take(), total, total)
        if self.place.parent is None:
            self._to_children(total)
        else:
            self.sends_up.append(self.comm.isend(total, self.place.parent, self.up))

    def hand_down(self, segment: int) -> None:
        """Take the result from the parent, one receive ahead, and pass it on."""
        assert self.place.parent is not None
        # A receive is posted for this segment and the next one, once their partial sums have left the same memory.
        for ahead in range(len(self.receives_down), min(segment + 2, len(self.segments))):
            self.sends_up[ahead].wait()  # the result replaces the partial sum
            self.receives_down.append(self.comm.irecv(self.segments[ahead], self.place.parent, self.down))
        self.receives_down[segment].wait()
        self._to_children(self.segments[segment])

    def _to_children(self, result: Array) -> None:
        self.sends_down += [self.comm.isend(result, child, self.down) for child in self.place.children]

    def finish(self) -> None:
        """Wait until the buffer is the caller's again."""
        wait_all(self.sends_up)
        wait_all(self.sends_down)
