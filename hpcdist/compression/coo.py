"""Sparse payloads: k ascending indices and their values.

A payload is k int32 indices, then k float32 values: 8 k bytes. An allreduce adds the payloads of all ranks in rank
order, so its sums are bitwise equal on all ranks.
"""

import functools
import math
from fractions import Fraction
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.errors import ConfigurationError, UsageError

ENTRY_BYTES: Final = 8  # an index and a value
MOST_ELEMENTS: Final = (1 << 31) - 1  # the largest count that int32 indices reach


@functools.lru_cache(maxsize=1 << 12)
def count_of(n: int, density: float) -> int:
    """Return the number of values to send out of ``n`` values: max(1, ceil(density n)), or 0 if ``n`` is 0."""
    # Raises UsageError if `n` is too large for int32 indices.
    if n > MOST_ELEMENTS:
        raise UsageError(
            f"a tensor of {n} elements is too large: int32 indices reach {MOST_ELEMENTS} elements; encode it in pieces"
        )
    # In floats, 0.07 * 100 is above 7, so its ceiling would be 8.
    return min(n, max(1, math.ceil(Fraction(str(density)) * n)))


def check_density(density: float) -> None:
    """Raise ConfigurationError unless 0 < ``density`` <= 1."""
    if not 0 < density <= 1:
        raise ConfigurationError(
            f"density {density}: the fraction of elements to send must be above 0 and at most 1, e.g. 0.01"
        )


def indices(payload: Array) -> Array:  # (k,) of int32
    """Return a view of the element indices in a sparse ``payload``."""
    return payload[: payload.size // 2].view(np.int32)


def values(payload: Array) -> Array:  # (k,) of float32
    """Return a view of the values in a sparse ``payload``."""
    return payload[payload.size // 2 :].view(np.float32)


def write(payload: Array, out: Array) -> None:
    """Decode the sparse ``payload`` into the float32 array ``out``. Set the elements without a sent value to 0."""
    out[...] = 0
    if is_device(out):
        out[indices(payload)] = values(payload)
    else:
        _refuse(_scatter(indices(payload), values(payload), out), out.size)


def add(payload: Array, out: Array, factor: float | np.float32 = 1.0) -> None:
    """Add ``factor`` times the values of the sparse ``payload`` to the elements of ``out`` at their indices."""
    scale = np.float32(factor)
    if is_device(out):
        where = indices(payload)
        out[where] += scale * values(payload)  # gather, add, scatter: indices are distinct
    else:
        _refuse(_add(indices(payload), values(payload), scale, out), out.size)


def clear(payload: Array, out: Array) -> None:
    """Write zeros to ``out`` at the indices of the sparse ``payload``."""
    where = indices(payload)
    if is_device(out):
        out[where] = 0
    else:
        _refuse(_clear(where, out), out.size)


def _refuse(wrong: int, n: int) -> None:
    if wrong:
        raise UsageError(
            f"{wrong} indices of a sparse payload are negative or not below {n}: the payload is for another "
            "tensor, or was changed in transit; encode and decode with the same number of elements"
        )


@jit
def _scatter(where: Any, entries: Any, out: Any) -> Any:
    wrong = 0
    for i in range(where.size):
        if 0 <= where[i] < out.size:
            out[where[i]] = entries[i]
        else:
            wrong += 1
    return wrong


@jit
def _add(where: Any, entries: Any, scale: Any, out: Any) -> Any:
    wrong = 0
    for i in range(where.size):
        if 0 <= where[i] < out.size:
            out[where[i]] += scale * entries[i]
        else:
            wrong += 1
    return wrong


@jit
def _clear(where: Any, out: Any) -> Any:
    wrong = 0
    zero = out.dtype.type(0)
    for i in range(where.size):
        if 0 <= where[i] < out.size:
            out[where[i]] = zero
        else:
            wrong += 1
    return wrong


_words, _floats = np.zeros(1, np.int32), np.ones(2, np.float32)
_scatter.sample(lambda: (_words, _floats, _floats.copy()))
_add.sample(lambda: (_words, _floats, np.float32(1), _floats.copy()))
_clear.sample(lambda: (_words, _floats.copy()))
