"""What attention does to the rows of its heads between the products.

A tile (pairs, rows, head size) is contiguous: so many pairs of a sample and a head from ``pair`` on, rows from
``first`` on. It belongs to a target (batch, context, columns) that has ``heads`` heads next to each other from
``column`` on. On a GPU a tile has all pairs.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models.kernels import REORDER, SAMPLE_DTYPES


def merge(part: Array, y: Array, heads: int, pair: int, first: int, shrink: Array) -> None:
    """Multiply rows of y by ``shrink`` (pairs, rows) and add ``part`` to them; y has the heads' columns alone."""
    if is_device(y):
        rows = _view(y, 0, heads, part.shape[2])[:, :, first : first + part.shape[1]]
        rows *= shrink.reshape(rows.shape[:3])[..., None]
        rows += part.reshape(rows.shape)
    else:
        _merge(part, y, heads, pair, first, shrink)


def divide(y: Array, heads: int, pair: int, first: int, pairs: int, rows: int, total: Array) -> None:
    """Divide rows of so many pairs of y by ``total`` (all pairs, context); y has the heads' columns alone."""
    if is_device(y):
        found = _view(y, 0, heads, y.shape[2] // heads)[:, :, first : first + rows]
        found /= total[:, first : first + rows].reshape(found.shape[:3])[..., None]
    else:
        _divide(y, heads, pair, first, pairs, rows, total)


def dots(dy: Array, y: Array, heads: int, out: Array) -> None:
    """Write the products of the rows of dy and y, which have the heads' columns alone, to ``out`` (pairs, context)."""
    if is_device(y):
        product = (dy * y).reshape(*y.shape[:2], heads, -1)
        out[...] = product.sum(axis=3).transpose(0, 2, 1).reshape(out.shape)
    else:
        _dots(dy, y, heads, out)


def collect(
    part: Array, groups: int, target: Array, heads: int, pair: int, column: int, first: int, again: bool
) -> None:
    """Write ``part`` (pairs groups, rows, size), summed over its groups, to rows of ``target``; ``again`` adds it."""
    if is_device(target):
        rows = _view(target, column, heads, part.shape[2])[:, :, first : first + part.shape[1]]
        sums = part.reshape(*rows.shape[:2], groups, *rows.shape[2:]).sum(axis=2)
        rows[...] = rows + sums if again else sums
    else:
        _collect(part, groups, target, heads, pair, column, first, again)


def _view(x: Array, column: int, heads: int, size: int) -> Array:
    """View the heads of x (batch, context, columns) as (batch, heads, context, size)."""
    batch, context, _ = x.shape
    return x[:, :, column : column + heads * size].reshape(batch, context, heads, size).transpose(0, 2, 1, 3)


# Rows are cut out before their loops: with one index alone LLVM makes vector code without a check at every row.


@jit(fastmath=REORDER)
def _merge(part: Any, y: Any, heads: Any, pair: Any, first: Any, shrink: Any) -> None:
    size = part.shape[2]
    for p in range(part.shape[0]):
        b, h = divmod(pair + p, heads)
        for i in range(part.shape[1]):
            row, new, factor = y[b, first + i, h * size : (h + 1) * size], part[p, i], shrink[p, i]
            for j in range(size):
                row[j] = row[j] * factor + new[j]


@jit(fastmath=REORDER)
def _divide(y: Any, heads: Any, pair: Any, first: Any, pairs: Any, rows: Any, total: Any) -> None:
    size = y.shape[2] // heads
    for p in range(pair, pair + pairs):
        b, h = divmod(p, heads)
        for i in range(first, first + rows):
            row, factor = y[b, i, h * size : (h + 1) * size], y.dtype.type(1.0 / total[p, i])
            for j in range(size):
                row[j] *= factor


@jit(fastmath=REORDER)
def _dots(dy: Any, y: Any, heads: Any, out: Any) -> None:
    size, zero = y.shape[2] // heads, y.dtype.type(0)
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for h in range(heads):
                one, other = dy[b, i, h * size : (h + 1) * size], y[b, i, h * size : (h + 1) * size]
                total = zero
                for j in range(size):
                    total += one[j] * other[j]
                out[b * heads + h, i] = total


@jit(fastmath=REORDER)
def _collect(part: Any, groups: Any, target: Any, heads: Any, pair: Any, column: Any, first: Any, again: Any) -> None:
    size = part.shape[2]
    for p in range(part.shape[0]):
        b, h = divmod(pair + p // groups, heads)
        left, adds = column + h * size, again or p % groups > 0
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
    _merge.sample(lambda x=_cube, q=_square: (x, x.copy(), 1, 0, 0, q))
    _divide.sample(lambda x=_cube, q=_square: (x.copy(), 1, 0, 0, 1, 2, q))
    _dots.sample(lambda x=_cube, q=_square: (x, x, 1, q.copy()))
    _collect.sample(lambda x=_cube: (x, 1, x.copy(), 1, 0, 0, 0, True))
