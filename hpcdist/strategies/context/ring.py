"""Ring attention: exact attention of the local queries over the keys of every rank of the context axis.

Keys and values travel round the ring of ranks. Backward recomputes the probabilities. The gradients of keys and values
travel with them, and return to the owner in the last pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Unpack

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.ranges import Range, split
from hpcdist.models.attention.flash import (
    KeyGradients,
    KeyRows,
    TiledBackward,
    TiledForward,
    begin_backward,
    dots_of,
    has_fused_kernel,
    keep_for_backward,
    mask_of_heads,
)
from hpcdist.models.attention.tiles import QUERY_BLOCK, HeadChunk, Heads, Span, blocks, heads_of
from hpcdist.models.documents import Documents
from hpcdist.models.stage import AttentionOptions, Saved
from hpcdist.strategies.context.axis import ContextAxis, Ring
from hpcdist.strategies.context.costs import AttentionShare, head_parts
from hpcdist.strategies.context.operations import HOME, Visit, visits


class RingAttention:
    """Ring attention: exact attention of the local queries over the keys of every rank on ``axis``. Collective."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._visits = {
            causal: {visit.source: visit for visit in visits(axis.pieces, axis.rank, causal=causal)}
            for causal in (False, True)
        }

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        assert not has_fused_kernel(qkv), "16-bit ring attention is rejected by the rules"
        axis, kv, causal, window = self._axis, options.get("kv"), options.get("causal", True), options.get("window", 0)
        heads = heads_of(qkv, kv, head_size)
        y = saved.empty("attention.y", (heads.batch, heads.context, heads.queries * head_size), qkv.dtype)
        shape = 2, heads.batch * heads.queries, heads.context
        sums = saved.empty("attention.sums", shape, accumulation_dtype(qkv.dtype))
        dropout, part = options.get("dropout", 0.0), options.get("part")
        dropped = mask_of_heads(saved, dropout, heads.queries, axis.context, part)
        forward, documents = TiledForward(heads, saved, qkv, y, sums, window, axis.most_tokens), saved.documents
        for travelling in self._parts(heads, saved, qkv, kv, window):
            for source, block, _, poll in travelling.rounds():
                local, from_row = source == axis.rank, 0
                keys = KeyRows(heads, axis.own, qkv, kv)
                if not local:
                    visit = self._visits[causal][source]
                    keys, from_row = travelling.keys(visit, block), visit.from_row
                for chunk in travelling.chunks(documents):
                    for queries, seen in self._spans(documents, chunk, source):
                        for rows in blocks(axis.own, QUERY_BLOCK, max(from_row, queries[0]), queries[1]):
                            forward.block(chunk, rows, keys, dropped, causal=causal and local, begins=local, span=seen)
                    poll()
            for chunk in travelling.chunks(documents):
                for rows in blocks(axis.own):
                    forward.finish(chunk, rows)
        keep_for_backward(saved, qkv=qkv, kv=kv, head_size=head_size, dropped=dropped, causal=causal, window=window)
        return y

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        axis, documents = self._axis, saved.documents
        dots = dots_of(dy, saved["attention.y"], saved["attention.head_size"], saved)
        heads, (qkv, kv, sums), (dq, dkv), (causal, window), dropped = begin_backward(saved, keep=keep)
        backward = TiledBackward(heads, saved, axis.own, (qkv, dy, dq), sums, dots, window, axis.most_tokens)
        keys, gradients = KeyRows(heads, axis.own, qkv, kv), KeyGradients(heads, dq, dkv)
        for travelling in self._parts(heads, saved, qkv, kv, window):
            for source, block, part, poll in travelling.rounds(back=True):
                if part is None:  # the local block
                    for chunk in travelling.chunks(documents):
                        for span, _ in self._spans(documents, chunk, source):
                            for rows in blocks(axis.own, QUERY_BLOCK, *span):
                                begins = rows[0] == span[0]
                                backward.block(
                                    chunk, rows, keys, gradients, dropped, causal=causal, begins=begins, span=span
                                )
                        poll()
                    continue
                visit = self._visits[causal][source]
                unseen = visit.keys[-1][1] if visit.keys and documents is None and not window else 0
                part[:, unseen:] = 0  # keys that no local query sees
                others, into = travelling.keys(visit, block), travelling.gradients(part)
                for chunk in travelling.chunks(documents):
                    for queries, seen in self._spans(documents, chunk, source):
                        span = max(visit.from_row, queries[0]), queries[1]
                        for rows in blocks(visit.keys, QUERY_BLOCK, *seen) if span[0] < span[1] else ():
                            backward.block(chunk, rows, others, into, dropped, causal=False, begins=False, span=span)
                    poll()
            if len(axis.visited(window)[axis.rank]) > 1:
                travelling.add_home(dq if dkv is None else dkv)
        return dq if dkv is None else (dq, dkv)

    def _spans(self, documents: Documents | None, chunk: HeadChunk, source: int) -> Iterator[tuple[Span, Span]]:
        here, there = (chunk.spans(documents, self._axis.pieces[rank]) for rank in (self._axis.rank, source))
        return zip(here, there, strict=True)

    def _parts(self, heads: Heads, saved: Saved, qkv: Array, kv: Array | None, window: int) -> Iterator["_Travelling"]:
        axis, columns = self._axis, 2 * heads.size
        share = AttentionShare(
            ranks=axis.size,
            samples=heads.batch,
            tokens=axis.context,
            heads=heads.queries,
            shared=heads.shared,
            size=heads.size,
            itemsize=qkv.dtype.itemsize,
        )
        # All ranks use the same groups of key heads. GPU kernels take all heads at once.
        parts = split(heads.shared, 1 if is_device(qkv) else head_parts(share), itemsize=1, align_bytes=1)
        for part in parts:
            ring = Ring(axis, saved, qkv, part.size * columns, parts[0].size * columns, window)
            yield _Travelling(ring, heads, part, qkv, kv, axis.rank)


class _Travelling:
    # Consecutive key heads, whose keys and values are passed round the ring together.
    def __init__(self, ring: Ring, heads: Heads, part: Range, qkv: Array, kv: Array | None, rank: int) -> None:
        self._ring, self._heads, self._part, self._rank = ring, heads, part, rank
        self._qkv, self._kv = qkv, kv

    def rounds(self, *, back: bool = False) -> Iterator[tuple[int, Array, Array | None, Callable[[], None]]]:
        if self._kv is not None and self._part.size == self._heads.shared:
            return self._ring.rounds(self._kv, back=back)
        block, width = self._ring.block("keys0", self._rank), self._part.size * self._heads.size
        array = self._qkv if self._kv is None else self._kv
        for at, columns in enumerate(self._columns(array)):
            block[..., at * width : (at + 1) * width] = array[..., columns]
        return self._ring.rounds(block, back=back)

    def chunks(self, documents: Documents | None) -> Iterator[HeadChunk]:
        apart = documents is not None
        return self._heads.chunks(is_device(self._qkv), self._part.start, self._part.stop, apart=apart)

    def keys(self, visit: Visit, block: Array) -> KeyRows:
        return KeyRows(self._of(block), visit.keys, block, block, self._part.start)

    def gradients(self, block: Array) -> KeyGradients:
        return KeyGradients(self._of(block), block, block, self._part.start)

    def add_home(self, target: Array) -> None:
        """Add the gradients of local keys and values, computed by other ranks, to ``target``. Local."""
        home, width = self._ring.block(HOME, self._rank), self._part.size * self._heads.size
        for at, columns in enumerate(self._columns(target)):
            target[..., columns] += home[..., at * width : (at + 1) * width]

    def _of(self, block: Array) -> Heads:
        return replace(self._heads, context=block.shape[1], shared=self._part.size)

    def _columns(self, array: Array) -> list[slice]:
        size, shared = self._heads.size, self._heads.shared
        first = array.shape[2] - 2 * shared * size
        starts = (first + (at * shared + self._part.start) * size for at in range(2))
        return [slice(start, start + self._part.size * size) for start in starts]
