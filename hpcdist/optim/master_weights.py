"""Master weights: an optimizer in float32 over parameters and gradients in 16-bit floats.

Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.1: an update is often smaller than half a
unit in the last place of a 16-bit weight, and would be lost. So a float32 master is updated, and the working copy is
the master, rounded. Of K = 12 bytes a parameter, as arXiv:1910.02054 counts Adam, 4 are the master and 8 the moments.
"""

from collections.abc import Sequence

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import base
from hpcdist.optim.base import Copy, ElementWise, LayerWise, SegmentWise, Sums, WrappedOptimizer
from hpcdist.optim.update import kernels


class MasterWeights(WrappedOptimizer):
    """Optimizer over ``inner`` that steps float32 ``weights`` of its own.

    What it is given as master is the 16-bit working copy, and the gradient is 16-bit too. The gradient is widened
    block by block and the direction never rounded; without layer-wise rates, a block is stepped and rounded at once, in
    `apply`. With them the directions of all parts wait in float32 for the norms: 4 bytes more for each owned parameter.
    """

    def __init__(
        self, inner: SegmentWise, layout: Layout, parts: Range | Sequence[Range], *, ledger: Ledger | None, on: str
    ) -> None:
        super().__init__(inner)
        dtype = FLOATS["float32"]
        self.weights = FlatStore(layout, dtype, parts, on=on, category="optimizer", ledger=ledger)
        self._wide: FlatStore | None = None  # of all parts
        if isinstance(inner, ElementWise):
            if on == "cpu":  # a GPU reads the gradient as it is
                longest = max((part.size for part in self.parts), default=0)
                inner.wide = backend.empty(min(base.BLOCK, longest), dtype, on)
                if ledger is not None:
                    ledger.track(inner.wide, "gradients")
        else:
            self._wide = FlatStore(layout, dtype, parts, on=on, category="gradients", ledger=ledger)

    def direction(self, piece: Range, master: FlatStore, gradient: FlatStore, scale: float = 1.0) -> None:
        """Store ``scale`` or, where norms are needed, compute the direction on ``piece`` in float32."""
        if isinstance(self._inner, LayerWise):
            self._inner.direction(piece, self.weights, gradient, scale, self._wide)
        else:
            self._inner.direction(piece, self.weights, gradient, scale)

    def apply(
        self, piece: Range, master: FlatStore, direction: FlatStore, working: Copy = None, norms: Sums = None
    ) -> None:
        """Step the float32 master on ``piece``, and round it into ``master``, the working copy."""
        steps = direction if self._wide is None else self._wide
        self._inner.apply(piece, self.weights, steps, master, norms)

    def round_into(self, working: FlatStore) -> None:
        """Make the ``working`` copy anew from the master, on the owned parts."""
        for part in self.parts:
            kernels.round_into(self.weights.range(part), working.range(part))


def rounded(store: FlatStore, dtype: np.dtype) -> FlatStore:
    """Return a copy of the float32 ``store``, on the host, rounded to 16 bits."""
    copy = FlatStore(store.layout, dtype, store.parts)
    kernels.round_into(store.array, copy.array)
    return copy
