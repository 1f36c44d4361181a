"""Attention by an exchange of heads for tokens (DeepSpeed-Ulysses; Jacobs et al., arXiv:2309.14509).

Before attention every rank sends each other one the heads that are that one's, for its own tokens, and gets whole
samples for its heads; afterwards the way back. Heads of keys and values that several ranks need go to all of them, and
their gradients are summed on the way back. With q and k bytes of the queries and of the keys of a sample, a rank sends
``(2 q + 2 k) (c - 1) / c^2`` in each layer forward, and as much backward.

Of the output a rank keeps all heads of its own tokens, which the linear behind attention keeps too, and not its heads
of whole samples: those the backward needs for the products of its rows with those of the gradient alone. They are made
where the tokens are, and sent: ``q / s (c - 1) / c^2`` more bytes backward for heads of s numbers, twice that in 16
bits, whose sums are float32.
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

Target: TypeAlias = tuple[Array, bool]  # and whether to add to it


class AllToAllAttention:
    """`hpcdist.models.attention.flash.LocalAttention` of samples that are cut over ``axis``. Collective over it.

    The number of ranks divides the query heads, and is a divisor or a multiple of the shared heads.
    """

    def __init__(self, axis: ContextAxis) -> None:
        self._axis, self._inner = axis, LocalAttention()
        self._there, self._back = cast(tuple[HeadExchange, HeadExchange], axis.messages(axis.window)[0])

    def forward(self, qkv: Array, head_size: int, saved: Saved, **options: Unpack[AttentionOptions]) -> Array:
        """Return (batch, own tokens, width) for contiguous qkv (batch, own tokens, 3 width), or queries and kv."""
        axis, kv = self._axis, options.get("kv")
        heads = heads_of(qkv, kv, head_size)
        # Nobody reads what the linears gave any more: whole samples take its memory where they fit.
        wholes = [
            given.reshape(heads.batch, axis.context, columns)
            if given.size == heads.batch * axis.context * columns
            else saved.empty(f"context.{name}", (heads.batch, axis.context, columns), qkv.dtype)
            for name, given, columns in zip(
                ("qkv", "kv"), (qkv, kv), self._columns(heads, kv is not None), strict=False
            )
            if given is not None
        ]
        arrives = wholes[0].reshape(-1) if kv is None else None
        placed = self._exchange(self._sources(heads, qkv, kv), [whole.shape[2] for whole in wholes], saved, arrives)
        for whole, samples in zip(wholes, placed, strict=True):
            whole[...] = samples
        each = heads.queries // axis.size
        first, of_heads = options.get("part") or (0, heads.queries)
        options["part"] = first + axis.rank * each, of_heads
        if kv is not None:
            options["kv"] = wholes[1]
        # The heads of whole samples lie in the memory of what they are exchanged for, until they are sent.
        shapes = (heads.batch, axis.context, each * head_size), (heads.batch, heads.context, heads.queries * head_size)
        memory = saved.empty("context.y", (max(map(prod, shapes)),), qkv.dtype)
        whole, y = (memory[: prod(shape)].reshape(shape) for shape in shapes)
        self._inner.forward(wholes[0], head_size, saved, y=whole, **options)
        saved.keep("context.inputs", (qkv, kv, head_size))  # of the first two only the shapes are used
        saved.keep("context.output", y)
        self._exchange_back([whole], [[(part, False) for part in _split(y, axis.size)]], saved)
        return y

    def backward(self, dy: Array, saved: Saved, *, keep: bool = False) -> Array | tuple[Array, Array]:
        """Return dqkv, or (dq, dkv), of the own tokens; see `LocalAttention.backward`."""
        axis, (qkv, kv, head_size), y = self._axis, saved["context.inputs"], saved["context.output"]
        heads = heads_of(qkv, kv, head_size)
        dots = self._exchange_dots(dots_of(dy, y, head_size, saved), heads, saved)
        parts = [[part] for part in _split(dy, axis.size)]
        (whole,) = self._exchange(parts, [dy.shape[2] // axis.size], saved)
        found = self._inner.backward(whole, saved, dots=dots)
        gradients = list(found) if isinstance(found, tuple) else [found]
        shapes = [given.shape for given in (qkv, kv) if given is not None]
        if keep:
            own = [saved.empty(f"context.dqkv{number}", shape, dy.dtype) for number, shape in enumerate(shapes)]
        else:  # what was sent is free when they come
            own = self._memory(saved, dy, sum(map(prod, shapes)), shapes)
        dq, dkv = (own[0], None) if kv is None else (own[0], own[1])
        arrives = gradients[0].reshape(-1) if kv is None else None
        self._exchange_back(gradients, self._targets(heads, dq, dkv), saved, arrives)
        return dq if dkv is None else (dq, dkv)

    def _exchange_dots(self, own: Array, heads: Heads, saved: Saved) -> Array:
        """Return `dots_of` whole samples for the heads here, by the ``own`` ones of all heads: scratch too."""
        axis, each = self._axis, heads.queries // self._axis.size
        by_token = own.reshape(heads.batch, heads.queries, heads.context).swapaxes(1, 2)
        (whole,) = self._exchange([[part] for part in _split(by_token, axis.size)], [each], saved)
        dots = saved.scratch("attention.dots", (heads.batch * each, axis.context), own.dtype)
        dots.reshape(heads.batch, each, axis.context)[...] = whole.swapaxes(1, 2)
        return dots

    def _columns(self, heads: Heads, grouped: bool) -> tuple[int, ...]:
        """Return the columns of what a rank has of whole samples: query, key, value, or queries and kv."""
        queries, shared = heads.queries // self._axis.size, self._shared(heads)
        if grouped:
            return queries * heads.size, 2 * shared * heads.size
        return (3 * queries * heads.size,)

    def _shared(self, heads: Heads) -> int:
        """Return how many heads of keys and values the query heads of a rank look at."""
        return max(1, heads.shared // self._axis.size)

    def _sources(self, heads: Heads, qkv: Array, kv: Array | None) -> list[list[Array]]:
        """Return, for each rank, the columns that it gets, in the order of `_columns`."""
        size, shared = heads.size, self._shared(heads)
        keys, first = (qkv, heads.queries * size) if kv is None else (kv, 0)
        second = first + heads.shared * size
        found = []
        for rank, queries in enumerate(_split(qkv[..., : heads.queries * size], self._axis.size)):
            # With fewer shared heads than ranks, neighbours get the same one.
            begin = rank * heads.shared // self._axis.size * size
            parts = [keys[..., at + begin : at + begin + shared * size] for at in (first, second)]
            found.append([queries, *parts])
        return found

    def _targets(self, heads: Heads, dq: Array, dkv: Array | None) -> list[list[Target]]:
        """Return, for queries, keys and values, the columns of the gradient that each rank brings."""
        firsts = [rank * heads.shared // self._axis.size for rank in range(self._axis.size)]
        again = [rank > 0 and firsts[rank] == firsts[rank - 1] for rank in range(self._axis.size)]
        queries, *others = zip(*self._sources(heads, dq, dkv), strict=True)
        return [[(part, False) for part in queries], *(list(zip(parts, again, strict=True)) for parts in others)]

    def _memory(self, saved: Saved, like: Array, most: int, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return consecutive arrays in the scratch of all exchanges, of at least ``most`` elements."""
        flat = saved.scratch("context.moved", (max(most, sum(map(prod, shapes))),), like.dtype)
        stops = list(accumulate(map(prod, shapes), initial=0))
        return [flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(stops), shapes, strict=True)]

    def _buffers(
        self, saved: Saved, like: Array, sent: int, came: int, after: int, arrives: Array | None
    ) -> tuple[Array, Array]:
        """Return memory for so many elements that are ``sent``, and for those that ``came``: ``arrives`` if they fit.

        Once they came, `_memory` has room for ``after`` elements in front of them.
        """
        if arrives is not None and arrives.size >= came:
            return self._memory(saved, like, max(sent, after), [(sent,)])[0], arrives[:came]
        first, second = self._memory(saved, like, 0, [(max(sent, after),), (came,)])
        return first[:sent], second

    def _exchange(
        self, sources: list[list[Array]], widths: Sequence[int], saved: Saved, arrives: Array | None = None
    ) -> list[Array]:
        """Send each rank its columns of the own tokens; return arrays (batch, context, width) by what comes.

        They are scratch, until the next exchange. ``arrives`` may be the memory of what is sent: it is copied first.
        """
        axis, like = self._axis, sources[0][0]
        batch, columns = like.shape[0], sum(widths)
        begins, ends = _ranges(self._there.sends, batch * columns), _ranges(self._there.receives, batch * columns)
        after = batch * columns * axis.context
        send, receive = self._buffers(saved, like, begins[-1].stop, ends[-1].stop, after, arrives)
        for where, parts in zip(begins, sources, strict=True):
            message, at = send[where.slice].reshape(batch, axis.tokens, columns), 0
            for part in parts:
                message[..., at : at + part.shape[2]] = part
                at += part.shape[2]
        axis.all_to_all(send, receive, begins, ends)
        wholes = self._memory(saved, like, after, [(batch, axis.context, width) for width in widths])
        for rank, where in enumerate(ends):
            came = receive[where.slice].reshape(batch, -1, columns)
            for start, end, place in axis.pieces[rank]:
                at = 0
                for whole in wholes:
                    width = whole.shape[2]
                    whole[:, place : place + end - start] = came[:, start:end, at : at + width]
                    at += width
        return wholes

    def _exchange_back(
        self, wholes: list[Array], targets: list[list[Target]], saved: Saved, arrives: Array | None = None
    ) -> None:
        """Send each rank its tokens of ``wholes``; write what rank r brings to the r-th of each of ``targets``.

        ``arrives`` may be the memory of ``wholes``, and ``targets`` that of what is sent.
        """
        axis, like = self._axis, wholes[0]
        batch, columns = like.shape[0], sum(whole.shape[2] for whole in wholes)
        begins, ends = _ranges(self._back.sends, batch * columns), _ranges(self._back.receives, batch * columns)
        after = sum(target.size for parts in targets for target, _ in parts)
        send, receive = self._buffers(saved, like, begins[-1].stop, ends[-1].stop, after, arrives)
        for rank, where in enumerate(begins):
            message, at = send[where.slice].reshape(batch, -1, columns), 0
            for whole in wholes:
                for start, end, place in axis.pieces[rank]:
                    message[:, start:end, at : at + whole.shape[2]] = whole[:, place : place + end - start]
                at += whole.shape[2]
        axis.all_to_all(send, receive, begins, ends)
        at = 0
        for parts in targets:
            for rank, (target, adds) in enumerate(parts):
                came = receive[ends[rank].slice].reshape(batch, -1, columns)[..., at : at + target.shape[2]]
                if adds:
                    target += came
                else:
                    target[...] = came
            at += parts[0][0].shape[2]


def _ranges(tokens: Sequence[int], each: int) -> list[Range]:
    """Return consecutive ranges of messages with ``each`` elements a token, one for the ``tokens`` of each rank."""
    stops = [each * stop for stop in accumulate(tokens, initial=0)]
    return [Range(start, stop) for start, stop in pairwise(stops)]


def _split(x: Array, parts: int) -> list[Array]:
    """View the columns of x as so many parts of equal size."""
    width = x.shape[-1] // parts
    return [x[..., part * width : (part + 1) * width] for part in range(parts)]
