"""Kernels of attention between the matrix products: online softmax in place, and sums over the rows of heads.

Softmax over rows of which only a tile is in memory at a time (Milakov, Gimelshein, arXiv:1805.02867). Score tiles are
contiguous (pairs, rows, columns): so many pairs of a sample and a head from ``pair`` on, rows (queries) from ``first``
on, and columns (keys). Row i of a tile sees its columns [low + i, high + i), of which it may have none. What is known
of a row lies in ``top``, the maximum of its scores, and ``total``, the sum of their exponentials, both
(all pairs, all rows).

A tile of head rows is contiguous (pairs, rows, head size). It belongs to a target (batch, context, columns) that has
``heads`` heads next to each other from ``column`` on. On a GPU a tile has all pairs of some samples.
"""

from typing import Any, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp, row_maximum

# Pair and query at its corner; the columns that the first row sees, and the next ones one further on; whether it is the
# first tile of its rows.
Tile: TypeAlias = tuple[int, int, int, int, bool]


def softmax_advance(s: Array, tile: Tile, scale: float, top: Array, total: Array, shrink: Array) -> None:
    """Overwrite scores s with ``exp(scale (s - maximum))``, hidden ones with 0, and update top and total by them.

    The maximum is that of the columns up to here. Tiles come in the order of their columns; after the first of its
    rows ``shrink`` (pairs, rows) is what sums over the earlier columns have to be multiplied by. ``scale`` is positive.
    Of a row that has seen nothing yet the maximum is -infinity and the sum 0.
    """
    if is_device(s):
        _softmax_advance_device(s, tile, scale, top, total, shrink)
    else:
        _softmax_advance(s, *tile, s.dtype.type(scale), top, total, shrink)


def softmax_gradient(s: Array, d: Array, tile: Tile, scale: float, top: Array, total: Array, dots: Array) -> None:
    """Overwrite scores s with their probabilities p, and the gradient d of those with that of the scores.

    The latter is ``scale p (d - dots)``, with the sum of p d over a row in ``dots`` (all pairs, all rows). ``top`` and
    ``total`` are of all columns.
    """
    if is_device(s):
        _softmax_gradient_device(s, d, tile, scale, top, total, dots)
    else:
        _softmax_gradient(s, d, *tile[:4], s.dtype.type(scale), top, total, dots)


def _rows(array: Array, s: Array, pair: int, first: int) -> Array:
    return array[pair : pair + s.shape[0], first : first + s.shape[1]]


def _hide(s: Array, tile: Tile) -> None:
    """Write -infinity to the scores of a tile that are hidden."""
    xp, (_, _, low, high, _) = namespace(s), tile
    if high < s.shape[2] or low + s.shape[1] > 1:
        place = xp.arange(s.shape[2])[None, :] - xp.arange(s.shape[1])[:, None]
        s[...] = xp.where((place < low) | (place >= high), -xp.inf, s)


def _softmax_advance_device(s: Array, tile: Tile, scale: float, top: Array, total: Array, shrink: Array) -> None:
    xp, (pair, first, _, _, new) = namespace(s), tile
    _hide(s, tile)
    highest, sums = _rows(top, s, pair, first), _rows(total, s, pair, first)
    higher = s.max(axis=2)
    if not new:
        higher = xp.maximum(highest, higher)
    base = xp.where(higher == -xp.inf, 0, higher)  # of rows that have seen nothing
    if not new:
        shrink[...] = xp.exp((highest - base) * scale)
        sums *= shrink
    else:
        sums[...] = 0
    highest[...] = higher
    s -= base[:, :, None]
    s *= scale
    xp.exp(s, out=s)
    sums += s.sum(axis=2)


def _softmax_gradient_device(
    s: Array, d: Array, tile: Tile, scale: float, top: Array, total: Array, dots: Array
) -> None:
    xp, (pair, first, *_) = namespace(s), tile
    _hide(s, tile)
    s -= _rows(top, s, pair, first)[:, :, None]
    s *= scale
    xp.exp(s, out=s)
    s /= _rows(total, s, pair, first)[:, :, None]
    d -= _rows(dots, s, pair, first)[:, :, None]
    d *= s
    d *= scale


# Hidden columns are computed as well: rows of a whole number of vectors have no rest then.


@jit(fastmath=REORDER)
def _softmax_advance(
    s: Any, pair: Any, first: Any, low: Any, high: Any, new: Any, scale: Any, top: Any, total: Any, shrink: Any
) -> None:
    for h in range(s.shape[0]):
        for i in range(s.shape[1]):
            row = s[h, i]
            row[: max(low + i, 0)] = -np.inf
            row[max(high + i, 0) :] = -np.inf
            highest, sums = row_maximum(row), scale - scale  # a zero of the dtype
            if not new:
                highest = max(highest, top[pair + h, first + i])
            base = sums if highest == -np.inf else highest  # of a row that has seen nothing 0
            if not new:  # sums over earlier tiles were relative to a maximum that may be exceeded now
                shrink[h, i] = exp((top[pair + h, first + i] - base) * scale)
                sums = total[pair + h, first + i] * shrink[h, i]
            for j in range(row.size):
                e = exp((row[j] - base) * scale)
                row[j] = e
                sums += e
            top[pair + h, first + i] = highest
            total[pair + h, first + i] = sums


@jit(fastmath=REORDER)
def _softmax_gradient(
    s: Any, d: Any, pair: Any, first: Any, low: Any, high: Any, scale: Any, top: Any, total: Any, dots: Any
) -> None:
    for h in range(s.shape[0]):
        for i in range(s.shape[1]):
            p, g = s[h, i], d[h, i]
            begin, end = max(low + i, 0), max(high + i, 0)
            p[:begin], p[end:] = -np.inf, -np.inf
            g[:begin], g[end:] = 0, 0
            highest, dot = top[pair + h, first + i], dots[pair + h, first + i]
            # One division for the row. The Jacobian of softmax: dscore_j = p_j (g_j - sum_k p_k g_k), times the scale.
            share = s.dtype.type(1.0 / total[pair + h, first + i])
            for j in range(p.size):
                p[j] = exp((p[j] - highest) * scale) * share
                g[j] = p[j] * (g[j] - dot) * scale


for _softmax_dtype in SAMPLE_DTYPES:
    _one, _softmax_cube, _softmax_square = (
        np.dtype(_softmax_dtype).type(1),
        np.ones((1, 2, 2), _softmax_dtype),
        np.ones((1, 2), _softmax_dtype),
    )
    _softmax_advance.sample(
        lambda x=_softmax_cube, q=_softmax_square, s=_one: (
            x.copy(),
            0,
            0,
            0,
            1,
            True,
            s,
            q.copy(),
            q.copy(),
            q.copy(),
        )
    )
    _softmax_gradient.sample(
        lambda x=_softmax_cube, q=_softmax_square, s=_one: (x.copy(), x.copy(), 0, 0, 0, 1, s, q, q, q)
    )


def rescale_add(part: Array, y: Array, heads: int, pair: int, first: int, shrink: Array) -> None:
    """Multiply rows of y by ``shrink`` (pairs, rows) and add ``part`` to them; y has the heads' columns alone."""
    if is_device(y):
        rows = _view(y, 0, heads, part.shape[2], pair, part.shape[0])[:, :, first : first + part.shape[1]]
        rows *= shrink.reshape(rows.shape[:3])[..., None]
        rows += part.reshape(rows.shape)
    else:
        _rescale_add(part, y, heads, pair, first, shrink)


def divide_by_totals(y: Array, heads: int, pair: int, first: int, pairs: int, rows: int, total: Array) -> None:
    """Divide rows of so many pairs of y by ``total`` (all pairs, context); y has the heads' columns alone."""
    if is_device(y):
        view = _view(y, 0, heads, y.shape[2] // heads, pair, pairs)[:, :, first : first + rows]
        view /= total[pair : pair + pairs, first : first + rows].reshape(view.shape[:3])[..., None]
    else:
        _divide_by_totals(y, heads, pair, first, pairs, rows, total)


def row_dots(dy: Array, y: Array, heads: int, out: Array) -> None:
    """Write the products of the rows of dy and y, which have the heads' columns alone, to ``out`` (pairs, context)."""
    if is_device(y):
        product = (dy * y).reshape(*y.shape[:2], heads, -1)
        out[...] = product.sum(axis=3).transpose(0, 2, 1).reshape(out.shape)
    else:
        _row_dots(dy, y, heads, out)


def accumulate(
    part: Array, groups: int, target: Array, heads: int, pair: int, column: int, first: int, add: bool
) -> None:
    """Write ``part`` (pairs groups, rows, size), summed over its groups, to rows of ``target``; ``add`` adds it."""
    if is_device(target):
        pairs = part.shape[0] // groups
        rows = _view(target, column, heads, part.shape[2], pair, pairs)[:, :, first : first + part.shape[1]]
        sums = part.reshape(*rows.shape[:2], groups, *rows.shape[2:]).sum(axis=2)
        rows[...] = rows + sums if add else sums
    else:
        _accumulate(part, groups, target, heads, pair, column, first, add)


def _view(x: Array, column: int, heads: int, size: int, pair: int, pairs: int) -> Array:
    """View the heads of whole samples of x (batch, context, columns) as (samples, heads, context, size)."""
    first, samples = pair // heads, pairs // heads
    own = x[first : first + samples, :, column : column + heads * size]
    return own.reshape(samples, x.shape[1], heads, size).transpose(0, 2, 1, 3)


# Rows are cut out before their loops: with one index alone LLVM makes vector code without a check at every row.


@jit(fastmath=REORDER)
def _rescale_add(part: Any, y: Any, heads: Any, pair: Any, first: Any, shrink: Any) -> None:
    size = part.shape[2]
    for p in range(part.shape[0]):
        b, h = divmod(pair + p, heads)  # pairs are numbered by sample, then head
        for i in range(part.shape[1]):
            row, new, factor = y[b, first + i, h * size : (h + 1) * size], part[p, i], shrink[p, i]
            for j in range(size):
                row[j] = row[j] * factor + new[j]


@jit(fastmath=REORDER)
def _divide_by_totals(y: Any, heads: Any, pair: Any, first: Any, pairs: Any, rows: Any, total: Any) -> None:
    size = y.shape[2] // heads
    for p in range(pair, pair + pairs):
        b, h = divmod(p, heads)
        for i in range(first, first + rows):
            row, factor = y[b, i, h * size : (h + 1) * size], y.dtype.type(1.0 / total[p, i])
            for j in range(size):
                row[j] *= factor


@jit(fastmath=REORDER)
def _row_dots(dy: Any, y: Any, heads: Any, out: Any) -> None:
    size, zero = y.shape[2] // heads, y.dtype.type(0)
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for h in range(heads):
                dy_row, y_row = dy[b, i, h * size : (h + 1) * size], y[b, i, h * size : (h + 1) * size]
                total = zero
                for j in range(size):
                    total += dy_row[j] * y_row[j]
                out[b * heads + h, i] = total


@jit(fastmath=REORDER)
def _accumulate(part: Any, groups: Any, target: Any, heads: Any, pair: Any, column: Any, first: Any, add: Any) -> None:
    size = part.shape[2]
    for p in range(part.shape[0]):
        b, h = divmod(pair + p // groups, heads)  # groups pairs of the tile after another share one head of the target
        left, adds = column + h * size, add or p % groups > 0
        for i in range(part.shape[1]):
            row, new = target[b, first + i, left : left + size], part[p, i]
            if adds:
                for j in range(size):
                    row[j] += new[j]
            else:
                for j in range(size):
                    row[j] = new[j]


for _dtype in SAMPLE_DTYPES:
    _cube, _square = np.ones((1, 2, 2), _dtype), np.ones((1, 2), _dtype)
    _rescale_add.sample(lambda x=_cube, q=_square: (x, x.copy(), 1, 0, 0, q))
    _divide_by_totals.sample(lambda x=_cube, q=_square: (x.copy(), 1, 0, 0, 1, 2, q))
    _row_dots.sample(lambda x=_cube, q=_square: (x, x, 1, q.copy()))
    _accumulate.sample(lambda x=_cube: (x, 1, x.copy(), 1, 0, 0, 0, True))
