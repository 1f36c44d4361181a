"""Attention of wrapped modules whose samples are cut over context ranks, and the places of their tokens.

`context_attention` takes the place of `torch.nn.functional.scaled_dot_product_attention` in a module, and
`context_positions` that of ``torch.arange(tokens)``. In a run with ``parallel.context`` they use the tokens of all
ranks; in any other they are what they replace.
"""

import functools
import math
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.adapters.torch.arrays import array_of, library, tensor_of
from hpcdist.errors import UsageError
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import AttentionOperation, Saved

if TYPE_CHECKING:
    import torch


class SampleCut:
    """The tokens of each sample of ``whole`` tokens that this rank has, at ``places``, and its ``attention`` over all.

    ``calls`` counts the attentions that were computed, of all stages together.
    """

    def __init__(self, attention: AttentionOperation, places: np.ndarray, whole: int) -> None:
        self.attention, self.places, self.whole = attention, places, whole
        self.calls = 0
        self._arena, self._free, self._made = Arena(), list[Saved](), 0

    def take(self) -> Saved:
        """Return memory for an attention, until it is given `back`."""
        if not self._free:
            self._free.append(self._arena.saved(0, self._made))
            self._made += 1
        return self._free.pop()

    def back(self, saved: Saved) -> None:
        """Release the memory of an attention."""
        saved.release()
        self._free.append(saved)

    @property
    def tokens(self) -> int:
        """The number of tokens of a sample that are here."""
        return len(self.places)


class _Lease:
    """Memory of one attention, given back by its backward, or with the graph of one that never runs."""

    def __init__(self, cut: SampleCut, saved: Saved) -> None:
        self.saved = saved
        self.release = weakref.finalize(self, cut.back, saved)


CURRENT: ContextVar[SampleCut | None] = ContextVar("current", default=None)  # of the stage that runs in this thread


def context_positions(tokens: int, device: "torch.device | str | None" = None) -> "torch.Tensor":
    """Return the places (tokens,) of the tokens that this rank has of each sample, int64.

    Local. Without context ranks they are 0 to ``tokens - 1``. Raises UsageError where a sample has another number of
    tokens here.
    """
    torch, cut = library(), CURRENT.get()
    if cut is None:
        return torch.arange(tokens, device=device)
    if tokens != cut.tokens:
        raise UsageError(f"context_positions({tokens}): this rank has {cut.tokens} of {cut.whole} tokens of a sample")
    return torch.from_numpy(cut.places.copy()).to(device)


def context_attention(
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attn_mask: "torch.Tensor | None" = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int = 0,
) -> "torch.Tensor":
    """Return attention (samples, heads, tokens, size) of the own queries over the tokens of all context ranks.

    ``key`` and ``value`` may have fewer heads, a divisor of those of ``query``, with ``enable_gqa``. With a ``window``
    a causal query sees no more than so many keys, the last of them at its own place; 0: all before it. Collective over
    the context axis, forward and backward, when a stage runs in a run that has one; else it is PyTorch's own, with a
    mask for a window. Raises UsageError for a window that is not causal, and on a context axis for masks and dropout,
    which are not known to other ranks, and for other shapes.
    """
    pytorch, cut = library(), CURRENT.get()
    if window < 0 or (window and (not is_causal or attn_mask is not None)):
        raise UsageError(
            f"context_attention got window = {window}, is_causal = {is_causal}{', a mask' * (attn_mask is not None)}; "
            "a window is a number of tokens from 1 on (0: none), of causal attention without another mask"
        )
    if cut is None:
        if window:
            attn_mask = pytorch.ones(query.shape[-2], key.shape[-2], dtype=pytorch.bool, device=query.device)
            attn_mask, is_causal = attn_mask.tril().triu(1 - window), False
        own: torch.Tensor = pytorch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return own
    if attn_mask is not None or dropout_p:
        given = "attn_mask" if attn_mask is not None else f"dropout_p = {dropout_p}"
        raise UsageError(
            f"context_attention got {given}: with parallel.context there is the causal mask, with a window, or none, "
            "and no dropout of attention; use is_causal and window, and dropout_p = 0"
        )
    batch, heads, tokens, size = query.shape if query.dim() == key.dim() == 4 else (0, 0, 0, 0)
    shared = key.shape[1]
    same = heads and key.shape == value.shape == (batch, shared, tokens, size) and heads % shared == 0
    if not same or tokens != cut.tokens or (shared != heads and not enable_gqa):
        raise UsageError(
            f"context_attention got queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)}; give (samples, heads, {cut.tokens} own tokens, size) of all three, or fewer heads "
            "of keys and values with enable_gqa=True"
        )
    cut.calls += 1
    if scale is not None:
        query = query * (scale * math.sqrt(size))
    recorded = pytorch.is_grad_enabled() and any(given.requires_grad for given in (query, key, value))
    result: torch.Tensor = _function().apply(query, key, value, is_causal, window, cut, recorded)
    return result


@functools.cache
def _function() -> Any:
    """Return the function of PyTorch's autograd: PyTorch is loaded when it is needed."""
    torch = library()

    class ContextAttention(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(
            ctx: Any, query: Any, key: Any, value: Any, is_causal: bool, window: int, cut: SampleCut, recorded: bool
        ) -> Any:
            saved, rows = cut.take(), _rows(query)
            if rows.data_ptr() == query.data_ptr():  # attention writes over what it is given
                rows = rows.clone()
            kv = torch.cat([_rows(key), _rows(value)], dim=2)
            size = query.shape[3]
            y = cut.attention.forward(array_of(rows), size, saved, kv=array_of(kv), causal=is_causal, window=window)
            result = _heads(tensor_of(y), size)
            if recorded:
                ctx.cut, ctx.lease, ctx.size = cut, _Lease(cut, saved), size
            else:
                cut.back(saved)
            return result

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            dq, dkv = ctx.cut.attention.backward(array_of(_rows(dy)), ctx.lease.saved)
            dq, dkv = tensor_of(dq), tensor_of(dkv)
            half = dkv.shape[2] // 2
            gradients = [_heads(part, ctx.size) for part in (dq, dkv[..., :half], dkv[..., half:])]
            ctx.lease.release()
            return (*gradients, None, None, None, None)

    return ContextAttention


def _rows(x: "torch.Tensor") -> "torch.Tensor":
    """Return (samples, tokens, heads size), contiguous, of (samples, heads, tokens, size)."""
    return x.detach().transpose(1, 2).reshape(x.shape[0], x.shape[2], -1).contiguous()


def _heads(rows: "torch.Tensor", size: int) -> "torch.Tensor":
    """Return (samples, heads, tokens, size), in memory of its own, of (samples, tokens, heads size)."""
    samples, tokens, columns = rows.shape
    return rows.reshape(samples, tokens, columns // size, size).transpose(1, 2).clone()
