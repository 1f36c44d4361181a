"""Layout of a model: named tensors at aligned offsets of one flat address space, equal on every rank."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from hpcdist.arrays.ranges import Range, align_up

# 32 elements fill one 64-byte cache line at 2 bytes each, or two at 4 bytes: master and working dtypes share a layout.
ALIGN_ELEMENTS = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and properties of a parameter tensor, or of this rank's shard of the tensor."""

    layer: int  # number of the layer
    name: str
    shape: tuple[int, ...]
    adapted: bool = True  # weight decay and layer-wise learning rates apply
    cut: int | None = None  # dim that tensor parallelism splits
    whole: tuple[int, ...] = ()  # full shape of a split tensor
    box: tuple[tuple[int, int], ...] = ()  # this rank's region of a split tensor: (start, stop) per dim
    room: int = 0  # elements that every rank reserves for a split tensor: the largest shard
    stacked: int = 1  # number of equal tensors along dim 0, such as 3 for query, key and value
    expert: bool = False  # dim 0 counts experts; such tensors follow all other tensors of their layer
    partial: bool = False  # each tensor rank computes a part of the gradient of this unsplit tensor

    @property
    def is_matrix(self) -> bool:
        """True if the tensor has at least 2 dims. If dim 0 stacks several tensors, this dim does not count."""
        return len(self.shape) - (self.stacked > 1) > 1

    @property
    def key(self) -> str:
        """Name of the tensor in errors, checkpoints and reports: ``LAYER.NAME``."""
        return f"{self.layer}.{self.name}"

    @property
    def size(self) -> int:
        """Number of elements, without padding. If the tensor is split, only this rank's shard counts."""
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Number of elements, with padding, that a layout reserves for the tensor."""
        return align_up(max(self.size, self.room), ALIGN_ELEMENTS)

    def shard(self, along: Range, longest: int) -> "TensorSpec":
        """Return the spec of a shard. ``along``: range of the split dim. ``longest``: length of the longest shard."""
        assert self.cut is not None and not self.whole, f"{self.key} cannot be cut"
        shape = tuple(along.size if dim == self.cut else size for dim, size in enumerate(self.shape))
        box = tuple((along.start, along.stop) if dim == self.cut else (0, size) for dim, size in enumerate(self.shape))
        room = self.size // self.shape[self.cut] * longest
        return replace(self, shape=shape, whole=self.shape, box=box, room=room)

    def of_experts(self, local_experts: Range) -> "TensorSpec":
        """Return the spec of this tensor's shard for a rank with the experts ``local_experts``."""
        assert self.expert, f"{self.key} has no experts"
        box = self.box or tuple((0, size) for size in self.shape)
        return replace(
            self,
            shape=(local_experts.size, *self.shape[1:]),
            whole=self.whole or self.shape,
            box=((local_experts.start, local_experts.stop), *box[1:]),
            room=self.room // self.shape[0] * local_experts.size,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Tensor and the range of its elements in the flat array of a `Layout`, without padding."""

    spec: TensorSpec
    range: Range

    @property
    def key(self) -> str:
        """Name of the segment's tensor: ``LAYER.NAME``."""
        return self.spec.key


@dataclass(frozen=True)
class Layout:
    """Order and offsets of tensors in one flat array. The array has ``size`` elements, including padding."""

    segments: tuple[Segment, ...]
    size: int
    layers: tuple[int, ...] = ()  # numbers of all layers, in order; a layer may have no tensors

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], layers: tuple[int, ...] = ()) -> "Layout":
        """Return a layout of the tensors ``specs``, in this order. Raises ValueError if two have the same name.

        ``layers``: numbers of all layers, or (): layers that have tensors.
        """
        segments: list[Segment] = []
        seen: set[str] = set()
        offset = 0
        for spec in specs:
            if spec.key in seen:
                raise ValueError(f"two tensors are called {spec.key}; give each tensor of a layout a different name")
            seen.add(spec.key)
            segments.append(Segment(spec, Range(offset, offset + spec.size)))
            offset += spec.padded
        return cls(tuple(segments), offset, layers)

    @cached_property
    def by_key(self) -> dict[str, Segment]:
        """The segments of this layout as a dict {tensor name ``LAYER.NAME``: segment}."""
        return {segment.key: segment for segment in self.segments}

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the whole model, without padding. A split tensor counts with its whole shape."""
        return sum(math.prod(segment.spec.whole or segment.spec.shape) for segment in self.segments)

    @cached_property
    def has_partial(self) -> bool:
        """True if tensor ranks must sum the gradients of some tensors."""
        return any(segment.spec.partial for segment in self.segments)

    @cached_property
    def units(self) -> dict[int, Range]:
        """Dict {layer number: range of the layer in the flat array}. The ranges include the padding."""
        units: dict[int, Range] = {}
        for segment in self.segments:
            stop = segment.range.start + segment.spec.padded
            before = units.get(segment.spec.layer)
            if before is None:
                units[segment.spec.layer] = Range(segment.range.start, stop)
            else:
                assert before.stop == segment.range.start, f"layer {segment.spec.layer} is not contiguous"
                units[segment.spec.layer] = Range(before.start, stop)
        if not self.layers:
            return units
        end, ordered = 0, {}
        for layer in self.layers:
            ordered[layer] = units.get(layer, Range(end, end))
            end = ordered[layer].stop
        return ordered

    def range_of(self, layer: int, portion: str) -> Range:
        """Return the flat range of ``layer``. ``portion``: "" for all tensors, or only "expert" or "dense" tensors."""
        unit = self.units[layer]
        if not portion:
            return unit
        starts = [segment.range.start for segment, _ in self.within(unit) if segment.spec.expert]
        border = min(starts, default=unit.stop)
        return Range(unit.start, border) if portion == "dense" else Range(border, unit.stop)

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.range.start for segment in self.segments]

    def within(self, elements: Range) -> list[tuple[Segment, Range]]:
        """Return a list of (segment, overlap) for all tensors that overlap the range ``elements`` of the flat array."""
        # The last tensor that begins at or before the start of `elements` may overlap `elements`.
        first = max(0, bisect_right(self._starts, elements.start) - 1)
        touched = []
        for segment in self.segments[first:]:
            if segment.range.start >= elements.stop:
                break
            common = segment.range.intersect(elements)
            if common:
                touched.append((segment, common))
        return touched
