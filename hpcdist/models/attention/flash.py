"""FlashAttention: attention (Vaswani et al. 2017) in tiles of queries and keys (Dao, arXiv:2307.08691).

Backward recomputes the probabilities of each tile, so memory is linear in the context. A sample's result has the same
bits in every batch. Errors: at most 3e-6 (1 + largest element) in float32, 1e-13 in float64; gradients four times as
much.
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
    consecutive_positions,
    heads_of,
)
from hpcdist.models.documents import Documents
from hpcdist.models.layers.dropout import ATTENTION, Mask, mask
from hpcdist.models.stage import Saved

FUSED_KERNELS: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "attention.cu", ("float16", "bfloat16"))
MAX_FUSED_HEAD: Final = 128  # largest head size
FUSED_ROWS: Final = 64  # rows per block of threads
MAX_FUSED_CONTEXT: Final = 65535 * FUSED_ROWS  # a grid has at most 65535 blocks in its second dimension
FUSED_THREADS: Final = 128


def has_fused_kernel(like: Array) -> bool:
    """Return True if the fused GPU kernels support the device and dtype of the array ``like``."""
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
    """Write the attention of all query heads to y, of shape (batch, context, heads * head size), on a GPU.

    ``kv``: keys and values, or None if ``qkv`` has them. ``sums``: output array (batch * heads, context) for log2 of
    the softmax sums. ``window``: sliding window in tokens, or 0. ``dropped``: dropout mask, or None.
    """
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
    """Write the gradients of ``inputs``, the pair (qkv, kv), to the pair of arrays ``gradients``, on a GPU.

    ``dy``: gradient of the output. ``dots``: result of `dots_of`. Other arguments: as for `fused_forward`.
    """
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
            f"attention in {like.dtype} got heads of size {heads.size}; the maximum is {MAX_FUSED_HEAD}: "
            "choose model.heads of at least model.hidden / 128, or compute in float32"
        )
    if heads.context > MAX_FUSED_CONTEXT:
        raise UsageError(
            f"attention in {like.dtype} got a context of {heads.context} tokens; the maximum is "
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
    # Columns of the first key and the first value: after the queries in qkv, or at the beginning of kv.
    first = width if kv is None else 0
    sizes = heads.context, heads.size, heads.queries, heads.shared, qkv.shape[2], _fused_keys(qkv, kv).shape[2]
    # Kernel parameters of the mask: flag or address, position, counters and factor; zeros without a mask.
    mask: tuple[int | float, ...] = (0,) * 12 + (1.0,)
    if dropped is not None:
        mask = (dropped.words or 1, *dropped.place, *dropped.counters, dropped.scale)
    address = 0 if documents is None else int(documents.ranges.data.ptr)  # type: ignore[attr-defined]
    seen = int(causal), min(window or heads.context, heads.context), address
    return (*sizes, first, first + shared, *seen, heads.scale, *mask)


class LocalAttention:
    """Multi-head attention on one rank: softmax(q k^T / sqrt(head size)) v for queries q, keys k and values v."""

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
        """Return the attention (batch, context, width) for contiguous ``qkv`` (batch, context, 3 width)."""
        assert causal or not window, "a sliding window needs causal attention"
        # `kv`, of shape (batch, context, 2 kv width), has keys and values; consecutive query heads then share a key
        # head. `part` is (index of the first local query head, query heads of the layer) if heads are sharded. If the
        # output array `y` is passed, `backward` needs the keyword `dots`.
        heads = heads_of(qkv, kv, head_size)
        if y is None:
            y = saved.empty("attention.y", (heads.batch, heads.context, heads.queries * head_size), qkv.dtype)
        fused = has_fused_kernel(qkv)
        # For each row, maximum and sum of exponentials; the fused kernels combine both in one number.
        shape = 1 if fused else 2, heads.batch * heads.queries, heads.context
        sums = saved.empty("attention.sums", shape, accumulation_dtype(qkv.dtype))
        dropped = mask_of_heads(saved, dropout, heads.queries, heads.context, part)
        if fused:
            fused_forward(heads, qkv, kv, y, sums[0], causal, window, dropped, saved.documents)
        else:
            pieces = consecutive_positions(heads.context)
            forward, keys = TiledForward(heads, saved, qkv, y, sums, window), KeyRows(heads, pieces, qkv, kv)
            for chunk in heads.chunks(everything=is_device(qkv), apart=saved.documents is not None):
                for span in chunk.spans(saved.documents, pieces):
                    for rows in blocks(pieces, QUERY_BLOCK, *span):
                        forward.block(chunk, rows, keys, dropped, causal=causal, begins=True, span=span)
                        forward.finish(chunk, rows)
        keep_for_backward(saved, qkv=qkv, kv=kv, head_size=head_size, dropped=dropped, causal=causal, window=window)
        return y

    def backward(
        self, dy: Array, saved: Saved, *, keep: bool = False, dots: Array | None = None
    ) -> Array | tuple[Array, Array]:
        """Return the gradient of qkv, or (gradient of the queries, gradient of kv) if `forward` got ``kv``."""
        if dots is None:
            dots = dots_of(dy, saved["attention.y"], saved["attention.head_size"], saved)
        heads, (qkv, kv, sums), (dq, dkv), (causal, window), dropped = begin_backward(saved, keep=keep)
        if has_fused_kernel(qkv):
            into = dq, dkv
            fused_backward(heads, (qkv, kv), dy, into, sums[0], dots, causal, window, dropped, saved.documents)
            return dq if dkv is None else (dq, dkv)
        pieces = consecutive_positions(heads.context)
        backward = TiledBackward(heads, saved, pieces, (qkv, dy, dq), sums, dots, window)
        keys, gradients = KeyRows(heads, pieces, qkv, kv), KeyGradients(heads, dq, dkv)
        for chunk in heads.chunks(everything=is_device(qkv), apart=saved.documents is not None):
            for span in chunk.spans(saved.documents, pieces):
                for rows in blocks(pieces, QUERY_BLOCK, *span):
                    begins = rows[0] == span[0]
                    backward.block(chunk, rows, keys, gradients, dropped, causal=causal, begins=begins, span=span)
        return dq if dkv is None else (dq, dkv)


def keep_for_backward(
    saved: Saved, *, qkv: Array, kv: Array | None, head_size: int, dropped: Mask | None, causal: bool, window: int
) -> None:
    """Store the inputs and settings of an attention layer in ``saved``, for `begin_backward`."""
    seen = causal, window
    for name, value in {"qkv": qkv, "kv": kv, "head_size": head_size, "dropped": dropped, "seen": seen}.items():
        saved.keep(f"attention.{name}", value)


def dots_of(dy: Array, y: Array, head_size: int, saved: Saved) -> Array:
    """Return the sum of dy * y over the columns of each head, as an array of shape (batch * heads, tokens)."""
    (batch, tokens, width), dtype = y.shape, accumulation_dtype(y.dtype)
    dots = saved.scratch("attention.dots", (batch * width // head_size, tokens), dtype)
    kernels.row_dots(dy, y, width // head_size, dots)
    return dots


def begin_backward(
    saved: Saved, *, keep: bool
) -> tuple[Heads, tuple[Array, Array | None, Array], tuple[Array, Array | None], tuple[bool, int], Mask | None]:
    """Return (heads, (qkv, kv, sums), arrays for the gradients (dqkv, dkv), (causal, window), dropout mask or None)."""
    qkv, kv, sums = (saved[f"attention.{key}"] for key in ("qkv", "kv", "sums"))
    take = saved.empty if keep else saved.scratch
    dq = take("attention.dqkv", qkv.shape, qkv.dtype)
    dkv = None if kv is None else take("attention.dkv", kv.shape, kv.dtype)
    heads = heads_of(qkv, kv, saved["attention.head_size"])
    # Most values are from `keep_for_backward`. kv and dkv are None if qkv has the keys and values.
    return heads, (qkv, kv, sums), (dq, dkv), saved["attention.seen"], saved["attention.dropped"]


def mask_of_heads(
    saved: Saved, dropout: float, queries: int, context: int, part: tuple[int, int] | None
) -> Mask | None:
    """Return the attention's dropout mask, or None without dropout.

    ``part``: (index of the first local query head, number of query heads in the layer), or None if all are local.
    """
    first_head, of_heads = part or (0, queries)
    layout = {"first_row": first_head * context, "groups": queries, "pitch": context}
    return mask(saved, dropout, ATTENTION, rows_per_sample=of_heads * context, columns=context, **layout)


class _Memory:
    def __init__(self, saved: Saved, name: str, elements: int, like: Array) -> None:
        self._flat = saved.scratch(f"attention.{name}", (elements,), like.dtype)

    def tile(self, *shape: int) -> Array:
        return self._flat[: math.prod(shape)].reshape(shape)


class KeyRows:
    """Keys and values of attention as views ``k`` and ``v`` of the array ``kv``, or of ``qkv`` if ``kv`` is None."""

    def __init__(self, heads: Heads, pieces: Pieces, qkv: Array, kv: Array | None, skipped: int = 0) -> None:
        # `pieces` has the token positions of the array's rows. `skipped` is the index of the array's first head among
        # this rank's key heads.
        self.pieces, self.skipped = pieces, skipped
        first, array = (1, qkv) if kv is None else (0, kv)
        self.k, self.v = (heads.view(array, first + part, of_queries=False) for part in range(2))


class KeyGradients:
    """Gradients of keys and values as views ``k`` and ``v`` of ``dkv``, or of ``dqkv`` if ``dkv`` is None."""

    def __init__(self, heads: Heads, dqkv: Array, dkv: Array | None, skipped: int = 0) -> None:
        first, array = (1, dqkv) if dkv is None else (0, dkv)
        self.k, self.v = (_Sum(heads, array, first + part, of_queries=False, skipped=skipped) for part in range(2))


Block: TypeAlias = tuple[int, int, int]  # first row, end row, token position of the first row


class TiledForward:
    """Forward pass of attention on one rank that computes the scores in tiles of queries and keys. Local."""

    def __init__(
        self, heads: Heads, saved: Saved, qkv: Array, y: Array, sums: Array, window: int, most: int = 0
    ) -> None:
        # `y` and `sums` are outputs: attention, and softmax maximum and sum of each query.
        self._heads, self._y, self._window = heads, y, window
        self._top, self._total = sums
        self._q, self._out = heads.view(qkv, 0, of_queries=True), heads.view(y, 0, of_queries=True)
        pairs, short, long = heads.most_pairs(y), min(QUERY_BLOCK, heads.context), min(LONG, max(most, heads.context))
        self._scores = _Memory(saved, "scores", pairs * short * long, y)
        # `most` is the largest number of keys that another rank sends at once; 0: all keys are local.
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
        """Add the attention of the query block ``rows`` over the visible ``keys``. ``chunk``: samples and heads."""
        (first, last, position), multiply, queries = rows, matmul, self._heads.queries
        count, size = chunk.pairs, self._heads.size
        q, out = chunk.of(self._q), chunk.of(self._out)
        k, v = chunk.of(keys.k, keys.skipped), chunk.of(keys.v, keys.skipped)
        q, out = q[..., first:last, :], out[..., first:last, :]
        shrink = self._shrink.tile(count, last - first)
        # Tiles of keys in order. The output so far is relative to the maximum so far and is rescaled when that grows.
        # `finish` divides by the sum. A causal block skips keys after its last query.
        # A causal block hides keys after a query. `span` is the range of the keys. If `begins`, the output is
        # overwritten.
        stop, window = min(last, span[1]) if causal else span[1], self._window
        positions = (position + 1 - window, EVERYTHING[1]) if window else EVERYTHING
        for number, (start, end, column) in enumerate(blocks(keys.pieces, LONG, span[0], stop, positions)):
            s = self._scores.tile(*chunk.outer, last - first, end - start)
            flat = s.reshape(count, last - first, end - start)
            multiply(q, k[..., start:end, :].swapaxes(-1, -2), out=s)
            new = begins and number == 0
            where = chunk.pair, first, *band(position - column, window, causal=causal), new
            # Dropout acts on normalised probabilities, so the row sum is taken before.
            kernels.softmax_advance(flat, where, self._heads.scale, self._top, self._total, shrink)
            chunk.drop(flat, dropped, position, column)
            if new:
                multiply(s, v[..., start:end, :], out=out)
            else:
                part = self._part.tile(*chunk.outer, last - first, size)
                multiply(s, v[..., start:end, :], out=part)
                kernels.rescale_add(part.reshape(count, -1, size), self._y, queries, chunk.pair, first, shrink)

    def finish(self, chunk: HeadChunk, rows: Block) -> None:
        """Divide the output of the query block ``rows`` in ``chunk`` by the softmax sums, after the last `block`."""
        first, last, _ = rows
        kernels.divide_by_totals(
            self._y, self._heads.queries, chunk.pair, first, chunk.pairs, last - first, self._total
        )


class TiledBackward:
    """Backward pass of attention on one rank that recomputes the scores in tiles of queries and keys. Local."""

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
        # `pieces` has the token positions of the rows of `arrays`. `sums` is from the forward pass.
        # `dots` is the result of `dots_of`.
        qkv, dy, dq = arrays  # inputs, output gradient, array for the query gradient
        self._heads, self._pieces, self._dots, most = heads, pieces, dots, max(most, heads.context)
        self._top, self._total = sums
        self._window = window
        self._q, self._do = heads.view(qkv, 0, of_queries=True), heads.view(dy, 0, of_queries=True)
        self._dq = _Sum(heads, dq, 0, of_queries=True)
        if window:  # not all queries see the first block of keys
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
        """Write the key and value gradients of a block of keys, and add the block's terms to the query gradients.

        ``chunk``: samples and heads. ``rows``: (first row, end row, token position) of the keys. ``keys``,
        ``gradients``: all keys and their gradients. ``dropped``: dropout mask or None.
        """
        (start, end, column), multiply, count, window = rows, matmul, chunk.pairs, self._window
        k, v = (chunk.of(view, keys.skipped)[..., start:end, :] for view in (keys.k, keys.v))
        begin = start if causal else span[0]  # earlier queries do not see these keys
        # `span` is the range of the queries. `begins` is True in the first call for a range of queries, whose gradients
        # are then overwritten.
        positions = (0, column + end - start + window - 1) if window else EVERYTHING
        for number, (first, last, position) in enumerate(blocks(self._pieces, LONG, begin, span[1], positions)):
            q, do = (chunk.of(view)[..., first:last, :] for view in (self._q, self._do))
            s, d = (memory.tile(*chunk.outer, last - first, end - start) for memory in (self._scores, self._gradients))
            p, g = (tile.reshape(count, last - first, end - start) for tile in (s, d))
            # s = q k^T becomes the probabilities p, d = do v^T the gradient of the scores; then dv += p^T do (p with
            # the dropout of the forward), dk += d^T q and dq += d k.
            multiply(q, k.swapaxes(-1, -2), out=s)
            multiply(do, v.swapaxes(-1, -2), out=d)
            chunk.drop(g, dropped, position, column)
            where = chunk.pair, first, *band(position - column, window, causal=causal), False
            kernels.softmax_gradient(p, g, where, self._heads.scale, self._top, self._total, self._dots)
            chunk.drop(p, dropped, position, column)  # p as in the product with v
            add = number > 0  # the first block of queries writes, later ones add
            gradients.v.product(s.swapaxes(-1, -2), do, chunk, start, end, self._part, add)
            gradients.k.product(d.swapaxes(-1, -2), q, chunk, start, end, self._part, add)
            self._dq.product(d, k, chunk, first, last, self._part, bool(window) or not begins)


class _Sum:
    def __init__(self, heads: Heads, target: Array, part: int, *, of_queries: bool, skipped: int = 0) -> None:
        self._skipped = skipped
        self._target, self._view = target, heads.view(target, part, of_queries=of_queries)
        self._heads = heads.queries if of_queries else heads.shared
        self._column = part * self._heads * heads.size
        self._groups = 1 if of_queries else heads.group

    def product(self, a: Array, b: Array, chunk: HeadChunk, first: int, last: int, memory: _Memory, add: bool) -> None:
        if self._groups == 1 and not add:
            matmul(a, b, out=chunk.of(self._view, self._skipped)[..., first:last, :])
            return
        # Products go to scratch, because the query heads of a group are summed into their shared head.
        part = memory.tile(*chunk.outer, last - first, b.shape[-1])
        matmul(a, b, out=part)
        rows = part.reshape(chunk.pairs, *part.shape[-2:])
        per_shared = self._heads // self._view.shape[1]  # query heads per shared head, in a gradient of queries
        pair = chunk.first_sample * self._heads + (chunk.first_head - self._skipped) * per_shared
        kernels.accumulate(rows, self._groups, self._target, self._heads, pair, self._column, first, add)
