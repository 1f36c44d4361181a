"""Double binary tree allreduce: each half of the buffer goes up and down its own tree, in segments.

P. Sanders, J. Speck, J. L. Träff, Parallel Computing 35 (2009) 581-594. With segments of b bytes, any p:

    about (4 log2(p) + n/b) (α + b β + b γ)

The inner nodes of the first tree are the even ranks, and of the second tree the odd ranks (and rank 0 if p is odd). A
rank sends at most 2 n bytes, and on average 2 (p-1)/p n as in a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.segments import PostedReceives, check_segment, cut_evenly, slots, wait_all
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request

SEGMENT_BYTES: Final = 2 << 20  # shorter segments are up to 4x slower through shared memory


def double_tree_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` in place. Each of two binary trees reduces one half. All ranks get equal bits. Collective."""
    combine = combiner(buffer, op)
    check_segment(segment_bytes)
    if comm.size == 1:
        return
    lanes = []
    for index, half in enumerate(split(buffer.size, 2, buffer.itemsize)):
        pieces = cut_evenly(half, buffer.itemsize, segment_bytes)
        lanes.append(_Lane(comm, trees(comm.size)[comm.rank][index], index, buffer, pieces, combine))
    # Sort by tick, then reductions (False) before results (True), then tree and segment: equal on all ranks.
    for _, down, index, segment in sorted(turn for lane in lanes for turn in lane.turns()):
        if down:
            lanes[index].hand_down(segment)
        else:
            lanes[index].reduce_up(segment)
    for lane in lanes:
        lane.finish()


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Parent, children and depth of a rank in a binary tree. The root has no parent and depth 0."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


@lru_cache(maxsize=32)
def trees(size: int) -> tuple[tuple[TreePosition, TreePosition], ...]:
    """Return a tuple with one pair for each of ``size`` ranks: the `TreePosition` in the first and second tree."""
    first = [_place(rank, size) for rank in range(size)]
    # An even size: mirroring swaps even and odd ranks. An odd size: shift all ranks by one.
    roles = [size - 1 - rank if size % 2 == 0 else (rank - 1) % size for rank in range(size)]
    ranks = sorted(range(size), key=roles.__getitem__)

    def moved(position: TreePosition) -> TreePosition:
        parent = None if position.parent is None else ranks[position.parent]
        return TreePosition(parent, tuple(ranks[child] for child in position.children), position.depth)

    return tuple((first[rank], moved(first[roles[rank]])) for rank in range(size))


def _place(rank: int, size: int) -> TreePosition:
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
    # Replace the lowest set bit by the next bit: 2 is the parent of 1 and 3, 4 is the parent of 2 and 6. If this is not
    # a rank, the parent is the number without its lowest set bit.
    bit = number & -number
    joined = (number & ~bit) | (bit << 1)
    return joined if joined < size else number & ~bit


class _Lane:
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
        # Returns (time, True if downward, tree number, segment number). This rank executes its steps in order of time.
        # Upward: add the children's sums, send the result to the parent. Downward: pass the total to the children.
        count, depth = len(self.segments), self.place.depth
        turns = [(segment - depth, False, self.index, segment) for segment in range(count)]
        if self.place.parent is not None:
            turns += [(segment + depth, True, self.index, segment) for segment in range(count)]
        return turns

    def reduce_up(self, segment: int) -> None:
        total = self.segments[segment]
        for inbox in self.inboxes:
            self.combine(inbox.take(), total, total)
        if self.place.parent is None:
            self._to_children(total)
        else:
            self.sends_up.append(self.comm.isend(total, self.place.parent, self.up))

    def hand_down(self, segment: int) -> None:
        assert self.place.parent is not None
        # Post receives for this and the next segment, once their partial sums have been sent from the same memory.
        for ahead in range(len(self.receives_down), min(segment + 2, len(self.segments))):
            self.sends_up[ahead].wait()  # the result replaces the partial sum
            self.receives_down.append(self.comm.irecv(self.segments[ahead], self.place.parent, self.down))
        self.receives_down[segment].wait()
        self._to_children(self.segments[segment])

    def _to_children(self, result: Array) -> None:
        self.sends_down += [self.comm.isend(result, child, self.down) for child in self.place.children]

    def finish(self) -> None:
        wait_all(self.sends_up)
        wait_all(self.sends_down)
