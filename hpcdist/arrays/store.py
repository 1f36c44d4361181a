"""Bytes for a part of a layout."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ledger import Ledger
from hpcdist.arrays.ranges import Range

Allocate = Callable[[int, "np.dtype[Any]"], Array]


class FlatStore:
    """A 1-D array that holds ``part`` of the flat space of ``layout``, padding included and zero.

    With ``part=None`` it holds all of it. Whoever has memory of a special kind (shared by the ranks of a node, pinned)
    passes ``allocate(elements, dtype)``, which must return zeroed memory.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype,
        part: Range | None = None,
        *,
        on: str = "cpu",
        allocate: Allocate | None = None,
        category: str = "parameters",
        ledger: Ledger | None = None,
    ) -> None:
        self.layout = layout
        self.part = Range(0, layout.size) if part is None else part
        assert self.part.stop <= layout.size, f"{self.part} exceeds the layout of {layout.size} elements"
        self.dtype = np.dtype(dtype)
        self.array = allocate(self.part.size, self.dtype) if allocate else backend.zeros(self.part.size, self.dtype, on)
        if ledger is not None:
            ledger.track(self.array, category)

    def range(self, wanted: Range) -> Array:
        """Return the 1-D view of ``wanted``, given in offsets of the layout; it must lie inside ``part``."""
        inside = wanted.intersect(self.part)
        assert inside == wanted or not wanted, f"{wanted} is not inside {self.part}"
        return self.array[wanted.start - self.part.start : wanted.stop - self.part.start]

    def view(self, key: str) -> Array:
        """Return tensor ``key`` in its shape; it must lie inside ``part`` as a whole."""
        segment = self.layout.by_key[key]
        return self.range(segment.range).reshape(segment.spec.shape)

    def zero(self) -> None:
        """Set every element, padding included, to zero."""
        self.array[...] = 0
