"""FlashAttention: attention (Vaswani et al. 2017) in tiles of queries and keys (Dao, arXiv:2307.08691).

Forward takes blocks of queries over the keys that they see, in tiles whose scores stay in a cache, and keeps the
maximum and the sum of every row's softmax. Backward takes blocks of keys over the queries that see them, and computes
the probabilities of a tile again: five products where one that stored them does four. Memory is linear in the context;
scores beyond the block on the diagonal are never computed, nor blocks outside of a window. Sums over keys are made of
tiles of LONG, in their order, whatever the number of samples and heads: a sample has the same bits in every batch, and
a head in every part of the heads. Errors are at most 3e-6 (1 + the largest element) in float32 and 1e-13 in float64,
for scores of a standard deviation of 4 or so, and four times that in gradients.

On a GPU, 16-bit floats take one fused kernel forward and three backward (``models/cuda/attention.cu``); float32 and
float64 take the tiles, with the products of the array library between kernels (``models/cuda/softmax.cu``): without
tensor cores those products are most of the time, and a library makes them.
"""

import math
from pathlib import Path
from typing import Any, Final, TypeAlias

from hpcdist.arrays.backend import Array, is_device, matmul
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.gpu.kernels import KernelSource
from hpcdist.errors import UsageError
from hpcdist.models.attention import kernels
from hpcdist.models.attention.tiles import (
    EVERYTHING,
    LONG,
    QUERY_BLOCK,
    HeadChunk,
    Heads,
    Pieces,
    Span,
    band,
    blocks,
    heads_of,
    one_piece,
)
from hpcdist.models.documents import Documents
from hpcdist.models.layers.dropout import ATTENTION, Mask, mask
from hpcdist.models.stage import Saved

FUSED_KERNELS: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "attention.cu", ("float16", "bfloat16"))
MAX_FUSED_HEAD: Final = 128  # head
FUSED_ROWS: Final = 64  # of a block of threads
MAX_FUSED_CONTEXT: Final = 65535 * FUSED_ROWS  # a grid has at most 65535 blocks in its second dim
FUSED_THREADS: Final = 128


def has_fused_kernel(like: Array) -> bool:
    """Return whether the fused kernels compute attention of arrays such as ``like``."""
    return is_device(like) and FUSED_KERNELS.takes(like.dtype)


def fused_forward(
    heads: Heads,
    qkv: Array,
    kv: Array | None,
    y: Array,
    sums: Array,
    causal: bool,
    window: int,
    dropped: Mask | None,
    documents: Documents | None = None,
) -> None:
    """Write y (batch, context, heads size), and sums (pairs, context), float32, which `fused_backward` takes."""
    grid = heads.batch * heads.queries, -(-heads.context // FUSED_ROWS)
    numbers = _fused_numbers(heads, qkv, kv, causal, window, dropped, documents)
    FUSED_KERNELS.launch(
        "attention", grid, FUSED_THREADS, qkv, _fused_keys(qkv, kv), y, sums, *numbers, **_fused_types(heads, y)
    )


def fused_backward(
    heads: Heads,
    inputs: tuple[Array, Array | None],
    dy: Array,
    gradients: tuple[Array, Array | None],
    sums: Array,
    dots: Array,
    causal: bool,
    window: int,
    dropped: Mask | None,
    documents: Documents | None = None,
) -> None:
    """Write the ``gradients`` of the inputs for contiguous dy, with the products of its rows and those of y."""
    (qkv, kv), (dq, dkv) = inputs, gradients
    types, numbers = _fused_types(heads, dy), _fused_numbers(heads, qkv, kv, causal, window, dropped, documents)
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
    if heads.context > MAX_FUSED_CONTEXT:
        raise UsageError(
            f"attention in {like.dtype} got {heads.context} tokens of context; its kernels have at most "
            f"{MAX_FUSED_CONTEXT}: choose a shorter data.context, or compute in float32"
        )
    return {"REAL": like.dtype, "HEAD": -(-heads.size // 16) * 16}


def _fused_numbers(
    heads: Heads,
    qkv: Array,
    kv: Array | None,
    causal: bool,
    window: int,
    dropped: Mask | None,
    documents: Documents | None,
) -> tuple[int | float, ...]:
    width, shared = heads.queries * heads.size, heads.shared * heads.size
    # Columns of the first key and the first value: behind the queries in qkv, at the beginning of kv.
    first = width if kv is None else 0
    place = heads.context, heads.size, heads.queries, heads.shared, qkv.shape[2], _fused_keys(qkv, kv).shape[2]
    # A flag or an address, place, counters and factor of the mask, as the kernels' parameters; without one zeros.
    mask: tuple[int | float, ...] = (0,) * 12 + (1.0,)
    if dropped is not None:
        mask = (dropped.words or 1, *dropped.place, *dropped.counters, dropped.scale)
    address = 0 if documents is None else int(documents.ranges.data.ptr)  # type: ignore[attr-defined]
    seen = int(causal), min(window or heads.context, heads.context), address
    return (*place, first, first + shared, *seen, heads.scale, *mask)


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
        window: int = 0,
        y: Array | None = None,
    ) -> Array:
        """Return (batch, context, width) for contiguous qkv (batch, context, 3 width): query, key, value.

        With ``kv`` (batch, context, 2 kv width), qkv is the queries alone, and query head h of H looks at key and value
        head h // (H / KV) of KV (Ainslie et al., arXiv:2305.13245). Rows see their past and themselves, all rows
        unless ``causal``; with a ``window`` no more than so many, of which they are the last. ``part`` is the number of
        the first of the query heads and how many the layer has, where these are not all. The result is written to
        ``y`` where that is given, and is not kept: the backward then gets ``dots``. Raises UsageError on shapes that
        do not fit.
        """
        assert causal or not window, "the rules refuse a window of rows that see all others"
        heads = heads_of(qkv, kv, head_size)
        if y is None:
            y = saved.empty("attention.y", (heads.batch, heads.context, heads.queries * head_size), qkv.dtype)
        fused = has_fused_kernel(qkv)
        # Of each row its maximum and its sum of exponentials; the fused kernels keep one number made of both.
        shape = 1 if fused else 2, heads.batch * heads.queries, heads.context
        sums = saved.empty("attention.sums", shape, accumulation_dtype(qkv.dtype))
        dropped = mask_of_heads(saved, dropout, heads.queries, heads.context, part)
        if fused:
            fused_forward(heads, qkv, kv, y, sums[0], causal, window, dropped, saved.documents)
        else:
            own = one_piece(heads.context)
            forward, keys = TiledForward(heads, saved, qkv, y, sums, window), KeyRows(heads, own, qkv, kv)
            for chunk in heads.chunks(everything=is_device(qkv), apart=saved.documents is not None):
                for span in chunk.spans(saved.documents, own):
                    for rows in blocks(own, QUERY_BLOCK, *span):
                        forward.block(chunk, rows, keys, dropped, causal=causal, begins=True, span=span)
                        forward.finish(chunk, rows)
        keep_for_backward(saved, qkv=qkv, kv=kv, head_size=head_size, dropped=dropped, causal=causal, window=window)
        return y

    def backward(
        self, dy: Array, saved: Saved, *, keep: bool = False, dots: Array | None = None
    ) -> Array | tuple[Array, Array]:
        """Return dqkv in the shape of qkv for contiguous dy (batch, context, width): scratch, or memory to ``keep``.

        Where the forward was given kv, return (dq, dkv). ``dots`` (pairs of a sample and a head, context) are the
        products of the rows of dy with those of the result, in the type of the sums, if that was not kept.
        """
        if dots is None:
            dots = dots_of(dy, saved["attention.y"], saved["attention.head_size"], saved)
        heads, (qkv, kv, sums), (dq, dkv), (causal, window), dropped = begin_backward(saved, keep=keep)
        if has_fused_kernel(qkv):
            into = dq, dkv
            fused_backward(heads, (qkv, kv), dy, into, sums[0], dots, causal, window, dropped, saved.documents)
            return dq if dkv is None else (dq, dkv)
        own = one_piece(heads.context)
        backward = TiledBackward(heads, saved, own, (qkv, dy, dq), sums, dots, window)
        keys, gradients = KeyRows(heads, own, qkv, kv), KeyGradients(heads, dq, dkv)
        for chunk in heads.chunks(everything=is_device(qkv), apart=saved.documents is not None):
            for span in chunk.spans(saved.documents, own):
                for rows in blocks(own, QUERY_BLOCK, *span):
                    begins = rows[0] == span[0]
                    backward.block(chunk, rows, keys, gradients, dropped, causal=causal, begins=begins, span=span)
        return dq if dkv is None else (dq, dkv)


def keep_for_backward(
    saved: Saved, *, qkv: Array, kv: Array | None, head_size: int, dropped: Mask | None, causal: bool, window: int
) -> None:
    """Keep what the forward of an attention was called with; its sums are kept already."""
    seen = causal, window
    for name, value in {"qkv": qkv, "kv": kv, "head_size": head_size, "dropped": dropped, "seen": seen}.items():
        saved.keep(f"attention.{name}", value)


def dots_of(dy: Array, y: Array, head_size: int, saved: Saved) -> Array:
    """Return the products of the rows of dy and y (batch, tokens, width), (pairs, tokens): scratch."""
    (batch, tokens, width), dtype = y.shape, accumulation_dtype(y.dtype)
    dots = saved.scratch("attention.dots", (batch * width // head_size, tokens), dtype)
    kernels.row_dots(dy, y, width // head_size, dots)
    return dots


def begin_backward(
    saved: Saved, *, keep: bool
) -> tuple[Heads, tuple[Array, Array | None, Array], tuple[Array, Array | None], tuple[bool, int], Mask | None]:
    """Return what the forward kept, and memory for the gradients: scratch, or memory to ``keep``.

    That is (heads, (qkv, kv, sums), (dqkv or dq, dkv), (causal, window), dropped).
    """
    qkv, kv, sums = (saved[f"attention.{key}"] for key in ("qkv", "kv", "sums"))
    take = saved.empty if keep else saved.scratch
    dq = take("attention.dqkv", qkv.shape, qkv.dtype)
    dkv = None if kv is None else take("attention.dkv", kv.shape, kv.dtype)
    heads = heads_of(qkv, kv, saved["attention.head_size"])
    return heads, (qkv, kv, sums), (dq, dkv), saved["attention.seen"], saved["attention.dropped"]


def mask_of_heads(
    saved: Saved, dropout: float, queries: int, context: int, part: tuple[int, int] | None
) -> Mask | None:
    """Return the mask of so many query heads of samples of ``context`` tokens, ``part`` of those of the layer.

    It is that of all heads of the layer, a row for each head and query, of which these heads are some rows.
    """
    first_head, of_heads = part or (0, queries)
    place = {"first_row": first_head * context, "groups": queries, "pitch": context}
    return mask(saved, dropout, ATTENTION, rows_per_sample=of_heads * context, columns=context, **place)


class _Memory:
    """Scratch of ``elements`` under a name, of which tiles take the beginning."""

    def __init__(self, saved: Saved, name: str, elements: int, like: Array) -> None:
        self._flat = saved.scratch(f"attention.{name}", (elements,), like.dtype)

    def tile(self, *shape: int) -> Array:
        """Return contiguous memory of this shape; all tiles of this name begin at the same address."""
        return self._flat[: math.prod(shape)].reshape(shape)


class KeyRows:
    """Keys and values of the tokens in ``pieces``: behind the queries in ``qkv``, or those of ``kv``.

    ``heads`` are those that the array has: all but the first ``skipped`` ones, and perhaps not the last.
    """

    def __init__(self, heads: Heads, pieces: Pieces, qkv: Array, kv: Array | None, skipped: int = 0) -> None:
        self.pieces, self.skipped = pieces, skipped
        first, array = (1, qkv) if kv is None else (0, kv)
        self.k, self.v = (heads.view(array, first + part, of_queries=False) for part in range(2))


class KeyGradients:
    """Gradients of keys and values, laid out as in `KeyRows`."""

    def __init__(self, heads: Heads, dqkv: Array, dkv: Array | None, skipped: int = 0) -> None:
        first, array = (1, dqkv) if dkv is None else (0, dkv)
        self.k, self.v = (_Sum(heads, array, first + part, of_queries=False, skipped=skipped) for part in range(2))


Block: TypeAlias = tuple[int, int, int]  # first and last row of an array, and the place of the first in its sample


class TiledForward:
    """Forward of blocks of queries, the first part of ``qkv``, over keys, which may come in several arrays.

    ``sums`` are the maximum and the sum of exponentials of each row. With a ``window`` queries see no more than so many
    keys. Keys of other arrays have at most ``most`` tokens, 0 where there are none. All of it is local.
    """

    def __init__(
        self, heads: Heads, saved: Saved, qkv: Array, y: Array, sums: Array, window: int, most: int = 0
    ) -> None:
        self._heads, self._y, self._window = heads, y, window
        self._top, self._total = sums
        self._q, self._out = heads.view(qkv, 0, of_queries=True), heads.view(y, 0, of_queries=True)
        pairs, short, long = heads.most_pairs(y), min(QUERY_BLOCK, heads.context), min(LONG, max(most, heads.context))
        self._scores = _Memory(saved, "scores", pairs * short * long, y)
        one_tile = not most and heads.context <= LONG
        self._part = _Memory(saved, "part", 0 if one_tile else pairs * short * heads.size, y)
        self._shrink = _Memory(saved, "shrink", pairs * short, y)

    def block(
        self,
        chunk: HeadChunk,
        rows: Block,
        keys: KeyRows,
        dropped: Mask | None,
        *,
        causal: bool,
        begins: bool,
        span: Span = EVERYTHING,
    ) -> None:
        """Add what the queries in ``rows`` see of ``keys``; the first call for them ``begins``.

        ``causal``: keys are those of the queries' own array, and the ones behind a query are hidden from it. Only the
        rows of keys in ``span`` are seen. Queries see a key of the block that ``begins``, if not of its first tile.
        """
        (first, last, place), multiply, queries = rows, matmul, self._heads.queries
        count, size = chunk.pairs, self._heads.size
        q, out = chunk.of(self._q), chunk.of(self._out)
        k, v = chunk.of(keys.k, keys.skipped), chunk.of(keys.v, keys.skipped)
        q, out = q[..., first:last, :], out[..., first:last, :]
        shrink = self._shrink.tile(count, last - first)
        # Tiles of keys in their order. The output of the tiles so far is relative to their maximum: a larger one
        # shrinks it. The division by the sum comes once, at the end. A causal block sees no key behind its last query.
        stop, window = min(last, span[1]) if causal else span[1], self._window
        places = (place + 1 - window, EVERYTHING[1]) if window else EVERYTHING
        for number, (start, end, column) in enumerate(blocks(keys.pieces, LONG, span[0], stop, places)):
            s = self._scores.tile(*chunk.outer, last - first, end - start)
            flat = s.reshape(count, last - first, end - start)
            multiply(q, k[..., start:end, :].swapaxes(-1, -2), out=s)
            new = begins and number == 0
            where = chunk.pair, first, *band(place - column, window, causal=causal), new
            # Dropped after the sum of the row is taken: dropout acts on the probabilities, which are divided by it.
            kernels.softmax_advance(flat, where, self._heads.scale, self._top, self._total, shrink)
            chunk.drop(flat, dropped, place, column)
            if new:
                multiply(s, v[..., start:end, :], out=out)
            else:
                part = self._part.tile(*chunk.outer, last - first, size)
                multiply(s, v[..., start:end, :], out=part)
                kernels.rescale_add(part.reshape(count, -1, size), self._y, queries, chunk.pair, first, shrink)

    def finish(self, chunk: HeadChunk, rows: Block) -> None:
        """Divide the output of the queries in ``rows`` by their sums, once they have seen all keys."""
        first, last, _ = rows
        kernels.divide_by_totals(
            self._y, self._heads.queries, chunk.pair, first, chunk.pairs, last - first, self._total
        )


class TiledBackward:
    """Backward of blocks of keys over the queries, which are the ``pieces`` of their samples. All of it is local.

    ``arrays`` are the queries, the first part of qkv; the gradient of the output; and that of the queries. ``dots`` has
    the product of each row of the output with its gradient. ``window`` and ``most`` are those of the forward.
    """

    def __init__(
        self,
        heads: Heads,
        saved: Saved,
        pieces: Pieces,
        arrays: tuple[Array, Array, Array],
        sums: Array,
        dots: Array,
        window: int,
        most: int = 0,
    ) -> None:
        qkv, dy, dq = arrays
        self._heads, self._pieces, self._dots, most = heads, pieces, dots, max(most, heads.context)
        self._top, self._total = sums
        self._window = window
        self._q, self._do = heads.view(qkv, 0, of_queries=True), heads.view(dy, 0, of_queries=True)
        self._dq = _Sum(heads, dq, 0, of_queries=True)
        if window:  # the first block of keys is not seen by all queries
            heads.view(dq, 0, of_queries=True)[...] = 0
        pairs, short, long = heads.most_pairs(dy), min(QUERY_BLOCK, most), min(LONG, heads.context)
        self._scores = _Memory(saved, "scores", pairs * short * long, dy)
        self._gradients = _Memory(saved, "gradients", pairs * short * long, dy)
        self._part = _Memory(saved, "part", pairs * max(short, long) * heads.size, dy)

    def block(
        self,
        chunk: HeadChunk,
        rows: Block,
        keys: KeyRows,
        gradients: KeyGradients,
        dropped: Mask | None,
        *,
        causal: bool,
        begins: bool,
        span: Span = EVERYTHING,
    ) -> None:
        """Write the gradients of the keys and values in ``rows``, and add to those of the queries that see them.

        ``causal``: keys are those of the queries' own array; else all queries in ``span`` see them. Queries beyond
        a window do not, and gradients of keys that none sees are not written. Where it ``begins``, the gradients of the
        queries are written.
        """
        (start, end, column), multiply, count, window = rows, matmul, chunk.pairs, self._window
        k, v = (chunk.of(view, keys.skipped)[..., start:end, :] for view in (keys.k, keys.v))
        begin = start if causal else span[0]  # earlier queries do not see these keys
        places = (0, column + end - start + window - 1) if window else EVERYTHING
        for number, (first, last, place) in enumerate(blocks(self._pieces, LONG, begin, span[1], places)):
            q, do = (chunk.of(view)[..., first:last, :] for view in (self._q, self._do))
            s, d = (memory.tile(*chunk.outer, last - first, end - start) for memory in (self._scores, self._gradients))
            p, g = (tile.reshape(count, last - first, end - start) for tile in (s, d))
            # s = q k^T becomes the probabilities p, d = do v^T the gradient of the scores; then dv += p^T do (with p
            # dropped as in the forward), dk += d^T q and dq += d k.
            multiply(q, k.swapaxes(-1, -2), out=s)
            multiply(do, v.swapaxes(-1, -2), out=d)
            chunk.drop(g, dropped, place, column)
            where = chunk.pair, first, *band(place - column, window, causal=causal), False
            kernels.softmax_gradient(p, g, where, self._heads.scale, self._top, self._total, self._dots)
            chunk.drop(p, dropped, place, column)  # now p as v was multiplied by it
            add = number > 0  # the first block of queries writes, later ones add
            gradients.v.product(s.swapaxes(-1, -2), do, chunk, start, end, self._part, add)
            gradients.k.product(d.swapaxes(-1, -2), q, chunk, start, end, self._part, add)
            self._dq.product(d, k, chunk, first, last, self._part, bool(window) or not begins)


class _Sum:
    """A gradient in an array (batch, context, columns), the sum of products over tiles."""

    def __init__(self, heads: Heads, target: Array, part: int, *, of_queries: bool, skipped: int = 0) -> None:
        self._skipped = skipped
        self._target, self._view = target, heads.view(target, part, of_queries=of_queries)
        self._heads = heads.queries if of_queries else heads.shared
        self._column = part * self._heads * heads.size
        self._groups = 1 if of_queries else heads.group

    def product(self, a: Array, b: Array, chunk: HeadChunk, first: int, last: int, memory: _Memory, add: bool) -> None:
        """Write ``a b``, summed over query heads that share these rows, to rows [first, last); ``add`` adds it."""
        if self._groups == 1 and not add:
            matmul(a, b, out=chunk.of(self._view, self._skipped)[..., first:last, :])
            return
        # Through scratch, from which the query heads of a group are added to the one row of their shared head.
        part = memory.tile(*chunk.outer, last - first, b.shape[-1])
        matmul(a, b, out=part)
        rows = part.reshape(chunk.pairs, *part.shape[-2:])
        each = self._heads // self._view.shape[1]  # query heads of a shared one, in a gradient of queries
        pair = chunk.first_sample * self._heads + (chunk.first_head - self._skipped) * each
        kernels.accumulate(rows, self._groups, self._target, self._heads, pair, self._column, first, add)
