"""Uniform numbers in [0, 1) for the elements of a payload: 24 bits of Philox4x32 each (`hpcdist.arrays.rng`).

Element i has word i % 4 of counter i // 4, whoever draws it, in whatever pieces.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox_arrays

WORDS: Final = 4  # of a counter
_SHIFT: Final = np.uint32(8)
_STEP: Final = np.float32(2.0**-24)


@jit
def unit(word: Any) -> Any:
    """Return the upper 24 bits of ``word`` as a float32 in [0, 1). For kernels."""
    return np.float32(np.float32(np.int32(np.uint32(word >> _SHIFT))) * _STEP)


def units_arrays(like: Array, key: tuple[int, ...]) -> Array:
    """Return the numbers of the elements of ``like`` (n,), on its processor; ``key`` is that of `Key.words`."""
    xp = namespace(like)
    counters = -(-like.size // WORDS)
    drawn = philox_arrays((xp.arange(counters, dtype=np.uint64), *key[:3]), (key[3], key[4]))
    units = xp.empty((counters, WORDS), np.float32)
    for number, word in enumerate(drawn):
        units[:, number] = word >> 8
    units *= _STEP
    return units.reshape(-1)[: like.size]
