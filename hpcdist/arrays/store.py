"""Flat store: one array for the ranges of the flat layout that a rank holds, such as shards of optimizer state."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.ranges import Range

Allocate = Callable[[int, "np.dtype[Any]"], Array]


class FlatStore:
    """1-D array of all or some elements of a model's tensors, in the order of ``layout``. Padding elements are 0."""

    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype,
        parts: Range | Sequence[Range] | None = None,  # ascending, disjoint ranges to hold; None: all elements
        *,
        on: str = "cpu",
        allocate: Allocate | None = None,  # (elements, dtype) -> special memory: shared, pinned, pooled
        category: str = "parameters",
        ledger: Ledger | None = None,
    ) -> None:
        self.layout = layout
        self.parts = _ranges(layout, parts)
        self._starts = [part.start for part in self.parts]
        # _shifts[i] is the start of part i in `array`; _starts[i] is its start in the flat space.
        self._shifts = list(accumulate((part.size for part in self.parts[:-1]), initial=0))
        self.size = sum(part.size for part in self.parts)
        self.dtype = np.dtype(dtype)
        self.array = allocate(self.size, self.dtype) if allocate else backend.zeros(self.size, self.dtype, on)
        if ledger is not None:
            ledger.track(self.array, category, None if allocate or on == "gpu" else self.array.base)

    def range(self, elements: Range) -> Array:
        """Return a view of the range ``elements`` of the model's flat array. This store must hold the whole range."""
        if not elements:
            return self.array[:0]
        start = self._offset(elements)
        return self.array[start : start + elements.size]

    def holds(self, elements: Range) -> bool:
        """Return True if this store holds the whole range ``elements`` of the model's flat array."""
        index = bisect_right(self._starts, elements.start) - 1
        return index >= 0 and elements.stop <= self.parts[index].stop

    def _offset(self, elements: Range) -> int:
        index = bisect_right(self._starts, elements.start) - 1
        assert index >= 0 and elements.stop <= self.parts[index].stop, f"{elements} is not inside one of {self.parts}"
        return elements.start + self._shifts[index] - self._starts[index]

    def view(self, key: str) -> Array:
        """Return a view of the tensor named ``key``, in the tensor's shape. This store must hold all of the tensor."""
        segment = self.layout.by_key[key]
        return self.range(segment.range).reshape(segment.spec.shape)

    def tensors(self) -> Iterator[tuple[Segment, Range]]:
        """Yield (segment, flat range of the elements in this store) for each tensor with elements in this store."""
        for part in self.parts:
            yield from self.layout.within(part)

    def read(self, elements: Range, out: Array) -> None:
        """Copy the range ``elements`` of the model's flat array to ``out``, a 1-D host or GPU array."""
        values = self.range(elements)
        if backend.is_device(values) == backend.is_device(out):
            out[...] = values
        elif backend.is_device(out):
            staging.to_device_in_blocks(out, lambda where, block: np.copyto(block, values[where.slice]))
        else:
            staging.to_host_in_blocks(values, lambda where, block: np.copyto(out[where.slice], block))

    def write(self, elements: Range, values: Array) -> None:
        """Copy ``values``, a 1-D host or GPU array, to the range ``elements`` of the model's flat array."""
        held = self.range(elements)
        if backend.is_device(values) == backend.is_device(held):
            held[...] = values
        elif backend.is_device(values):
            staging.to_host_in_blocks(values, lambda where, block: np.copyto(held[where.slice], block))
        else:
            staging.to_device_in_blocks(held, lambda where, block: np.copyto(block, values[where.slice]))

    def add(self, elements: Range, values: Array) -> None:
        """Add ``values`` to the range ``elements`` of the model's flat array. A GPU store needs GPU values."""
        held = self.range(elements)
        if backend.is_device(values) and not backend.is_device(held):
            staging.to_host_in_blocks(
                values, lambda where, block: np.add(held[where.slice], block, out=held[where.slice])
            )
        else:
            with np.errstate(all="ignore"):  # the caller checks for infinity, as after a collective
                held += values

    def blocks(self, elements: Range) -> Iterator[Array]:
        """Yield the range ``elements`` of the flat array as one or more arrays, in order."""
        yield self.range(elements)

    def contents(self, elements: Range) -> Array:
        """Return the range ``elements`` of the flat array: a view, or a `FileSlice` if the store is a file."""
        return self.range(elements)

    def copy_from(self, other: "FlatStore") -> None:
        """Copy from ``other`` the elements that both stores hold. Layout and dtype of the stores must be equal."""
        on = "gpu" if backend.is_device(self.array) else "cpu"
        for part in self.parts:
            for theirs in other.parts:
                common = part.intersect(theirs)
                if common:
                    self.range(common)[...] = backend.place(other.range(common), on)

    def zero(self) -> None:
        """Set all elements, including the padding, to zero."""
        self.array[...] = 0


def _ranges(layout: Layout, parts: Range | Sequence[Range] | None) -> tuple[Range, ...]:
    if parts is None:
        parts = Range(0, layout.size)
    ranges = tuple(part for part in ((parts,) if isinstance(parts, Range) else parts) if part)
    ends = [part.stop for part in ranges]
    assert all(end <= part.start for end, part in zip(ends, ranges[1:], strict=False)), f"{ranges} overlap"
    assert not ends or ends[-1] <= layout.size, f"{ranges} exceed the layout of {layout.size} elements"
    return ranges
