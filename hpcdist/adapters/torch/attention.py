"""Attention and token positions for wrapped modules with context parallelism.

In a module, replace `torch.nn.functional.scaled_dot_product_attention` by `context_attention` and
``torch.arange(tokens)`` by `context_positions`. With ``parallel.context`` they use the tokens of all context ranks;
otherwise they behave like the replaced functions.
"""

import functools
import math
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.adapters.torch.arrays import array_of, library, tensor_of
from hpcdist.errors import UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import AttentionOperation, Saved

if TYPE_CHECKING:
    import torch


class SampleCut:
    """This rank's tokens of each sample under context parallelism, and a pool of memory for attention calls."""

    def __init__(self, attention: AttentionOperation, places: np.ndarray, whole: int) -> None:
        self.attention = attention  # over the tokens of all context ranks
        self.places = places  # positions of this rank's tokens in the sample
        self.whole = whole  # tokens of a sample on all ranks
        self.calls = 0
        self._arena, self._free, self._made = Arena(), list[Saved](), 0

    def take(self) -> Saved:
        """Return a `Saved` object that stores one attention call's activations. Pass the object to `back` after use."""
        if not self._free:
            self._free.append(self._arena.saved(0, self._made))
            self._made += 1
        return self._free.pop()

    def back(self, saved: Saved) -> None:
        """Release the activations in ``saved``, a result of `take`. A later `take` may return ``saved`` again."""
        saved.release()
        self._free.append(saved)

    @property
    def tokens(self) -> int:
        """Number of tokens of each sample that this rank holds."""
        return len(self.places)


class _Lease:
    def __init__(self, cut: SampleCut, saved: Saved) -> None:
        self.saved = saved
        self.release = weakref.finalize(self, cut.back, saved)


CURRENT: ContextVar[SampleCut | None] = ContextVar("current", default=None)  # for the stage that runs in this thread


def context_positions(tokens: int, device: "torch.device | str | None" = None) -> "torch.Tensor":
    """Return the positions of this rank's ``tokens`` tokens within a sample: int64, shape (tokens,). Local."""
    torch, cut = library(), CURRENT.get()
    if cut is None:
        return torch.arange(tokens, device=device)
    if tokens != cut.tokens:
        raise UsageError(
            f"context_positions({tokens}): this rank has {cut.tokens} of the {cut.whole} tokens of a sample; call "
            f"context_positions({cut.tokens})"
        )
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
    """Return the attention of this rank's queries over the keys of all context ranks. Collective over these ranks.

    The arguments before ``window`` are as in PyTorch's `scaled_dot_product_attention`. ``window``: number of keys that
    a causal query sees, or 0 for all. The backward pass is also collective. Raises UsageError for invalid arguments.
    """
    pytorch, cut = library(), CURRENT.get()
    if window < 0 or (window and (not is_causal or attn_mask is not None)):
        raise UsageError(
            f"context_attention got window = {window}, is_causal = {is_causal}{', a mask' * (attn_mask is not None)}; "
            "window must be at least 0 tokens (0: no window), and a window needs causal attention without another mask"
        )
    if cut is None:
        if window:
            attn_mask = pytorch.ones(query.shape[-2], key.shape[-2], dtype=pytorch.bool, device=query.device)
            attn_mask, is_causal = attn_mask.tril().triu(1 - window), False
        attended: torch.Tensor = pytorch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return attended
    if attn_mask is not None or dropout_p:
        fault = "attn_mask" if attn_mask is not None else f"dropout_p = {dropout_p}"
        raise UsageError(
            f"context_attention got {fault}: parallel.context above 1 supports neither attn_mask nor dropout_p; use "
            "is_causal or window instead of a mask, and dropout_p = 0"
        )
    batch, heads, tokens, size = query.shape if query.dim() == key.dim() == 4 else (0, 0, 0, 0)
    shared = key.shape[1]
    same = heads and key.shape == value.shape == (batch, shared, tokens, size) and heads % shared == 0
    if not same or tokens != cut.tokens or (shared != heads and not enable_gqa):
        raise UsageError(
            f"context_attention got queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)}; give (samples, heads, {cut.tokens} local tokens, size) for all three; with "
            "enable_gqa=True, keys and values may have fewer heads"
        )
    cut.calls += 1
    if scale is not None:
        query = query * (scale * math.sqrt(size))
    recorded = pytorch.is_grad_enabled() and any(fault.requires_grad for fault in (query, key, value))
    result: torch.Tensor = _function().apply(query, key, value, is_causal, window, cut, recorded)
    return result


@functools.cache
def _function() -> Any:
    torch = library()

    class ContextAttention(torch.autograd.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(
            ctx: Any, query: Any, key: Any, value: Any, is_causal: bool, window: int, cut: SampleCut, recorded: bool
        ) -> Any:
            saved, rows = cut.take(), _rows(query)
            if rows.data_ptr() == query.data_ptr():  # attention overwrites its input
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
    return x.detach().transpose(1, 2).reshape(x.shape[0], x.shape[2], -1).contiguous()


def _heads(rows: "torch.Tensor", size: int) -> "torch.Tensor":
    samples, tokens, columns = rows.shape
    return rows.reshape(samples, tokens, columns // size, size).transpose(1, 2).clone()
