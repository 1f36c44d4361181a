"""Clipping by the global norm: Pascanu, Mikolov & Bengio 2013 (arXiv:1211.5063), Algorithm 1.

The sum of squares of each rank's own part is additive, so the norm of a sharded gradient is one reduced scalar, or one
reduced accumulator of `hpcdist.optim.exact` where its bits must not follow the cuts.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from hpcdist.arrays.backend import is_device, namespace
from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.filestore import FileStore
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import exact, kernels, norms

_NOTHING = 1e-30  # the norm of a gradient that has no direction
_WIDEN = 1 << 14  # 16-bit elements that are widened at a time: 64 KiB of float32 stay in a cache


def sum_of_squares(
    store: FlatStore, parts: Range | Sequence[Range] | None = None, watched: Sequence[Range] = ()
) -> float:
    """Return the sum of squares of the tensors in ``parts`` (None: of all the store holds), accumulated in float64.

    Padding is left out. What is not finite in the ranges ``watched``, which count nothing, makes the sum so too.
    float16, bfloat16 and float32 cannot overflow in it. A float64 element above 1e154 gives infinity, and a NaN or
    infinite element a result that `clip_scale` refuses. A GPU is waited for once.
    """
    ranges = store.parts if parts is None else (parts,) if isinstance(parts, Range) else parts
    total = _squares(store, ranges)
    if watched:
        total = total + 0.0 * _squares(store, watched)  # NaN where they are not finite
    return float(total)  # the one place that waits for a GPU


def _squares(store: FlatStore, ranges: Sequence[Range]) -> Any:
    """Return the sum of squares in ``ranges``, where the values are."""
    total: Any = 0.0
    for _, where in chain.from_iterable(map(store.layout.within, ranges)):
        if isinstance(store, FileStore):
            total += norms.sum_of_squares(store.blocks(where))
            continue
        values = store.range(where)
        if is_16bit_float(store.dtype) and not is_device(values):
            total = total + _squares_of_halves(values)
        else:
            total = total + kernels.sum_of_squares(values)
    return total


def _squares_of_halves(values: np.ndarray) -> Any:
    """Return the sum of squares of 16-bit ``values`` on the host, widened block by block in one piece of memory."""
    memory = np.empty(min(_WIDEN, values.size), np.float32)
    total: Any = 0.0
    for block in cut(Range(0, values.size), max(1, memory.size)):
        wide = memory[: block.size]
        kernels.widen(values[block.slice], wide)
        total = total + kernels.sum_of_squares(wide)
    return total


def exact_squares(store: FlatStore, parts: Sequence[Range]) -> np.ndarray:  # (exact.SLOTS,)
    """Return the sum of squares of the tensors in ``parts`` of a ``store`` on the host, padding left out, not rounded.

    See `hpcdist.optim.exact`; a NaN or infinite element gives a sum that is so when it is rounded.
    """
    digits = exact.zeros()
    for _, where in chain.from_iterable(map(store.layout.within, parts)):
        for values in store.blocks(where):
            exact.add_squares(values, digits)
    return digits


def clip_scale(norm_squared: float, limit: float, *, normalize: bool = False) -> float:
    """Return the factor that brings a gradient of this squared norm down to ``limit``: 1 below it or when it is 0.

    The factor is exactly limit / norm. With ``normalize`` it is that of a gradient which is divided by its norm first:
    min(1, limit) / norm, and 1 below 1e-30, where the quotient would be rounding or beyond float32. There is no limit
    where it is 0. All ranks must pass the same reduced ``norm_squared``; they then agree on the factor, or raise
    together. Raises NonFiniteError when the norm is NaN or infinite (`first_nonfinite` finds why).
    """
    if not math.isfinite(norm_squared):
        raise NonFiniteError(
            f"the squared norm of the gradient is {norm_squared}; it must be finite: "
            "lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
        )
    norm = math.sqrt(norm_squared)
    if normalize and norm > _NOTHING:
        return min(1.0, limit or 1.0) / norm
    return limit / norm if 0.0 < limit < norm else 1.0


def first_nonfinite(store: FlatStore, part: Range | None = None) -> str | None:
    """Return the key of the first tensor that holds a NaN or an infinity, None where all are finite.

    ``part``, a range of the flat space that the store holds, restricts the search.
    """
    for segment, where in store.tensors() if part is None else store.layout.within(part):
        if not all(bool(namespace(values).isfinite(values).all()) for values in store.blocks(where)):
            return segment.key
    return None
