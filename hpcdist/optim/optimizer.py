"""Optimizers by name, and the order in which their methods are called.

A layer-wise optimizer needs norms of whole tensors, but a rank may own any part of the flat space. So an update is

    begin_step  ->  direction(piece)...  ->  partial_norms  -> (the caller sums them) ->  apply(piece)...

and equals the undivided update for every partition, up to the order of summation of the norms, or to the bit where
they are summed exactly. Without norms to wait for, `direction` only stores the scale, and `apply` does everything in
one pass over memory.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim.adam import AdamW, Lamb
from hpcdist.optim.base import SegmentWise, WrappedOptimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.sgd import Lars, Sgd

OPTIMIZERS: Final[dict[str, type[SegmentWise]]] = {"adamw": AdamW, "lamb": Lamb, "lars": Lars, "sgd": Sgd}
Optimizer: TypeAlias = SegmentWise | WrappedOptimizer


def build(
    config: OptimizerConfig,
    layout: Layout,
    parts: Range | Sequence[Range],
    dtype: np.dtype,
    *,
    total_steps: int,
    ledger: Ledger | None = None,
    on: str = "cpu",
    make_slot: Callable[[str], FlatStore] | None = None,
) -> SegmentWise:
    """Return the optimizer that ``config`` names for ``parts`` of the flat space, with zeroed state.

    ``dtype`` is that of the master weights, float32 or float64 (UsageError otherwise). ``total_steps`` is the length of
    the learning-rate schedule; ``on`` is where the state lives, ``"cpu"`` or ``"gpu"``. Who keeps the state elsewhere
    passes ``make_slot``, which returns the store of a slot by its name.
    """
    return OPTIMIZERS[config.name](
        config, layout, parts, dtype, ledger=ledger, total_steps=total_steps, on=on, make_slot=make_slot
    )
