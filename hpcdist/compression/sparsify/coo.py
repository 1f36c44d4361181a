"""Coordinate payloads: k ascending indices and their values, read and summed to the same bits everywhere.

A payload is k int32 indices and then k float32 values, 8 k bytes; k follows from its size, so nothing is read on the
host to learn it. Payloads of all ranks are added one after the other, in order of ranks: the sum has the same bits on
every rank and on both kinds of processor. No atomics: the indices of one payload differ.
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
MOST_ELEMENTS: Final = (1 << 31) - 1  # that an int32 can number


@functools.lru_cache(maxsize=1 << 12)
def count_of(n: int, density: float) -> int:
    """Return k = max(1, ceil(density n)), ``density`` read as the decimal it is written as; 0 for no elements.

    Raises UsageError for a tensor with more elements than an int32 index reaches.
    """
    if n > MOST_ELEMENTS:
        raise UsageError(f"a tensor of {n} elements, and indices of 32 bits reach {MOST_ELEMENTS}; encode it in pieces")
    # In floats 0.07 * 100 is above 7, and its ceiling 8.
    return min(n, max(1, math.ceil(Fraction(str(density)) * n)))


def check_density(density: float) -> None:
    """Raise ConfigurationError unless 0 < ``density`` <= 1."""
    if not 0 < density <= 1:
        raise ConfigurationError(
            f"density {density}: the share of elements to send is above 0 and at most 1, e.g. 0.01"
        )


def indices(payload: Array) -> Array:  # (k,) of int32
    """Return the indices in ``payload``, a view."""
    return payload[: payload.size // 2].view(np.int32)


def values(payload: Array) -> Array:  # (k,) of float32
    """Return the values in ``payload``, a view."""
    return payload[payload.size // 2 :].view(np.float32)


def write(payload: Array, out: Array) -> None:
    """Write zeros to the float32 ``out`` (n,), and the values of ``payload`` at their indices."""
    out[...] = 0
    if is_device(out):
        out[indices(payload)] = values(payload)
    else:
        _refuse(_scatter(indices(payload), values(payload), out), out.size)


def add(payload: Array, out: Array, factor: float | np.float32 = 1.0) -> None:
    """Add ``factor`` times the values of ``payload`` to the float32 ``out`` (n,) at their indices."""
    scale = np.float32(factor)
    if is_device(out):
        where = indices(payload)
        out[where] += scale * values(payload)  # gathered, added, scattered: no index is there twice
    else:
        _refuse(_add(indices(payload), values(payload), scale, out), out.size)


def clear(payload: Array, out: Array) -> None:
    """Write zeros to ``out`` (n,) at the indices of ``payload``."""
    where = indices(payload)
    if is_device(out):
        out[where] = 0
    else:
        _refuse(_clear(where, out), out.size)


def _refuse(wrong: int, n: int) -> None:
    if wrong:
        raise UsageError(
            f"{wrong} indices of a sparse payload are not ascending below {n}: "
            "it is of another tensor, or was changed on its way; encode and decode with the same number of elements"
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
