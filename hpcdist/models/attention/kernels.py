"""Kernels of attention between the matrix products: online softmax in place, and sums over the rows of heads.

The softmax is computed tile by tile (Milakov, Gimelshein, arXiv:1805.02867). Tiles are contiguous.
"""

from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.gpu.kernels import KernelSource, elementwise, threads_for
from hpcdist.arrays.jit import jit
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp, row_maximum

SOFTMAX: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "softmax.cu")

# First pair and first query; visible columns [low, high) of the first row, which move by one per row; True for the
# first tile of its rows.
Tile: TypeAlias = tuple[int, int, int, int, bool]


def softmax_advance(s: Array, tile: Tile, scale: float, top: Array, total: Array, shrink: Array) -> None:
    """Overwrite a tile of attention scores s with exp(scale (s - top)). Pass the tiles of a row in order.

    ``s``: scores of shape (heads, queries, keys). ``top``, ``total``: running maximum and sum of each row. ``shrink``
    receives exp(scale (old top - new top)). The caller must multiply the earlier output by ``shrink``.
    """
    # Hidden keys become 0. The shapes are (all pairs, all rows) of `top` and `total`, and (pairs, rows) of `shrink`. A
    # pair is a sample and a head. The first tile leaves `shrink` unchanged.
    if is_device(s):
        _softmax_advance_device(s, tile, scale, top, total, shrink)
    else:
        _softmax_advance(s, *tile, s.dtype.type(scale), top, total, shrink)


def softmax_gradient(s: Array, d: Array, tile: Tile, scale: float, top: Array, total: Array, dots: Array) -> None:
    """Overwrite attention scores s with probabilities p. Overwrite d, the gradient of p, with the gradient of s.

    ``tile``: position of s in the scores. ``top``, ``total``: maximum and sum of each row. ``dots``: result of
    `hpcdist.models.attention.flash.dots_of`.
    """
    # s and d have the shape (pairs, rows, columns): sample and head, query, key. The gradient of s is scale p (d -
    # dots).
    if is_device(s):
        _softmax_gradient_device(s, d, tile, scale, top, total, dots)
    else:
        _softmax_gradient(s, d, *tile[:4], s.dtype.type(scale), top, total, dots)


def _softmax_advance_device(s: Array, tile: Tile, scale: float, top: Array, total: Array, shrink: Array) -> None:
    (pairs, rows, columns), (pair, first, low, high, new) = s.shape, tile
    SOFTMAX.launch("softmax_advance", pairs * rows, threads_for(columns, 256), s, top, total, shrink, rows, columns,
                   top.shape[1], pair, first, low, high, new, float(scale), REAL=s.dtype)  # fmt: skip


def _softmax_gradient_device(
    s: Array, d: Array, tile: Tile, scale: float, top: Array, total: Array, dots: Array
) -> None:
    (_, rows, columns), (pair, first, low, high, _) = s.shape, tile
    SOFTMAX.launch("softmax_gradient", *elementwise(s.size), s, d, top, total, dots, s.size, rows, columns,
                   top.shape[1], pair, first, low, high, float(scale), REAL=s.dtype)  # fmt: skip


# Hidden columns are computed too, so that rows consist of whole vectors.


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
            base = sums if highest == -np.inf else highest  # 0 for a row without visible columns
            if not new:  # earlier sums are relative to an older maximum
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
            # One division per row. Jacobian of softmax: dscore_j = p_j (g_j - sum_k p_k g_k), times the scale.
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


def rescale_add(part: Array, y: Array, heads: int, first_pair: int, first_token: int, shrink: Array) -> None:
    """Multiply a block of attention output y by ``shrink``, and add ``part``, the output of another tile of keys.

    The block begins at (sample, head) pair ``first_pair`` and token ``first_token``.
    """
    # y has the shape (batch, context, heads * head size). part[p, i] and shrink[p, i] belong to token first_token + i.
    if is_device(y):
        _add_rows_device(part, 1, y, heads, first_pair, 0, first_token, True, shrink)
    else:
        _rescale_add(part, y, heads, first_pair, first_token, shrink)


def divide_by_totals(
    y: Array, heads: int, first_pair: int, first_token: int, num_pairs: int, num_tokens: int, total: Array
) -> None:
    """Divide a block of the attention output y by its softmax sums ``total``.

    The block has ``num_pairs`` (sample, head) pairs from ``first_pair`` on, and ``num_tokens`` tokens from
    ``first_token`` on.
    """
    if is_device(y):
        size = y.shape[2] // heads
        n = num_pairs * num_tokens * size
        SOFTMAX.launch("divide_rows", *elementwise(n), y, total, n, num_tokens, size, heads, first_pair, y.shape[1],
                       first_token, REAL=y.dtype)  # fmt: skip
    else:
        _divide_by_totals(y, heads, first_pair, first_token, num_pairs, num_tokens, total)


def row_dots(dy: Array, y: Array, heads: int, out: Array) -> None:
    """Write sum(dy * y) over the columns of each head to ``out``, of shape (batch * heads, tokens)."""
    if is_device(y):
        batch, context, width = y.shape
        rows = batch * context * heads
        SOFTMAX.launch("row_dots", -(-rows // 4), 128, dy, y, out, rows, context, width // heads, heads, REAL=y.dtype)
    else:
        _row_dots(dy, y, heads, out)


def accumulate(
    part: Array, groups: int, target: Array, heads: int, first_pair: int, column: int, first_token: int, add: bool
) -> None:
    """Sum ``part`` over groups of ``groups`` query heads. Add the sums to ``target`` if ``add``, else write them.

    ``heads``: key heads in ``target``. ``first_pair``, ``column``, ``first_token``: position of the sums in ``target``.
    """
    # `part` has the shape (pairs * groups, rows, head size), `target` (batch, context, columns).
    if is_device(target):
        _add_rows_device(part, groups, target, heads, first_pair, column, first_token, add, None)
    else:
        _accumulate(part, groups, target, heads, first_pair, column, first_token, add)


def _add_rows_device(
    part: Array, groups: int, target: Array, heads: int, pair: int, column: int, first: int, add: bool,
    factors: Array | None,
) -> None:  # fmt: skip
    n, (_, rows, size), (_, context, columns) = part.size // groups, part.shape, target.shape
    SOFTMAX.launch("add_rows", *elementwise(n), part, target, part if factors is None else factors, n, rows, size,
                   groups, heads, pair, context, columns, column, first, int(add), int(factors is not None),
                   REAL=part.dtype)  # fmt: skip


# Rows are sliced before their loops: with a single index, LLVM vectorises without checks.


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
        b, h = divmod(pair + p // groups, heads)  # ``groups`` consecutive pairs of the tile share one target head
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
