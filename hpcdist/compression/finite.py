"""Whether all values are finite: asked before compression, which hides NaN and infinity behind signs and codes."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit

_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_INFINITE: Final = np.uint32(0x7F80_0000)


def is_finite(values: Array) -> bool:
    """Return whether no value of the float32 ``values`` (n,) is NaN or infinite (local; waits for a GPU)."""
    if is_device(values):
        return bool(namespace(values).isfinite(values).all())
    return bool(_largest(values.view(np.uint32)) < _INFINITE)


@jit
def _largest(words: Any) -> Any:
    largest = np.uint32(0)
    for i in range(words.size):
        largest = max(largest, np.uint32(words[i] & _MAGNITUDE))
    return largest


_largest.sample(lambda: (np.zeros(2, np.uint32),))
