"""Coordinate payloads: k ascending indices and their values, read and summed to the same bits everywhere.

A payload is k int32 indices and then k float32 values, 8 k bytes; k follows from its size, so nothing is read on the
host to learn it. Payloads of all ranks, gathered one behind the other, are added by index and then by rank: the sum
has the same bits on every rank and on both kinds of processor. No atomics: the indices of one payload differ. On the
host the sum goes through memory once, whatever the number of ranks: 4 n bytes are written and 8 k read for each rank.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.errors import ConfigurationError, UsageError

ENTRY_BYTES: Final = 8  # an index and a value
MOST_ELEMENTS: Final = (1 << 31) - 1  # that an int32 can number
_TILE: Final = 4096  # elements: 16 KiB of sums stay in the first cache while every rank adds to them


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


def accumulate(gathered: Array, sizes_bytes: Sequence[int], out: Array) -> None:
    """Write the sum of the payloads in ``gathered``, one behind the other in order of ranks, to the float32 ``out``.

    ``sizes_bytes`` are theirs; they may differ, and be 0. Each element is 0 + its values in order of ranks.
    """
    if sum(sizes_bytes) != gathered.size or any(size % ENTRY_BYTES or size < 0 for size in sizes_bytes):
        raise UsageError(
            f"payloads of {list(sizes_bytes)} bytes in a buffer of {gathered.size}; "
            f"pass the size of each, multiples of {ENTRY_BYTES} whose sum is that of the buffer"
        )
    ends = np.cumsum([0, *sizes_bytes])
    if is_device(out):
        out[...] = 0
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            add(gathered[start:end], out)
        return
    starts = ends // 4
    words = gathered.view(np.uint32)
    _refuse(_accumulate(words, gathered.view(np.float32), starts, starts[:-1].copy(), out), out.size)


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


@jit
def _accumulate(words: Any, floats: Any, starts: Any, cursors: Any, out: Any) -> Any:
    # Payload r has its indices at words[starts[r]:middle] and its values at floats[middle:starts[r + 1]];
    # cursors (ranks,) say where its next index is.
    for tile in range(0, out.size, _TILE):
        stop = min(tile + _TILE, out.size)
        out[tile:stop] = np.float32(0)
        for r in range(cursors.size):
            count = (starts[r + 1] - starts[r]) // 2
            middle = starts[r] + count
            i = cursors[r]
            while i < middle and tile <= words[i] < stop:
                out[words[i]] += floats[i + count]
                i += 1
            cursors[r] = i
    wrong = 0
    for r in range(cursors.size):
        wrong += starts[r] + (starts[r + 1] - starts[r]) // 2 - cursors[r]
    return wrong


_words, _floats, _places = np.zeros(2, np.int32), np.ones(2, np.float32), np.array([0, 2])
_scatter.sample(lambda: (_words[:1], _floats, _floats.copy()))
_add.sample(lambda: (_words[:1], _floats, np.float32(1), _floats.copy()))
_clear.sample(lambda: (_words[:1], _floats.copy()))
_accumulate.sample(lambda: (_words.view(np.uint32), _floats, _places, _places[:-1].copy(), _floats.copy()))
