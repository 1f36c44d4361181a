"""Softmax over rows of which only a tile is in memory at a time (Milakov, Gimelshein, arXiv:1805.02867), in place.

Tiles are contiguous (pairs, rows, columns): so many pairs of a sample and a head from ``pair`` on, rows (queries) from
``first`` on, columns (keys) from ``start`` on. Row i of the whole sees its columns up to i where ``causal``, else all.
What is known of a row lies in ``top``, the maximum of its scores, and ``total``, the sum of their exponentials, both
(all pairs, all rows).
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.exponential import exp
from hpcdist.models.kernels import REORDER, SAMPLE_DTYPES
from hpcdist.models.ordered import largest


def advance(
    s: Array,
    pair: int,
    first: int,
    start: int,
    causal: bool,
    scale: float,
    top: Array,
    total: Array,
    shrink: Array,
) -> None:
    """Overwrite scores s with ``exp(scale (s - maximum))``, hidden ones with 0, and take them into top and total.

    The maximum is that of the columns up to here. Tiles come in the order of their columns, the first with ``start`` 0;
    for later ones ``shrink`` (pairs, rows) is what sums over the earlier columns have to be multiplied by. ``scale``
    is positive, and every row sees a column of every tile.
    """
    if is_device(s):
        _advance_device(s, pair, first, start, causal, scale, top, total, shrink)
    else:
        _advance(s, pair, first, start, causal, s.dtype.type(scale), top, total, shrink)


def gradient(
    s: Array,
    d: Array,
    pair: int,
    first: int,
    start: int,
    causal: bool,
    scale: float,
    top: Array,
    total: Array,
    dots: Array,
) -> None:
    """Overwrite scores s with their probabilities p, and the gradient d of those with that of the scores.

    The latter is ``scale p (d - dots)``, with the sum of p d over a row in ``dots`` (all pairs, all rows). ``top`` and
    ``total`` are of all columns.
    """
    if is_device(s):
        _gradient_device(s, d, pair, first, start, causal, scale, top, total, dots)
    else:
        _gradient(s, d, pair, first, start, causal, s.dtype.type(scale), top, total, dots)


def _rows(array: Array, s: Array, pair: int, first: int) -> Array:
    return array[pair : pair + s.shape[0], first : first + s.shape[1]]


def _hidden(s: Array, first: int, start: int) -> Array:
    """Return where a tile (rows, columns) lies in the future."""
    xp = namespace(s)
    rows, columns = xp.arange(first, first + s.shape[1]), xp.arange(start, start + s.shape[2])
    hidden: Array = columns[None, :] > rows[:, None]
    return hidden


def _advance_device(
    s: Array,
    pair: int,
    first: int,
    start: int,
    causal: bool,
    scale: float,
    top: Array,
    total: Array,
    shrink: Array,
) -> None:
    xp = namespace(s)
    if causal and first + 1 < start + s.shape[2]:
        s[...] = xp.where(_hidden(s, first, start), -xp.inf, s)
    highest, sums = _rows(top, s, pair, first), _rows(total, s, pair, first)
    if start:
        new = xp.maximum(highest, s.max(axis=2))
        shrink[...] = xp.exp((highest - new) * scale)
        highest[...] = new
        sums *= shrink
    else:
        highest[...] = s.max(axis=2)
        sums[...] = 0
    s -= highest[:, :, None]
    s *= scale
    xp.exp(s, out=s)
    sums += s.sum(axis=2)


def _gradient_device(
    s: Array,
    d: Array,
    pair: int,
    first: int,
    start: int,
    causal: bool,
    scale: float,
    top: Array,
    total: Array,
    dots: Array,
) -> None:
    xp = namespace(s)
    if causal and first + 1 < start + s.shape[2]:
        s[...] = xp.where(_hidden(s, first, start), -xp.inf, s)
    s -= _rows(top, s, pair, first)[:, :, None]
    s *= scale
    xp.exp(s, out=s)
    s /= _rows(total, s, pair, first)[:, :, None]
    d -= _rows(dots, s, pair, first)[:, :, None]
    d *= s
    d *= scale


# Hidden columns are computed as well: rows of a whole number of vectors have no rest then.


@jit(fastmath=REORDER)
def _advance(
    s: Any, pair: Any, first: Any, start: Any, causal: Any, scale: Any, top: Any, total: Any, shrink: Any
) -> None:
    for h in range(s.shape[0]):
        for i in range(s.shape[1]):
            row = s[h, i]
            if causal:
                row[first + i + 1 - start :] = -np.inf
            highest, sums = largest(row), scale - scale
            if start > 0:
                before = top[pair + h, first + i]
                highest = max(highest, before)
                shrink[h, i] = exp((before - highest) * scale)
                sums = total[pair + h, first + i] * shrink[h, i]
            for j in range(row.size):
                e = exp((row[j] - highest) * scale)
                row[j] = e
                sums += e
            top[pair + h, first + i] = highest
            total[pair + h, first + i] = sums


@jit(fastmath=REORDER)
def _gradient(
    s: Any,
    d: Any,
    pair: Any,
    first: Any,
    start: Any,
    causal: Any,
    scale: Any,
    top: Any,
    total: Any,
    dots: Any,
) -> None:
    for h in range(s.shape[0]):
        for i in range(s.shape[1]):
            p, g = s[h, i], d[h, i]
            if causal:
                p[first + i + 1 - start :] = -np.inf
                g[first + i + 1 - start :] = 0
            highest, dot = top[pair + h, first + i], dots[pair + h, first + i]
            share = s.dtype.type(1.0 / total[pair + h, first + i])
            for j in range(p.size):
                p[j] = exp((p[j] - highest) * scale) * share
                g[j] = p[j] * (g[j] - dot) * scale


for _dtype in SAMPLE_DTYPES:
    _one, _cube, _square = np.dtype(_dtype).type(1), np.ones((1, 2, 2), _dtype), np.ones((1, 2), _dtype)
    _advance.sample(lambda x=_cube, q=_square, s=_one: (x.copy(), 0, 0, 0, True, s, q.copy(), q.copy(), q.copy()))
    _gradient.sample(lambda x=_cube, q=_square, s=_one: (x.copy(), x.copy(), 0, 0, 0, True, s, q, q, q))
