"""Optimizers by name. The caller must call an optimizer's methods in a fixed order.

    begin_step  ->  direction(piece)...  ->  partial_norms  -> (the caller sums them) ->  apply(piece)...

The result does not depend on the sharding, up to the summation order of the norms, or bitwise with exact norms.
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
    total_steps: int,  # length of the learning-rate schedule
    ledger: Ledger | None = None,
    on: str = "cpu",  # device of the state, "cpu" or "gpu"
    make_slot: Callable[[str], FlatStore] | None = None,  # allocates a state vector such as "m"
) -> SegmentWise:
    """Return a new optimizer ``config.name`` for the flat ranges ``parts``, with zero state.

    Raises UsageError unless ``dtype``, of the master weights, is float32 or float64.
    """
    return OPTIMIZERS[config.name](
        config, layout, parts, dtype, ledger=ledger, total_steps=total_steps, on=on, make_slot=make_slot
    )
