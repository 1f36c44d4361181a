"""Ring attention: exact attention of the own queries over the keys of all ranks of the context axis.

The own block comes first, so that every row has seen a key; then the blocks of the ranks before this one, while the
next is on its way. The softmax goes on over blocks as it does over tiles, and backward computes the probabilities
again. Gradients of a block follow it round the ring and collect every rank's part: they come home with the last pass.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.models.attention import kernels
from hpcdist.models.attention.flash import (
    KeyGradients,
    KeyRows,
    TiledBackward,
    TiledForward,
    has_fused_kernel,
    mask_of_heads,
)
from hpcdist.models.attention.tiles import Heads, blocks, heads_of
from hpcdist.models.stage import AttentionOptions, Saved
from hpcdist.strategies.context.axis import ContextAxis, Ring
from hpcdist.strategies.context.passes import visits


class RingAttention:
    """`hpcdist.models.attention.flash.LocalAttention` of samples that are cut over ``axis``. Collective over it."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._visits = {
            causal: {visit.source: visit for visit in visits(axis.pieces, axis.rank, causal=causal)}
            for causal in (False, True)
        }

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        """Return (batch, own tokens, width) for contiguous qkv (batch, own tokens, 3 width), or queries and kv."""
        assert not has_fused_kernel(qkv), "the rules refuse 16-bit attention on a ring"
        axis, kv, causal = self._axis, options.get("kv"), options.get("causal", True)
        heads = heads_of(qkv, kv, head_size)
        y = saved.empty("attention.y", (heads.batch, heads.context, heads.queries * head_size), qkv.dtype)
        sums = saved.empty(
            "attention.sums", (2, heads.batch * heads.queries, heads.context), accumulation_dtype(qkv.dtype)
        )
        dropped = mask_of_heads(saved, options.get("dropout", 0.0), heads.queries, axis.context, options.get("part"))
        forward = TiledForward(heads, saved, qkv, y, sums, axis.most_tokens)
        ring = Ring(axis, saved, qkv, 2 * heads.shared * head_size)
        for source, block, poll in ring.rounds(_own_block(ring, heads, qkv, kv, axis.rank)):
            own, keys, from_row = source == axis.rank, KeyRows(heads, axis.own, qkv, kv), 0
            if not own:
                visit = self._visits[causal][source]
                from_row = visit.from_row
                keys = KeyRows(replace(heads, context=block.shape[1]), visit.keys, block, block)
            for chunk in heads.chunks(everything=is_device(qkv)):
                for rows in blocks(axis.own, first=from_row):
                    forward.block(chunk, rows, keys, dropped, causal=causal and own, begins=own)
                poll()
        for chunk in heads.chunks(everything=is_device(qkv)):
            for rows in blocks(axis.own):
                forward.finish(chunk, rows)
        for_backward = {"qkv": qkv, "kv": kv, "head_size": head_size, "dropped": dropped, "causal": causal}
        for key, value in for_backward.items():
            saved.keep(f"attention.{key}", value)
        return y

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        """Return dqkv, or (dq, dkv), of the own tokens; see `LocalAttention.backward`."""
        axis = self._axis
        qkv, kv, y, sums = (saved[f"attention.{key}"] for key in ("qkv", "kv", "y", "sums"))
        causal, dropped = saved["attention.causal"], saved["attention.dropped"]
        heads = heads_of(qkv, kv, saved["attention.head_size"])
        take = saved.empty if keep else saved.scratch
        dq = take("attention.dqkv", qkv.shape, qkv.dtype)
        dkv = None if kv is None else take("attention.dkv", kv.shape, kv.dtype)
        dots = saved.scratch("attention.dots", sums.shape[1:], sums.dtype)
        kernels.row_dots(dy, y, heads.queries, dots)
        backward = TiledBackward(heads, saved, axis.own, (qkv, dy, dq), sums, dots, axis.most_tokens)
        width = 2 * heads.shared * heads.size
        ring = Ring(axis, saved, qkv, width)
        for source, block, poll in ring.rounds(_own_block(ring, heads, qkv, kv, axis.rank)):
            if source == axis.rank:
                keys, gradients = KeyRows(heads, axis.own, qkv, kv), KeyGradients(heads, dq, dkv)
                for chunk in heads.chunks(everything=is_device(qkv)):
                    for rows in blocks(axis.own):
                        backward.block(chunk, rows, keys, gradients, dropped, causal=causal, begins=rows[0] == 0)
                    poll()
            else:
                part = ring.contribution(source)
                self._visited(backward, heads, source, block, part, saved, poll)
                ring.pass_on(part, source)
        target = dq if dkv is None else dkv
        ring.finish((target, slice(target.shape[2] - width, target.shape[2])))
        return dq if dkv is None else (dq, dkv)

    def _visited(
        self,
        backward: TiledBackward,
        heads: Heads,
        source: int,
        block: Array,
        part: Array,
        saved: Saved,
        poll: Callable[[], None],
    ) -> None:
        """Write the gradients of the ``block`` of ``source``, as far as the own queries see it, to ``part``."""
        visit = self._visits[saved["attention.causal"]][source]
        theirs = replace(heads, context=block.shape[1])
        keys, gradients = KeyRows(theirs, visit.keys, block, block), KeyGradients(theirs, part, part)
        seen = visit.keys[-1][1] if visit.keys else 0
        part[:, seen:] = 0
        for chunk in heads.chunks(everything=is_device(block)):
            for rows in blocks(visit.keys):
                backward.block(
                    chunk, rows, keys, gradients, saved["attention.dropped"],
                    causal=False, begins=False, from_row=visit.from_row,
                )  # fmt: skip
            poll()


def _own_block(ring: Ring, heads: Heads, qkv: Array, kv: Array | None, rank: int) -> Array:
    """Return keys and values of the own tokens, one behind the other and contiguous."""
    if kv is not None:
        return kv
    block = ring.block("keys0", rank)
    block[...] = qkv[..., heads.queries * heads.size :]
    return block
