"""Master weights: an optimizer in float32 for parameters and gradients in 16-bit floats.

Updates below half a unit in the last place of a 16-bit weight would be lost (arXiv:1710.03740, section 3.1), so a
float32 master is updated and rounded. Adam takes 12 bytes per parameter: 4 for the master, 8 for the moments
(arXiv:1910.02054).
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.dtypes import FLOATS
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import base, kernels
from hpcdist.optim.base import Copy, ElementWise, LayerWise, SegmentWise, Sums, WrappedOptimizer


class MasterWeights(WrappedOptimizer):
    """Optimizer for 16-bit parameters. ``inner`` updates a float32 copy, which is then rounded to the parameters."""

    def __init__(
        self, inner: SegmentWise, layout: Layout, parts: Range | Sequence[Range], *, ledger: Ledger | None, on: str
    ) -> None:
        super().__init__(inner)
        dtype = FLOATS["float32"]
        self.weights = FlatStore(layout, dtype, parts, on=on, category="optimizer", ledger=ledger)
        # A layer-wise optimizer needs 4 more bytes per owned parameter, for the directions.
        self._wide: FlatStore | None = None  # directions of all parts
        if isinstance(inner, ElementWise):
            if on == "cpu":  # GPU kernels read 16-bit gradients
                longest = max((part.size for part in self.parts), default=0)
                inner.wide = backend.empty(min(base.BLOCK, longest), dtype, on)
                if ledger is not None:
                    ledger.track(inner.wide, "gradients")
        else:
            self._wide = FlatStore(layout, dtype, parts, on=on, category="gradients", ledger=ledger)

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        if isinstance(self._inner, LayerWise):
            self._inner.direction(piece, self.weights, gradient, scale, self._wide)
        else:
            self._inner.direction(piece, self.weights, gradient, scale)

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Update this object's float32 weights in ``piece``. Write the rounded weights to the 16-bit ``master``.

        ``direction``: store that `direction` got as ``gradient``. ``norms``: sum over the ranks of `partial_norms`.
        """
        steps = direction if self._wide is None else self._wide
        self._inner.apply(piece, self.weights, steps, master, norms)

    def round_into(self, working: FlatStore) -> None:
        """Round this rank's float32 weights to the 16-bit dtype of ``working``, and write them to ``working``."""
        for part in self.parts:
            kernels.round_into(self.weights.range(part), working.range(part))


def rounded(store: FlatStore, dtype: np.dtype) -> FlatStore:
    """Return a new host store with the float32 parameters in ``store``, rounded to the 16-bit ``dtype``."""
    copy = FlatStore(store.layout, dtype, store.parts)
    kernels.round_into(store.array, copy.array)
    return copy
