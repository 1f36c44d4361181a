"""States of made-up layouts, as ranks save and restore them: no model computes with them."""

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore

FLOAT = np.dtype("float32")
LAYOUT = Layout.of([TensorSpec(0, "table", (11, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "scale", ())])
LARGE = Layout.of([TensorSpec(0, "table", (301, 17)), TensorSpec(1, "weight", (64, 33)), TensorSpec(1, "bias", (5,))])


def pieces_of(store: FlatStore, part: Range, kind: str = "parameters") -> list[Piece]:
    """Return what a rank saves or restores that has ``part``."""
    return [Piece.of(kind, segment, touched, store.range(touched)) for segment, touched in store.layout.within(part)]


def filled(layout: Layout, rng: np.random.Generator, dtype: object = "float32") -> FlatStore:
    """Return a store of drawn values; padding is zero."""
    store = FlatStore(layout, dtype_of(str(dtype)))
    for segment in layout.segments:
        store.range(segment.range)[...] = rng.standard_normal(segment.range.size).astype(store.dtype)
    return store
