"""Causal attention against the plain float64 formula, at sizes that do not fit its blocks."""

import numpy as np
import pytest

from hpcdist.models.arena import Arena
from hpcdist.models.attention import QUERY_BLOCK, LocalAttention

TOLERANCE = {"float32": 3e-6, "float64": 1e-13}


def _plain(qkv, heads, dy):
    batch, context, triple = qkv.shape
    size = triple // 3 // heads
    q, k, v = qkv.astype(np.float64).reshape(batch, context, 3, heads, size).transpose(2, 0, 3, 1, 4)
    scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(size)
    scores[..., np.triu(np.ones((context, context), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    y = np.einsum("bhij,bhjd->bihd", p, v).reshape(batch, context, -1)
    do = dy.astype(np.float64).reshape(batch, context, heads, size).transpose(0, 2, 1, 3)
    dp = np.einsum("bhid,bhjd->bhij", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(size)
    parts = (
        np.einsum("bhij,bhjd->bihd", ds, k),
        np.einsum("bhij,bhid->bjhd", ds, q),
        np.einsum("bhij,bhid->bjhd", p, do),
    )
    return y, np.stack(parts, 2).reshape(qkv.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("context", [1, 2, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 5])
@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 1, 1), (2, 3, 5), (3, 1, 8)])
def test_against_the_formula(batch, context, heads, size, dtype, rng):
    qkv = (2 * rng.standard_normal((batch, context, 3 * heads * size))).astype(dtype)
    dy = rng.standard_normal((batch, context, heads * size)).astype(dtype)
    y, dqkv = _plain(qkv, heads, dy)
    arena = Arena()
    for _ in range(2):  # the second time memory is full of old numbers
        saved, before = arena.saved(0), (qkv.copy(), dy.copy())
        got = LocalAttention().forward(qkv, size, saved)
        assert np.abs(got - y).max() <= TOLERANCE[dtype] * (1 + np.abs(y).max())
        got = LocalAttention().backward(dy, saved)
        assert np.abs(got - dqkv).max() <= 4 * TOLERANCE[dtype] * (1 + np.abs(dqkv).max())
        assert (qkv == before[0]).all() and (dy == before[1]).all()
        saved.release()


def test_the_future_does_not_leak(rng):
    qkv = rng.standard_normal((1, 100, 24))
    changed = qkv.copy()
    changed[:, 70:] = 1e30
    y, other = (LocalAttention().forward(x, 4, Arena().saved(0)) for x in (qkv, changed))
    assert (y[:, :64] == other[:, :64]).all()
    np.testing.assert_allclose(y[:, :70], other[:, :70], rtol=1e-12)
