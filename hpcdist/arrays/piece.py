"""Pieces: parts of a tensor in checkpoints and restores, independent of layout, padding and number of ranks."""

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
    """Runs of consecutive tensor elements in an array: offsets in the tensor, offsets in the array, and sizes."""

    start: np.ndarray  # offset of each run in the flattened tensor
    local: np.ndarray  # offset of each run in this rank's array
    size: np.ndarray  # number of elements of each run


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor that this rank holds in a 1-D array, with the tensor's name and the elements' positions."""

    kind: str  # state that has the tensor: "parameters", "optimizer.m", ...
    tensor: str
    global_shape: tuple[int, ...]
    box: Box  # region of the tensor: (start, stop) per dim
    flat: Range  # range of the held elements in the flattened region, row-major
    array: Array  # or a `hpcdist.arrays.filestore.FileSlice`

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
        """Return the `Piece` for the tensor elements that the 1-D ``array`` holds. ``kind``: name of the state.

        ``segment``: the tensor and its range in the flat array. ``touched``: range of ``array`` in the flat array.
        """
        spec = segment.spec
        shape = spec.whole or spec.shape
        return cls(kind, spec.key, shape, spec.box or whole_box(shape), touched.shift(-segment.range.start), array)

    @classmethod
    def whole(cls, kind: str, tensor: str, array: Array) -> "Piece":
        """Return the `Piece` for a contiguous ``array``, the whole tensor named ``tensor`` of the state ``kind``."""
        return cls(kind, tensor, array.shape, whole_box(array.shape), Range(0, array.size), array.reshape(-1))

    @property
    def name(self) -> str:
        """Name of the piece in errors and files: state name and tensor name."""
        return f"{self.kind}/{self.tensor}"


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the region of a whole tensor of this ``shape``: one (0, size) pair per dim."""
    return tuple((0, size) for size in shape)


def runs(shape: tuple[int, ...], box: Box, flat: Range) -> Runs:
    """Return the runs of consecutive tensor elements in the region ``box`` of a tensor of this ``shape``.

    ``box``: a (start, stop) pair per dim. ``flat``: range of the elements to return, in the row-major order of the box.
    """
    extent = tuple(stop - start for start, stop in box)
    # Join trailing dims into one run as long as the box spans the whole dim.
    outer = len(shape)  # dims before `outer` are stepped through; later dims are inside one run
    while outer > 0 and (outer == len(shape) or extent[outer] == shape[outer]):
        outer -= 1
    length = math.prod(extent[outer:])
    if not flat or not length:
        empty = np.zeros(0, np.int64)
        return Runs(empty, empty, empty)
    # Indices of the runs that `flat` touches; the first and the last run may be partial.
    index = np.arange(flat.start // length, -(-flat.stop // length), dtype=np.int64)
    start = np.zeros(index.size, np.int64)
    # The mixed-radix digits of a run index, in the outer extents, are the run's position in the box.
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
    """Return (offsets in the left array, offsets in the right array, sizes) of the runs that both arrays hold."""
    # Both lists ascend and are disjoint: the runs of `right` that overlap run i of `left` are first[i] .. last[i] - 1.
    first = np.searchsorted(right.start + right.size, left.start, side="right")
    last = np.searchsorted(right.start, left.start + left.size, side="left")
    count = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(left.start.size), count)
    # The index in `right` for each pair: a running count, shifted so that it begins at first[i] for each i.
    theirs = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    start = np.maximum(left.start[mine], right.start[theirs])
    stop = np.minimum(left.start[mine] + left.size[mine], right.start[theirs] + right.size[theirs])
    local = start - left.start[mine] + left.local[mine]
    return local, start - right.start[theirs] + right.local[theirs], stop - start


def grouped_alike(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Return True if the shapes become equal when adjacent dims are joined. Example: (3, 4, 5) and (12, 5)."""
    if left == right:
        return True
    ends, others = (set(accumulate(shape, mul)) for shape in (left, right))
    return math.prod(left) == math.prod(right) and (ends <= others or others <= ends)


def first_gap(stretches: Iterable[tuple[np.ndarray, np.ndarray]], size: int) -> int | None:
    """Return the first integer from 0 to ``size`` - 1 that no range covers, or None if the ranges cover all.

    ``stretches``: pairs of arrays (starts of ranges, sizes of ranges).
    """
    pairs = list(stretches)
    start = np.concatenate([np.zeros(0, np.int64), *(pair[0] for pair in pairs), [size]])
    stop = np.concatenate([np.zeros(0, np.int64), *(pair[0] + pair[1] for pair in pairs), [size]])
    order = np.argsort(start, kind="stable")
    # The end of all ranges before each range; an empty range at `size` makes a gap at the end visible.
    reached = np.concatenate([[0], np.maximum.accumulate(stop[order])[:-1]])
    gaps = np.flatnonzero(start[order] > reached)
    return int(reached[gaps[0]]) if gaps.size else None
