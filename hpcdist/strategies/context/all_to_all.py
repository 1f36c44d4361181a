"""Attention by exchanging tokens for heads (DeepSpeed-Ulysses; Jacobs et al., arXiv:2309.14509).

With q and k bytes of the queries and the keys of a sample on c ranks, a rank sends ``(2 q + 2 k) (c - 1) / c^2`` per
layer forward, and as much backward. Row products of the output with its gradient take ``q / s (c - 1) / c^2`` more
bytes for heads of s numbers, twice as many in 16 bits.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias, Unpack, cast

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.models.attention.flash import LocalAttention, dots_of
from hpcdist.models.attention.tiles import Heads, heads_of
from hpcdist.models.stage import AttentionOptions, Saved
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.operations import HeadExchange

Target: TypeAlias = tuple[Array, bool]  # (array, whether to add to it)


class AllToAllAttention:
    """All-to-all attention: after an all-to-all, each rank computes some heads for all tokens. Collective."""

    # The number of ranks must divide the number of query heads, and divide or be a multiple of the number of key heads.
    # Same interface as `hpcdist.models.attention.flash.LocalAttention`.

    def __init__(self, axis: ContextAxis) -> None:
        self._axis, self._inner = axis, LocalAttention()
        self._there, self._back = cast(tuple[HeadExchange, HeadExchange], axis.messages(axis.window)[0])

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        axis, kv = self._axis, options.get("kv")
        heads = heads_of(qkv, kv, head_size)
        # The outputs of the linear layers are not read again: whole samples use their memory if it suffices.
        wholes = [
            array.reshape(heads.batch, axis.context, columns)
            if array.size == heads.batch * axis.context * columns
            else saved.empty(f"context.{name}", (heads.batch, axis.context, columns), qkv.dtype)
            for name, array, columns in zip(
                ("qkv", "kv"), (qkv, kv), self._columns(heads, kv is not None), strict=False
            )
            if array is not None
        ]
        arrives = wholes[0].reshape(-1) if kv is None else None
        placed = self._exchange(self._sources(heads, qkv, kv), [whole.shape[2] for whole in wholes], saved, arrives)
        for whole, samples in zip(wholes, placed, strict=True):
            whole[...] = samples
        count = heads.queries // axis.size
        first, all_heads = options.get("part") or (0, heads.queries)
        options["part"] = first + axis.rank * count, all_heads
        if kv is not None:
            options["kv"] = wholes[1]
        # The heads of whole samples use the memory of the output they are exchanged for.
        shapes = (heads.batch, axis.context, count * head_size), (heads.batch, heads.context, heads.queries * head_size)
        memory = saved.empty("context.y", (max(map(prod, shapes)),), qkv.dtype)
        whole, y = (memory[: prod(shape)].reshape(shape) for shape in shapes)
        self._inner.forward(wholes[0], head_size, saved, y=whole, **options)
        saved.keep("context.inputs", (qkv, kv, head_size))  # only the shapes of qkv and kv are used
        saved.keep("context.output", y)
        self._exchange_back([whole], [[(part, False) for part in _split(y, axis.size)]], saved)
        return y

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        axis, (qkv, kv, head_size), y = self._axis, saved["context.inputs"], saved["context.output"]
        heads = heads_of(qkv, kv, head_size)
        dots = self._exchange_dots(dots_of(dy, y, head_size, saved), heads, saved)
        parts = [[part] for part in _split(dy, axis.size)]
        (whole,) = self._exchange(parts, [dy.shape[2] // axis.size], saved)
        result = self._inner.backward(whole, saved, dots=dots)
        gradients = list(result) if isinstance(result, tuple) else [result]
        shapes = [array.shape for array in (qkv, kv) if array is not None]
        if keep:
            outputs = [saved.empty(f"context.dqkv{number}", shape, dy.dtype) for number, shape in enumerate(shapes)]
        else:  # the memory of the sent arrays is free by then
            outputs = self._memory(saved, dy, sum(map(prod, shapes)), shapes)
        dq, dkv = (outputs[0], None) if kv is None else (outputs[0], outputs[1])
        arrives = gradients[0].reshape(-1) if kv is None else None
        self._exchange_back(gradients, self._targets(heads, dq, dkv), saved, arrives)
        return dq if dkv is None else (dq, dkv)

    def _exchange_dots(self, local_dots: Array, heads: Heads, saved: Saved) -> Array:
        axis, num_heads = self._axis, heads.queries // self._axis.size
        by_token = local_dots.reshape(heads.batch, heads.queries, heads.context).swapaxes(1, 2)
        (whole,) = self._exchange([[part] for part in _split(by_token, axis.size)], [num_heads], saved)
        dots = saved.scratch("attention.dots", (heads.batch * num_heads, axis.context), local_dots.dtype)
        dots.reshape(heads.batch, num_heads, axis.context)[...] = whole.swapaxes(1, 2)
        return dots

    def _columns(self, heads: Heads, grouped: bool) -> tuple[int, ...]:
        queries, shared = heads.queries // self._axis.size, self._shared(heads)
        if grouped:
            return queries * heads.size, 2 * shared * heads.size
        return (3 * queries * heads.size,)

    def _shared(self, heads: Heads) -> int:
        return max(1, heads.shared // self._axis.size)

    def _sources(self, heads: Heads, qkv: Array, kv: Array | None) -> list[list[Array]]:
        size, shared = heads.size, self._shared(heads)
        keys, first = (qkv, heads.queries * size) if kv is None else (kv, 0)
        second = first + heads.shared * size
        sources = []
        for rank, queries in enumerate(_split(qkv[..., : heads.queries * size], self._axis.size)):
            # With fewer shared heads than ranks, neighbours get the same head.
            begin = rank * heads.shared // self._axis.size * size
            parts = [keys[..., at + begin : at + begin + shared * size] for at in (first, second)]
            sources.append([queries, *parts])
        return sources

    def _targets(self, heads: Heads, dq: Array, dkv: Array | None) -> list[list[Target]]:
        firsts = [rank * heads.shared // self._axis.size for rank in range(self._axis.size)]
        adds = [rank > 0 and firsts[rank] == firsts[rank - 1] for rank in range(self._axis.size)]
        queries, *others = zip(*self._sources(heads, dq, dkv), strict=True)
        return [[(part, False) for part in queries], *(list(zip(parts, adds, strict=True)) for parts in others)]

    def _memory(self, saved: Saved, like: Array, most: int, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        flat = saved.scratch("context.moved", (max(most, sum(map(prod, shapes))),), like.dtype)
        stops = list(accumulate(map(prod, shapes), initial=0))
        return [flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(stops), shapes, strict=True)]

    def _buffers(
        self, saved: Saved, like: Array, sent: int, received: int, after: int, arrives: Array | None
    ) -> tuple[Array, Array]:
        # The receive buffer is in ``arrives`` or, if this array is too small, in scratch memory after the first
        # ``after`` elements. ``like``: array with the dtype and device of the buffers.
        if arrives is not None and arrives.size >= received:
            return self._memory(saved, like, max(sent, after), [(sent,)])[0], arrives[:received]
        first, second = self._memory(saved, like, 0, [(max(sent, after),), (received,)])
        return first[:sent], second

    def _exchange(
        self, sources: list[list[Array]], widths: Sequence[int], saved: Saved, arrives: Array | None = None
    ) -> list[Array]:
        # Sends all heads of the local tokens, and receives the local heads of all tokens.
        # ``sources[r]``: arrays to send to rank r. ``arrives``: receive memory, which may overlap ``sources``. Returns
        # an array of shape (batch, context, width) per width, valid until the next call.
        axis, like = self._axis, sources[0][0]
        batch, columns = like.shape[0], sum(widths)
        begins, ends = _ranges(self._there.sends, batch * columns), _ranges(self._there.receives, batch * columns)
        after = batch * columns * axis.context
        send, receive = self._buffers(saved, like, begins[-1].stop, ends[-1].stop, after, arrives)
        for region, parts in zip(begins, sources, strict=True):
            message, at = send[region.slice].reshape(batch, axis.tokens, columns), 0
            for part in parts:
                message[..., at : at + part.shape[2]] = part
                at += part.shape[2]
        axis.all_to_all(send, receive, begins, ends)
        wholes = self._memory(saved, like, after, [(batch, axis.context, width) for width in widths])
        for rank, region in enumerate(ends):
            received = receive[region.slice].reshape(batch, -1, columns)
            for start, end, position in axis.pieces[rank]:
                at = 0
                for whole in wholes:
                    width = whole.shape[2]
                    whole[:, position : position + end - start] = received[:, start:end, at : at + width]
                    at += width
        return wholes

    def _exchange_back(
        self, wholes: list[Array], targets: list[list[Target]], saved: Saved, arrives: Array | None = None
    ) -> None:
        # Sends the local heads of every token to the rank with this token.
        # ``wholes``: arrays with the local heads of all tokens. ``targets[i][r]``: (array, whether to add) for the data
        # that rank r sends from its ``wholes[i]``. ``arrives``: receive memory, which may overlap ``wholes``.
        axis, like = self._axis, wholes[0]
        batch, columns = like.shape[0], sum(whole.shape[2] for whole in wholes)
        begins, ends = _ranges(self._back.sends, batch * columns), _ranges(self._back.receives, batch * columns)
        after = sum(target.size for parts in targets for target, _ in parts)
        send, receive = self._buffers(saved, like, begins[-1].stop, ends[-1].stop, after, arrives)
        for rank, region in enumerate(begins):
            message, at = send[region.slice].reshape(batch, -1, columns), 0
            for whole in wholes:
                for start, end, position in axis.pieces[rank]:
                    message[:, start:end, at : at + whole.shape[2]] = whole[:, position : position + end - start]
                at += whole.shape[2]
        axis.all_to_all(send, receive, begins, ends)
        at = 0
        for parts in targets:
            for rank, (target, adds) in enumerate(parts):
                received = receive[ends[rank].slice].reshape(batch, -1, columns)[..., at : at + target.shape[2]]
                if adds:
                    target += received
                else:
                    target[...] = received
            at += parts[0][0].shape[2]


def _ranges(tokens: Sequence[int], per_token: int) -> list[Range]:
    stops = [per_token * stop for stop in accumulate(tokens, initial=0)]
    return [Range(start, stop) for start, stop in pairwise(stops)]


def _split(x: Array, parts: int) -> list[Array]:
    width = x.shape[-1] // parts
    return [x[..., part * width : (part + 1) * width] for part in range(parts)]
