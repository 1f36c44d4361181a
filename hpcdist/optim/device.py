"""Updates of optimizers on a GPU: one kernel a tensor, which reads the gradient in the type that it has.

Buffers of a call are 1-D contiguous memory of equal length. Weights and slots are float32 or float64. ``working``, a
copy of the weights in another type, is rounded from them in the same pass, None where there is none. Nothing here waits
for the GPU.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.fused import Source, elementwise

UPDATES: Final = Source(Path(__file__).parent / "cuda" / "updates.cu")
PACK: Final = 4  # elements that a thread takes at a time
BLOCKS: Final = 1024  # of a sum at most: a constant, so that it is the same on every GPU
THREADS: Final = 256  # of a block of a sum


def adam(weights: Array, gradient: Array, m: Array, v: Array, working: Array | None, *scalars: float) -> None:
    """Do `hpcdist.optim.updates.adam`; the gradient is kept.

    ``scalars``: scale, beta1, 1 - beta1, beta2, 1 - beta2, the corrections of both, epsilon, decay, rate.
    """
    _update("adam", weights, gradient, (m, v), working, scalars)


def momentum(weights: Array, gradient: Array, velocity: Array, working: Array | None, *scalars: float) -> None:
    """Do `hpcdist.optim.updates.momentum`; the gradient is kept.

    ``scalars``: scale, momentum, shares of g and of the velocity in the step, decay, rate.
    """
    _update("momentum", weights, gradient, (velocity,), working, scalars)


def plain(weights: Array, gradient: Array, working: Array | None, scale: float, decay: float, rate: float) -> None:
    """Do `hpcdist.optim.updates.plain`; the gradient is kept."""
    _update("plain", weights, gradient, (), working, (scale, decay, rate))


def _update(
    name: str, weights: Array, gradient: Array, slots: tuple[Array, ...], working: Array | None, scalars: Any
) -> None:
    copy, n = weights if working is None else working, weights.size
    numbers = map(float, scalars)
    types: dict[str, Any] = {"REAL": weights.dtype, "GRADIENT": gradient.dtype, "WORKING": copy.dtype}
    UPDATES.launch(
        name, *elementwise(n, PACK), weights, gradient, *slots, copy, n, int(working is not None), *numbers, **types
    )


def sum_of_squares(values: Array) -> Array:
    """Return the sum of squares in float64, as an array () on the GPU; 0 for none."""
    blocks = min(max(1, -(-values.size // (THREADS * PACK))), BLOCKS)
    partial = namespace(values).empty(blocks, np.float64)
    types: dict[str, Any] = {"REAL": np.float64, "GRADIENT": values.dtype, "WORKING": np.float64}
    UPDATES.launch("squares", blocks, THREADS, values, partial, values.size, **types)
    total: Array = partial.sum()
    return total


def convert(values: Array, into: Array, add: bool = False) -> None:
    """Write ``values`` into ``into`` of another type, rounded once to nearest even, or add them to it before."""
    types: dict[str, Any] = {"REAL": np.float32, "GRADIENT": values.dtype, "WORKING": into.dtype}
    UPDATES.launch("convert", *elementwise(values.size, PACK), values, into, values.size, int(add), **types)
