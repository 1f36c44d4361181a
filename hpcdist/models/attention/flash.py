"""FlashAttention: attention (Vaswani et al. 2017) in tiles of queries and keys (Dao, arXiv:2307.08691).

Forward takes blocks of queries over the keys that they see, in tiles whose scores stay in a cache, and keeps the
maximum and the sum of every row's softmax. Backward takes blocks of keys over the queries that see them, and computes
the probabilities of a tile again: five products where one that stored them does four. Memory is linear in the context;
scores beyond the block on the diagonal are never computed. Sums over keys are made of tiles of LONG, in their order,
whatever the number of samples and heads: a sample has the same bits in every batch, and a head in every part of the
heads. Errors are at most 3e-6 (1 + the largest element) in float32 and 1e-13 in float64, for scores of a standard
deviation of 4 or so, and four times that in gradients.

On a GPU, 16-bit floats take one fused kernel forward and three backward (``models/cuda/attention.cu``); float32 and
float64 take the tiles, with the products of the array library between kernels.
"""

import math
from pathlib import Path
from typing import Any, Final

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.gpu.kernels import KernelSource
from hpcdist.errors import UsageError
from hpcdist.models.attention import kernels
from hpcdist.models.attention.tiles import LONG, QUERY_BLOCK, HeadChunk, Heads, blocks, heads_of
from hpcdist.models.layers.dropout import ATTENTION, Mask, mask
from hpcdist.models.stage import Saved

FUSED_KERNELS: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "attention.cu", ("float16", "bfloat16"))
MAX_FUSED_HEAD: Final = 128  # head
FUSED_ROWS: Final = 64  # of a block of threads
FUSED_THREADS: Final = 128


def has_fused_kernel(like: Array) -> bool:
    """Return whether the fused kernels compute attention of arrays such as ``like``."""
    return is_device(like) and FUSED_KERNELS.takes(like.dtype)


def fused_forward(
    heads: Heads, qkv: Array, kv: Array | None, y: Array, sums: Array, causal: bool, dropped: Mask | None
) -> None:
    """Write y (batch, context, heads size), and sums (pairs, context), float32, which `fused_backward` takes."""
    grid = heads.batch * heads.queries, -(-heads.context // FUSED_ROWS)  # of the second, CUDA has at most 65535
    numbers = _fused_numbers(heads, qkv, kv, causal, dropped)
    FUSED_KERNELS.launch(
        "attention", grid, FUSED_THREADS, qkv, _fused_keys(qkv, kv), y, sums, *numbers, **_fused_types(heads, y)
    )


def fused_backward(
    heads: Heads,
    inputs: tuple[Array, Array | None],
    dy: Array,
    y: Array,
    gradients: tuple[Array, Array | None],
    sums: Array,
    dots: Array,
    causal: bool,
    dropped: Mask | None,
) -> None:
    """Write the ``gradients`` of the inputs for contiguous dy. ``dots`` (pairs, context) is scratch."""
    (qkv, kv), (dq, dkv) = inputs, gradients
    types, numbers = _fused_types(heads, y), _fused_numbers(heads, qkv, kv, causal, dropped)
    rows = heads.batch * heads.context * heads.queries
    FUSED_KERNELS.launch("attention_dots", -(-rows // 4), FUSED_THREADS, dy, y, dots, rows, heads.context, heads.size,
                  heads.queries, **types)  # fmt: skip
    arrays, blocks = (qkv, _fused_keys(qkv, kv), dy, sums, dots), -(-heads.context // FUSED_ROWS)
    FUSED_KERNELS.launch(
        "attention_queries", (heads.batch * heads.queries, blocks), FUSED_THREADS, *arrays, dq, *numbers, **types
    )
    into = dq if dkv is None else dkv
    FUSED_KERNELS.launch(
        "attention_keys", (heads.batch * heads.shared, blocks), FUSED_THREADS, *arrays, into, *numbers, **types
    )


def _fused_keys(qkv: Array, kv: Array | None) -> Array:
    return qkv if kv is None else kv


def _fused_types(heads: Heads, like: Array) -> dict[str, Any]:
    if heads.size > MAX_FUSED_HEAD:
        raise UsageError(
            f"attention in {like.dtype} got heads of {heads.size}; its kernels have heads of at most {MAX_FUSED_HEAD}: "
            "choose model.heads of at least model.hidden / 128, or compute in float32"
        )
    return {"REAL": like.dtype, "HEAD": -(-heads.size // 16) * 16}


def _fused_numbers(
    heads: Heads, qkv: Array, kv: Array | None, causal: bool, dropped: Mask | None
) -> tuple[int | float, ...]:
    width, shared = heads.queries * heads.size, heads.shared * heads.size
    # Columns of the first key and the first value: behind the queries in qkv, at the beginning of kv.
    first = width if kv is None else 0
    place = heads.context, heads.size, heads.queries, heads.shared, qkv.shape[2], _fused_keys(qkv, kv).shape[2]
    # A flag, place, counters and factor of the mask, in the order of the kernels' parameters; without one zeros.
    mask = (0,) * 12 + (1.0,) if dropped is None else (1, *dropped.place, *dropped.counters, dropped.scale)
    return (*place, first, first + shared, int(causal), heads.scale, *mask)


class LocalAttention:
    """Softmax of ``q k^T / sqrt(head size)``, times v."""

    def forward(
        self,
        qkv: Array,
        head_size: int,
        saved: Saved,
        *,
        kv: Array | None = None,
        dropout: float = 0.0,
        part: tuple[int, int] | None = None,
        causal: bool = True,
    ) -> Array:
        """Return (batch, context, width) for contiguous qkv (batch, context, 3 width): query, key, value.

        With ``kv`` (batch, context, 2 kv width), qkv is the queries alone, and query head h of H looks at key and value
        head h // (H / KV) of KV (Ainslie et al., arXiv:2305.13245). Rows see their past and themselves, all rows
        unless ``causal``. ``part`` is the number of the first of the query heads and how many the layer has, where
        these are not all. Raises UsageError on shapes that do not fit.
        """
        heads = heads_of(qkv, kv, head_size)
        y = saved.empty("attention.y", (heads.batch, heads.context, heads.queries * head_size), qkv.dtype)
        fused = has_fused_kernel(qkv)
        # Of each row its maximum and its sum of exponentials; the fused kernels keep one number made of both.
        shape = 1 if fused else 2, heads.batch * heads.queries, heads.context
        sums = saved.empty("attention.sums", shape, accumulation_dtype(qkv.dtype))
        first_head, of_heads = part or (0, heads.queries)
        # The mask is that of all heads of the layer, a row for each head and query: these heads are some rows of it.
        place = {"first_row": first_head * heads.context, "groups": heads.queries, "pitch": heads.context}
        rows = of_heads * heads.context
        dropped = mask(saved, dropout, ATTENTION, rows_per_sample=rows, columns=heads.context, **place)
        if fused:
            fused_forward(heads, qkv, kv, y, sums[0], causal, dropped)
        else:
            forward = _Forward(heads, saved, (qkv, kv), y, sums, causal)
            for chunk in heads.chunks(everything=is_device(qkv)):
                for first, last in blocks(heads.context):
                    forward.block(chunk, first, last, dropped)
        for_backward = {"qkv": qkv, "kv": kv, "head_size": head_size, "dropped": dropped, "causal": causal}
        for key, value in for_backward.items():
            saved.keep(f"attention.{key}", value)
        return y

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        """Return dqkv in the shape of qkv for contiguous dy (batch, context, width): scratch, or memory to ``keep``.

        Where the forward was given kv, return (dq, dkv).
        """
        qkv, kv, y, sums = (saved[f"attention.{key}"] for key in ("qkv", "kv", "y", "sums"))
        heads = heads_of(qkv, kv, saved["attention.head_size"])
        take = saved.empty if keep else saved.scratch
        dq = take("attention.dqkv", qkv.shape, qkv.dtype)
        dkv = None if kv is None else take("attention.dkv", kv.shape, kv.dtype)
        dots = saved.scratch("attention.dots", sums.shape[1:], sums.dtype)
        causal, dropped = saved["attention.causal"], saved["attention.dropped"]
        if has_fused_kernel(qkv):
            fused_backward(heads, (qkv, kv), dy, y, (dq, dkv), sums[0], dots, causal, dropped)
            return dq if dkv is None else (dq, dkv)
        kernels.row_dots(dy, y, heads.queries, dots)
        backward = _Backward(heads, saved, (qkv, kv), dy, (dq, dkv), sums, dots, causal)
        for chunk in heads.chunks(everything=is_device(qkv)):
            for start, end in blocks(heads.context):
                backward.block(chunk, start, end, dropped)
        return dq if dkv is None else (dq, dkv)


class _Memory:
    """Scratch of ``elements`` under a name, of which tiles take the beginning."""

    def __init__(self, saved: Saved, name: str, elements: int, like: Array) -> None:
        self._flat = saved.scratch(f"attention.{name}", (elements,), like.dtype)

    def tile(self, *shape: int) -> Array:
        """Return contiguous memory of this shape; all tiles of this name begin at the same address."""
        return self._flat[: math.prod(shape)].reshape(shape)


class _Forward:
    """Arguments of the forward of a block of queries."""

    def __init__(
        self, heads: Heads, saved: Saved, inputs: tuple[Array, Array | None], y: Array, sums: Array, causal: bool
    ) -> None:
        self._heads, self._y, self._causal = heads, y, causal
        self._top, self._total = sums
        self._q, self._k, self._v = _views(heads, *inputs)
        self._out = heads.view(y, 0, of_queries=True)
        pairs, short, long = heads.most_pairs(y), min(QUERY_BLOCK, heads.context), min(LONG, heads.context)
        self._scores = _Memory(saved, "scores", pairs * short * long, y)
        self._part = _Memory(saved, "part", pairs * short * heads.size if heads.context > LONG else 0, y)
        self._shrink = _Memory(saved, "shrink", pairs * short, y)

    def block(self, chunk: HeadChunk, first: int, last: int, dropped: Mask | None) -> None:
        """Write the output of the queries [first, last)."""
        multiply, count, rows, size = namespace(self._y).matmul, chunk.pairs, last - first, self._heads.size
        q, k, v, out = (chunk.of(view) for view in (self._q, self._k, self._v, self._out))
        q, out, queries = q[..., first:last, :], out[..., first:last, :], self._heads.queries
        shrink = self._shrink.tile(count, rows)
        # Tiles of keys in their order. The output of the tiles so far is relative to their maximum: a larger one
        # shrinks it. The division by the sum comes once, at the end. A causal block sees no key behind its last query.
        for start, end in blocks(last if self._causal else self._heads.context, LONG):
            s = self._scores.tile(*chunk.outer, rows, end - start)
            flat = s.reshape(count, rows, end - start)
            multiply(q, k[..., start:end, :].swapaxes(-1, -2), out=s)
            where = chunk.pair, first, start, self._causal
            # Dropped after the sum of the row is taken: dropout acts on the probabilities, which are divided by it.
            kernels.softmax_advance(flat, where, self._heads.scale, self._top, self._total, shrink)
            chunk.drop(flat, dropped, first, start)
            if start == 0:
                multiply(s, v[..., start:end, :], out=out)
            else:
                part = self._part.tile(*chunk.outer, rows, size)
                multiply(s, v[..., start:end, :], out=part)
                kernels.rescale_add(part.reshape(count, rows, size), self._y, queries, chunk.pair, first, shrink)
        kernels.divide_by_totals(self._y, queries, chunk.pair, first, count, rows, self._total)


class _Backward:
    """Arguments of the backward of a block of keys."""

    def __init__(
        self,
        heads: Heads,
        saved: Saved,
        inputs: tuple[Array, Array | None],
        dy: Array,
        gradients: tuple[Array, Array | None],
        sums: Array,
        dots: Array,
        causal: bool,
    ) -> None:
        self._heads, self._causal, self._dots = heads, causal, dots
        self._top, self._total = sums
        self._q, self._k, self._v = _views(heads, *inputs)
        self._do = heads.view(dy, 0, of_queries=True)
        dq, dkv = gradients
        keys = dq if dkv is None else dkv
        before = 1 if dkv is None else 0  # parts of the array in front of the keys
        self._dq = _Sum(heads, dq, 0, of_queries=True)
        self._dk = _Sum(heads, keys, before, of_queries=False)
        self._dv = _Sum(heads, keys, before + 1, of_queries=False)
        pairs, short, long = heads.most_pairs(dy), min(QUERY_BLOCK, heads.context), min(LONG, heads.context)
        self._scores = _Memory(saved, "scores", pairs * short * long, dy)
        self._gradients = _Memory(saved, "gradients", pairs * short * long, dy)
        self._part = _Memory(saved, "part", pairs * long * heads.size, dy)

    def block(self, chunk: HeadChunk, start: int, end: int, dropped: Mask | None) -> None:
        """Write the gradients of the keys and values [start, end), and add to those of the queries that see them."""
        multiply, count, columns = namespace(self._do).matmul, chunk.pairs, end - start
        k, v = (chunk.of(view)[..., start:end, :] for view in (self._k, self._v))
        begin = start if self._causal else 0  # earlier queries do not see these keys
        for first, last in blocks(self._heads.context, LONG, begin):
            q, do = (chunk.of(view)[..., first:last, :] for view in (self._q, self._do))
            s, d = (memory.tile(*chunk.outer, last - first, columns) for memory in (self._scores, self._gradients))
            p, g = (tile.reshape(count, last - first, columns) for tile in (s, d))
            # s = q k^T becomes the probabilities p, d = do v^T the gradient of the scores; then dv += p^T do (with p
            # dropped as in the forward), dk += d^T q and dq += d k.
            multiply(q, k.swapaxes(-1, -2), out=s)
            multiply(do, v.swapaxes(-1, -2), out=d)
            chunk.drop(g, dropped, first, start)
            where = chunk.pair, first, start, self._causal
            kernels.softmax_gradient(p, g, where, self._heads.scale, self._top, self._total, self._dots)
            chunk.drop(p, dropped, first, start)  # now p as v was multiplied by it
            add = first > begin  # the first block of queries writes, later ones add; dq is written by the first keys
            self._dv.product(s.swapaxes(-1, -2), do, chunk, start, end, self._part, add)
            self._dk.product(d.swapaxes(-1, -2), q, chunk, start, end, self._part, add)
            self._dq.product(d, k, chunk, first, last, self._part, start > 0)


class _Sum:
    """A gradient in an array (batch, context, columns), the sum of products over tiles."""

    def __init__(self, heads: Heads, target: Array, part: int, *, of_queries: bool) -> None:
        self._target, self._view = target, heads.view(target, part, of_queries=of_queries)
        self._heads = heads.queries if of_queries else heads.shared
        self._column = part * self._heads * heads.size
        self._groups = 1 if of_queries else heads.group

    def product(self, a: Array, b: Array, chunk: HeadChunk, first: int, last: int, memory: _Memory, add: bool) -> None:
        """Write ``a b``, summed over query heads that share these rows, to rows [first, last); ``add`` adds it."""
        multiply = namespace(b).matmul
        if self._groups == 1 and not add:
            multiply(a, b, out=chunk.of(self._view)[..., first:last, :])
            return
        # Through scratch, from which the query heads of a group are added to the one row of their shared head.
        part = memory.tile(*chunk.outer, last - first, b.shape[-1])
        multiply(a, b, out=part)
        rows = part.reshape(chunk.pairs, *part.shape[-2:])
        pair = chunk.shared_pair if self._groups > 1 else chunk.pair
        kernels.accumulate(rows, self._groups, self._target, self._heads, pair, self._column, first, add)


def _views(heads: Heads, qkv: Array, kv: Array | None) -> tuple[Array, Array, Array]:
    """Return query, key and value as `Heads.view` has them."""
    q = heads.view(qkv, 0, of_queries=True)
    if kv is None:
        return q, heads.view(qkv, 1, of_queries=False), heads.view(qkv, 2, of_queries=False)
    return q, heads.view(kv, 0, of_queries=False), heads.view(kv, 1, of_queries=False)
