"""Layout of a model: named tensors at aligned offsets of one flat address space.

A `Layout` holds no bytes and depends on no rank and no number of parts: it is the same on every rank and for every
world size, so a range of it means the same thing everywhere.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from hpcdist.arrays.ranges import Range, align_up

# 32 elements are one 64-byte line at 2 bytes an element, two at 4: one layout serves the master and the working dtype.
ALIGN_ELEMENTS = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter tensor as its model declares it.

    ``layer`` is the global layer id (the same on every rank, whatever the cut into stages). ``adapted`` says whether
    weight decay and layer-wise rates apply: matrices yes, biases and norm scales no. ``cut`` is the dim along which
    tensor parallelism cuts it; None: every rank has all of it.

    Of a tensor that is cut, a rank has the box ``box`` (per dim, half-open) of the shape ``whole``; both are empty
    where it has all of it. ``room`` is the number of elements that the layout reserves, the most that any rank has: so
    the layouts of all ranks agree.

    ``stacked`` is how many tensors of one shape lie one behind the other along the first dim, as query, key and value
    do: their biases (3, h) are three vectors and no matrix.

    ``expert``: its first dim counts experts, which ranks may share out. These tensors are the last of their layer.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    adapted: bool = True
    cut: int | None = None
    whole: tuple[int, ...] = ()
    box: tuple[tuple[int, int], ...] = ()
    room: int = 0
    stacked: int = 1
    expert: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dims or more, not counting that of a stack: a stack of vectors is no matrix."""
        return len(self.shape) - (self.stacked > 1) > 1

    @property
    def key(self) -> str:
        """``layer.name``: the name of the tensor in errors, checkpoints and reports."""
        return f"{self.layer}.{self.name}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Number of elements that a layout reserves for it, padding included."""
        return align_up(max(self.size, self.room), ALIGN_ELEMENTS)

    def part(self, along: Range, longest: int) -> "TensorSpec":
        """Return the part ``along`` the dim ``cut``; no rank has more than ``longest`` of that dim."""
        assert self.cut is not None and not self.whole, f"{self.key} cannot be cut"
        shape = tuple(along.size if dim == self.cut else size for dim, size in enumerate(self.shape))
        box = tuple((along.start, along.stop) if dim == self.cut else (0, size) for dim, size in enumerate(self.shape))
        room = self.size // self.shape[self.cut] * longest
        return replace(self, shape=shape, whole=self.shape, box=box, room=room)

    def of_experts(self, own: Range) -> "TensorSpec":
        """Return the part of the experts ``own``; each rank has as many. A cut along another dim stays."""
        assert self.expert, f"{self.key} has no experts"
        box = self.box or tuple((0, size) for size in self.shape)
        return replace(
            self,
            shape=(own.size, *self.shape[1:]),
            whole=self.whole or self.shape,
            box=((own.start, own.stop), *box[1:]),
            room=self.room // self.shape[0] * own.size,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor and its ``range`` of the flat space, without the padding behind it."""

    spec: TensorSpec
    range: Range

    @property
    def key(self) -> str:
        """Name of the tensor."""
        return self.spec.key


@dataclass(frozen=True)
class Layout:
    """Segments in order of their offsets; ``size`` counts elements, padding included."""

    segments: tuple[Segment, ...]
    size: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> "Layout":
        """Place ``specs`` one behind the other. Raises ValueError when two have the same key."""
        segments: list[Segment] = []
        seen: set[str] = set()
        offset = 0
        for spec in specs:
            if spec.key in seen:
                raise ValueError(f"two tensors are called {spec.key}; a layout needs one name for each")
            seen.add(spec.key)
            segments.append(Segment(spec, Range(offset, offset + spec.size)))
            offset += spec.padded
        return cls(tuple(segments), offset)

    @cached_property
    def by_key(self) -> dict[str, Segment]:
        """Segments by the name of their tensor."""
        return {segment.key: segment for segment in self.segments}

    @cached_property
    def parameters(self) -> int:
        """Number of elements of all tensors, of those that are cut too, without padding."""
        return sum(math.prod(segment.spec.whole or segment.spec.shape) for segment in self.segments)

    @cached_property
    def units(self) -> dict[int, Range]:
        """The range of each layer, padding included: the unit that ZeRO-3 gathers and frees."""
        units: dict[int, Range] = {}
        for segment in self.segments:
            stop = segment.range.start + segment.spec.padded
            before = units.get(segment.spec.layer)
            if before is None:
                units[segment.spec.layer] = Range(segment.range.start, stop)
            else:
                assert before.stop == segment.range.start, f"layer {segment.spec.layer} is not contiguous"
                units[segment.spec.layer] = Range(before.start, stop)
        return units

    def part_of(self, layer: int, portion: str) -> Range:
        """Return the range of a layer, all of it or its ``portion``: "expert", or "dense", what is before that."""
        unit = self.units[layer]
        if not portion:
            return unit
        starts = [segment.range.start for segment, _ in self.within(unit) if segment.spec.expert]
        border = min(starts, default=unit.stop)
        return Range(unit.start, border) if portion == "dense" else Range(border, unit.stop)

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.range.start for segment in self.segments]

    def within(self, part: Range) -> list[tuple[Segment, Range]]:
        """Return, for each tensor that ``part`` touches, the segment and the touched range of the flat space."""
        # The last tensor that begins at or before the part may still reach into it.
        first = max(0, bisect_right(self._starts, part.start) - 1)
        touched = []
        for segment in self.segments[first:]:
            if segment.range.start >= part.stop:
                break
            common = segment.range.intersect(part)
            if common:
                touched.append((segment, common))
        return touched
