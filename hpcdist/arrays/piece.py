"""Pieces: names for parts of a tensor outside the run, independent of layout, padding or number of ranks.

A piece is what a checkpoint holds and what a restore asks for. Both sides reduce a piece to *runs*: ranges that are
contiguous in the row-major order of the whole tensor. Two pieces are then intersected as two sorted lists of runs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Segment
from hpcdist.arrays.ranges import Range

Box = tuple[tuple[int, int], ...]  # per dim, half-open


@dataclass(frozen=True)
class Runs:
    """Contiguous stretches of a tensor, in ascending order: three int64 arrays of equal length.

    ``start`` counts elements of the whole tensor, ``local`` elements of the piece's array.
    """

    start: np.ndarray
    local: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Elements ``flat`` (row-major) of the box ``box`` of tensor ``tensor``, held in ``array``.

    ``kind`` says which of its arrays: "parameters", "optimizer.m", ... ``array`` is 1-D with ``flat.size`` elements;
    a view of the state that is saved or restored in place, or a `FileSlice` of a file-backed store.
    """

    kind: str
    tensor: str
    global_shape: tuple[int, ...]
    box: Box
    flat: Range
    array: Array  # or a `hpcdist.arrays.filestore.FileSlice`, which has the same shape, dtype and copy

    def __post_init__(self) -> None:
        inside = len(self.box) == len(self.global_shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(self.box, self.global_shape, strict=True)
        )
        assert inside, f"{self.name}: the box {self.box} is not inside {self.global_shape}"
        elements = math.prod(stop - start for start, stop in self.box)
        assert self.flat.stop <= elements, f"{self.name}: {self.flat} exceeds a box of {elements} elements"
        assert self.array.shape == (self.flat.size,), f"{self.name}: {self.flat} in an array of {self.array.shape}"

    @classmethod
    def of(cls, kind: str, segment: Segment, touched: Range, array: Array) -> "Piece":
        """Return the piece of ``segment`` that lies at ``touched`` in the flat space of its layout."""
        spec = segment.spec
        shape = spec.whole or spec.shape
        return cls(kind, spec.key, shape, spec.box or whole_box(shape), touched.shift(-segment.range.start), array)

    @classmethod
    def whole(cls, kind: str, tensor: str, array: Array) -> "Piece":
        """Return the piece that is the whole of a contiguous ``array`` of any shape."""
        return cls(kind, tensor, array.shape, whole_box(array.shape), Range(0, array.size), array.reshape(-1))

    @property
    def name(self) -> str:
        """Name for errors and files."""
        return f"{self.kind}/{self.tensor}"


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def runs(shape: tuple[int, ...], box: Box, flat: Range) -> Runs:
    """Return the runs of a piece: one for a cut by rows, one per row for a cut by columns."""
    extent = tuple(stop - start for start, stop in box)
    # A run ends where the box does not span a whole dim: join dims from the last one on, as long as the box spans them.
    outer = len(shape)  # dims before `outer` are stepped through; those behind lie inside one run
    while outer > 0 and (outer == len(shape) or extent[outer] == shape[outer]):
        outer -= 1
    length = math.prod(extent[outer:])
    if not flat or not length:
        empty = np.zeros(0, np.int64)
        return Runs(empty, empty, empty)
    # Numbers of the runs that `flat` touches, the first and the last perhaps in part.
    index = np.arange(flat.start // length, -(-flat.stop // length), dtype=np.int64)
    start = np.zeros(index.size, np.int64)
    # Each number, written in the mixed radix of the outer extents, is the run's position in the box.
    rest, stride = index, math.prod(shape[outer:])
    for dim in reversed(range(outer)):
        rest, position = np.divmod(rest, extent[dim])
        start += (position + box[dim][0]) * stride
        stride *= shape[dim]
    if outer < len(shape):
        start += box[outer][0] * math.prod(shape[outer + 1 :])
    inside = index * length  # offset of each run in the box
    cut_front = np.maximum(flat.start - inside, 0)
    size = np.minimum(flat.stop - inside, length) - cut_front
    return Runs(start + cut_front, inside + cut_front - flat.start, size)


def intersect_runs(left: Runs, right: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(local of left, local of right, size)`` of the elements that both have, ordered as in the tensor."""
    # Both lists ascend and are disjoint: the runs of `right` that overlap run i of `left` are first[i] .. last[i] - 1.
    first = np.searchsorted(right.start + right.size, left.start, side="right")
    last = np.searchsorted(right.start, left.start + left.size, side="left")
    count = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(left.start.size), count)
    # For each pair the index in `right`: a global count, shifted so that it begins at first[i] for each i.
    theirs = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    start = np.maximum(left.start[mine], right.start[theirs])
    stop = np.minimum(left.start[mine] + left.size[mine], right.start[theirs] + right.size[theirs])
    local = start - left.start[mine] + left.local[mine]
    return local, start - right.start[theirs] + right.local[theirs], stop - start


def grouped_alike(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether one shape is the other with neighbouring dims joined, as (12, 5) is of (3, 4, 5): same flat order."""
    if left == right:
        return True
    ends, others = (set(accumulate(shape, mul)) for shape in (left, right))
    return math.prod(left) == math.prod(right) and (ends <= others or others <= ends)


def first_gap(stretches: Iterable[tuple[np.ndarray, np.ndarray]], size: int) -> int | None:
    """Return the first of ``size`` elements that no stretch ``(start, size)`` covers; None when all are covered."""
    pairs = list(stretches)
    start = np.concatenate([np.zeros(0, np.int64), *(pair[0] for pair in pairs), [size]])
    stop = np.concatenate([np.zeros(0, np.int64), *(pair[0] + pair[1] for pair in pairs), [size]])
    order = np.argsort(start, kind="stable")
    # Where everything before each stretch ends; an empty stretch at `size` makes a gap at the end visible.
    reached = np.concatenate([[0], np.maximum.accumulate(stop[order])[:-1]])
    gaps = np.flatnonzero(start[order] > reached)
    return int(reached[gaps[0]]) if gaps.size else None
