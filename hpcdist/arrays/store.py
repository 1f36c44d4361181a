"""Flat store: one array for the ranges of a model's flat layout that a rank holds in memory.

Shards of parameters, gradients and optimizer state are such stores; tensors are views of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range

Allocate = Callable[[int, "np.dtype[Any]"], Array]


class FlatStore:
    """A 1-D array that holds ``parts`` of the flat space of ``layout`` one behind the other, padding included and zero.

    ``parts`` are disjoint ranges in ascending order, or one range; None stands for the whole space. For memory of a
    special kind (shared by the ranks of a node, pinned, from a pool) pass ``allocate(elements, dtype)``.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype,
        parts: Range | Sequence[Range] | None = None,
        *,
        on: str = "cpu",
        allocate: Allocate | None = None,
        category: str = "parameters",
        ledger: Ledger | None = None,
    ) -> None:
        self.layout = layout
        self.parts = _ranges(layout, parts)
        self._starts = [part.start for part in self.parts]
        # _shifts[i] is where part i begins in `array`, as _starts[i] is where it begins in the flat space.
        self._shifts = list(accumulate((part.size for part in self.parts[:-1]), initial=0))
        self.size = sum(part.size for part in self.parts)
        self.dtype = np.dtype(dtype)
        self.array = allocate(self.size, self.dtype) if allocate else backend.zeros(self.size, self.dtype, on)
        if ledger is not None:
            ledger.track(self.array, category, None if allocate or on == "gpu" else self.array.base)

    def range(self, wanted: Range) -> Array:
        """Return the 1-D view of ``wanted``, given in offsets of the layout; it must lie inside one of the parts."""
        if not wanted:
            return self.array[:0]
        start = self._offset(wanted)
        return self.array[start : start + wanted.size]

    def _offset(self, wanted: Range) -> int:
        """Return the index in ``array`` at which ``wanted`` begins."""
        index = bisect_right(self._starts, wanted.start) - 1
        assert index >= 0 and wanted.stop <= self.parts[index].stop, f"{wanted} is not inside one of {self.parts}"
        return wanted.start + self._shifts[index] - self._starts[index]

    def view(self, key: str) -> Array:
        """Return tensor ``key`` in its shape; it must lie inside one of the parts as a whole."""
        segment = self.layout.by_key[key]
        return self.range(segment.range).reshape(segment.spec.shape)

    def tensors(self) -> Iterator[tuple[Segment, Range]]:
        """Yield each tensor that the parts touch, and the touched range of the flat space; padding is left out."""
        for part in self.parts:
            yield from self.layout.within(part)

    def read(self, wanted: Range, out: Array) -> None:
        """Copy ``wanted`` into ``out``, 1-D, on the host or a GPU."""
        values = self.range(wanted)
        if backend.is_device(values) == backend.is_device(out):
            out[...] = values
        elif backend.is_device(out):
            staging.to_device_in_blocks(out, lambda where, block: np.copyto(block, values[where.slice]))
        else:
            staging.to_host_in_blocks(values, lambda where, block: np.copyto(out[where.slice], block))

    def write(self, wanted: Range, values: Array) -> None:
        """Copy ``values``, 1-D, on the host or a GPU, to ``wanted``."""
        held = self.range(wanted)
        if backend.is_device(values) == backend.is_device(held):
            held[...] = values
        elif backend.is_device(values):
            staging.to_host_in_blocks(values, lambda where, block: np.copyto(held[where.slice], block))
        else:
            staging.to_device_in_blocks(held, lambda where, block: np.copyto(block, values[where.slice]))

    def add(self, wanted: Range, values: Array) -> None:
        """Add ``values``, 1-D, on the same device as this store or on a GPU, to ``wanted``."""
        held = self.range(wanted)
        if backend.is_device(values) and not backend.is_device(held):
            staging.to_host_in_blocks(
                values, lambda where, block: np.add(held[where.slice], block, out=held[where.slice])
            )
        else:
            with np.errstate(all="ignore"):  # infinity is for the caller to find, as in a collective
                held += values

    def blocks(self, wanted: Range) -> Iterator[Array]:
        """Yield ``wanted`` in order, in blocks to be read before the next is asked for; here it is one view."""
        yield self.range(wanted)

    def contents(self, wanted: Range) -> Array:
        """Return the array of a `Piece` of ``wanted``: here the view itself."""
        return self.range(wanted)

    def copy_from(self, other: "FlatStore") -> None:
        """Copy from ``other``, of the same layout and dtype, on any device, the elements that both hold."""
        on = "gpu" if backend.is_device(self.array) else "cpu"
        for part in self.parts:
            for theirs in other.parts:
                common = part.intersect(theirs)
                if common:
                    self.range(common)[...] = backend.place(other.range(common), on)

    def zero(self) -> None:
        """Set every element, padding included, to zero."""
        self.array[...] = 0


def _ranges(layout: Layout, parts: Range | Sequence[Range] | None) -> tuple[Range, ...]:
    """Return ``parts`` without the empty ones. They must be ascending and disjoint."""
    if parts is None:
        parts = Range(0, layout.size)
    ranges = tuple(part for part in ((parts,) if isinstance(parts, Range) else parts) if part)
    ends = [part.stop for part in ranges]
    assert all(end <= part.start for end, part in zip(ends, ranges[1:], strict=False)), f"{ranges} overlap"
    assert not ends or ends[-1] <= layout.size, f"{ranges} exceed the layout of {layout.size} elements"
    return ranges
