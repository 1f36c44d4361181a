"""Causal attention (Vaswani et al. 2017) by matrix products over blocks of queries.

Scores above the block diagonal are never computed. Probabilities are kept for backward in a square
(batch x heads, context, context) array, of which the upper blocks are never touched. They are kept as they are before
some are dropped: the backward of a softmax needs them, and draws what was dropped once more.
"""

import math
from collections.abc import Iterator
from typing import Final

from hpcdist.arrays.backend import Array, namespace
from hpcdist.models.dropout import ATTENTION, Mask, mask
from hpcdist.models.softmax import normalise, shift, softmax_backward
from hpcdist.models.stage import Saved

QUERY_BLOCK: Final = 64  # smaller blocks skip more of the upper triangle, larger ones are faster matrix products


class LocalAttention:
    """Softmax of ``q k^T / sqrt(head size)`` over the past, times v."""

    def forward(
        self,
        qkv: Array,
        head_size: int,
        saved: Saved,
        name: str = "attention",
        dropout: float = 0.0,
        part: tuple[int, int] | None = None,
    ) -> Array:
        """Return (batch, context, width) for contiguous qkv (batch, context, 3 width).

        ``part`` is the number of its first head and how many the layer has, where qkv does not hold all of them.
        """
        xp = namespace(qkv)
        batch, context, triple = qkv.shape
        heads = triple // 3 // head_size
        q, k, v = _split(qkv, 3, head_size)
        y = saved.empty(f"{name}.y", (batch, context, triple // 3), qkv.dtype)
        out = _split(y, 1, head_size)[0]
        p = saved.empty(f"{name}.p", (batch, heads, context, context), qkv.dtype)
        square = p.reshape(batch * heads, context, context)
        sums = saved.scratch("attention.sums", (batch * heads, context), qkv.dtype)
        dropped = _mask(saved, dropout, part or (0, heads), heads, context)
        for first, last in _blocks(context):
            rows = p[:, :, first:last, :last]
            xp.matmul(q[:, :, first:last], k[:, :, :last].swapaxes(2, 3), out=rows)
            shift(square, first, last, last, 0, 1 / math.sqrt(head_size))
            xp.exp(rows, out=rows)
            normalise(square, first, last, last, sums)
            if dropped is not None:
                rows = _remaining(rows, first, dropped, saved)
            xp.matmul(rows, v[:, :, :last], out=out[:, :, first:last])
        saved.keep(f"{name}.qkv", qkv)
        saved.keep(f"{name}.head_size", head_size)
        saved.keep(f"{name}.dropped", dropped)
        return y

    def backward(self, dy: Array, saved: Saved, name: str = "attention", keep: bool = False) -> Array:
        """Return dqkv in the shape of qkv for contiguous dy (batch, context, width): scratch, or memory to ``keep``."""
        xp = namespace(dy)
        qkv, head_size, p = saved[f"{name}.qkv"], saved[f"{name}.head_size"], saved[f"{name}.p"]
        dropped: Mask | None = saved[f"{name}.dropped"]
        batch, heads, context, _ = p.shape
        q, k, v = _split(qkv, 3, head_size)
        (do,) = _split(dy, 1, head_size)
        dqkv = (saved.empty if keep else saved.scratch)("attention.dqkv", qkv.shape, qkv.dtype)
        dq, dk, dv = _split(dqkv, 3, head_size)
        ds = saved.scratch("attention.ds", p.shape, p.dtype)
        p_square, ds_square = (array.reshape(batch * heads, context, context) for array in (p, ds))
        for first, last in _blocks(context):
            rows = ds[:, :, first:last, :last]
            xp.matmul(do[:, :, first:last], v[:, :, :last].swapaxes(2, 3), out=rows)
            if dropped is not None:
                dropped.drop(ds_square, first, last, last)
            softmax_backward(p_square, ds_square, first, last, last, 1 / math.sqrt(head_size))
            if dropped is not None:
                dropped.drop(p_square, first, last, last)  # what v was multiplied by
            xp.matmul(rows, k[:, :, :last], out=dq[:, :, first:last])
        for first, last in _blocks(context):  # blocks of keys: all queries from the first of them on look at them
            xp.matmul(p[:, :, first:, first:last].swapaxes(2, 3), do[:, :, first:], out=dv[:, :, first:last])
            xp.matmul(ds[:, :, first:, first:last].swapaxes(2, 3), q[:, :, first:], out=dk[:, :, first:last])
        return dqkv


def _mask(saved: Saved, rate: float, part: tuple[int, int], heads: int, context: int) -> Mask | None:
    """Return what is dropped of the ``heads`` heads from ``part[0]`` on, of ``part[1]`` of the layer."""
    first, total = part
    place = {"first_row": first * context, "groups": heads, "pitch": context}
    return mask(saved, rate, ATTENTION, rows_per_sample=total * context, columns=context, **place)


def _remaining(rows: Array, first: int, dropped: Mask, saved: Saved) -> Array:
    """Return a copy of probabilities (batch, heads, queries, keys) of the queries from ``first`` on, some dropped."""
    batch, heads, queries, keys = rows.shape
    remaining = saved.scratch("attention.remaining", rows.shape, rows.dtype)
    remaining[...] = rows
    dropped.drop(remaining.reshape(batch * heads, queries, keys), 0, queries, keys, above=first)
    return remaining


def _split(x: Array, parts: int, head_size: int) -> Array:
    """View x (batch, context, parts width) as (parts, batch, heads, context, head size)."""
    batch, context, total = x.shape
    return x.reshape(batch, context, parts, total // parts // head_size, head_size).transpose(2, 0, 3, 1, 4)


def _blocks(context: int) -> Iterator[tuple[int, int]]:
    for first in range(0, context, QUERY_BLOCK):
        yield first, min(first + QUERY_BLOCK, context)
