"""Attention compared with the plain float64 formula, at sizes that are no multiples of its tiles."""

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.arrays.backend import Ledger
from hpcdist.errors import UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.attention import flash, kernels, tiles
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.attention.tiles import LONG, QUERY_BLOCK
from hpcdist.models.stage import Draw
from stubs.gpu import host_kernels

TOLERANCE = {"float32": 3e-6, "float64": 1e-13}


def _split(x, parts, size):
    batch, context, _ = x.shape
    return x.astype(np.float64).reshape(batch, context, parts, -1, size).transpose(2, 0, 3, 1, 4)


def _join(*parts):
    """Return parts (batch, heads, context, size) as columns of one array (batch, context, columns)."""
    batch, _, context, _ = parts[0].shape
    return np.concatenate([part.swapaxes(1, 2).reshape(batch, context, -1) for part in parts], axis=2)


def _plain(q, k, v, do, causal, window=0):
    """Return y, dq, dk, dv. The number of heads of q is the number of key heads, or a multiple."""
    heads, shared, context = q.shape[1], k.shape[1], q.shape[2]
    keys, values = (np.repeat(x, heads // shared, axis=1) for x in (k, v))
    scores = q @ keys.swapaxes(2, 3) / np.sqrt(q.shape[3])
    if causal:
        scores[
            ..., ~(np.tri(context, dtype=bool) & ~np.tri(context, k=-min(window or context, context), dtype=bool))
        ] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ values.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[3])
    dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    dk, dv = (x.reshape(len(x), shared, -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    return p @ values, ds @ keys, dk, dv


def _check(qkv, kv, dy, size, causal, window=0):
    dtype = qkv.dtype.name
    q, k, v = _split(qkv, 3, size) if kv is None else (*_split(qkv, 1, size), *_split(kv, 2, size))
    y, dq, dk, dv = _plain(q, k, v, *_split(dy, 1, size), causal, window)
    expected = [_join(dq, dk, dv)] if kv is None else [_join(dq), _join(dk, dv)]
    arena, given = Arena(), [array for array in (qkv, kv, dy) if array is not None]
    for _ in range(2):  # the second time memory is full of old numbers
        saved, before = arena.saved(0), [array.copy() for array in given]
        got = LocalAttention().forward(qkv, size, saved, kv=kv, causal=causal, window=window)
        assert np.abs(got - _join(y)).max() <= TOLERANCE[dtype] * (1 + np.abs(y).max())
        result = LocalAttention().backward(dy, saved)
        for one, want in zip((result,) if kv is None else result, expected, strict=True):
            assert one.dtype == qkv.dtype and one.shape == want.shape
            assert np.abs(one - want).max() <= 4 * TOLERANCE[dtype] * (1 + np.abs(want).max())
        assert all((array == old).all() for array, old in zip(given, before, strict=True))
        saved.release()


def _inputs(rng, dtype, batch, context, heads, size, shared=None):
    columns = 3 * heads * size if shared is None else heads * size
    qkv = (2 * rng.standard_normal((batch, context, columns))).astype(dtype)
    kv = None if shared is None else rng.standard_normal((batch, context, 2 * shared * size)).astype(dtype)
    return qkv, kv, rng.standard_normal((batch, context, heads * size)).astype(dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("context", [1, 2, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 5])
@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 1, 1), (2, 3, 5), (3, 1, 8)])
def test_attention_matches_the_formula(batch, context, heads, size, dtype, causal, rng):
    qkv, kv, dy = _inputs(rng, dtype, batch, context, heads, size)
    _check(qkv, kv, dy, size, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("context", [1, 70, LONG + 3])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (6, 1)])
def test_query_groups_share_keys_and_values(heads, shared, context, dtype, causal, rng):
    _check(*_inputs(rng, dtype, 2, context, heads, 4, shared), 4, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("context", [LONG, LONG + 1, 2 * LONG + QUERY_BLOCK + 7])
def test_rows_across_several_tiles_match_the_formula(context, dtype, causal, rng):
    _check(*_inputs(rng, dtype, 1, context, 3, 8), 8, causal)


@cases(
    "context, window, shared",
    (5, 1, None),
    (70, 9, 1),
    (200, QUERY_BLOCK, None),
    (200, QUERY_BLOCK + 1, 2),
    (LONG + 90, LONG - 5, 1),  # rows of a block that see nothing of its last tile
    (2 * LONG + 7, LONG + 77, None),
    (70, 70, 2),
    (70, 1 << 70, None),
)
@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_windowed_attention_matches_the_formula(context, window, shared, on, rng, monkeypatch):
    if on == "gpu":
        host_kernels.install(monkeypatch, flash, kernels, tiles)
    for dtype in TOLERANCE:
        _check(*_inputs(rng, dtype, 2, context, 2, 4, shared), 4, True, window)


def test_window_as_long_as_the_context_changes_no_bit(rng):
    qkv, _, dy = _inputs(rng, "float32", 2, LONG + 40, 2, 4)
    results = []
    for window in (0, LONG + 40):
        saved = Arena().saved(0)
        y = LocalAttention().forward(qkv, 4, saved, window=window)
        results.append((y.copy(), LocalAttention().backward(dy, saved).copy()))
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def test_work_is_proportional_to_the_window(rng, monkeypatch):
    made, multiply = [], np.matmul

    def matmul(a, b, **given):
        made.append(a.size * b.shape[-1])
        return multiply(a, b, **given)

    monkeypatch.setattr(np, "matmul", matmul)

    def work(context, window):
        qkv, _, dy = _inputs(rng, "float32", 1, context, 1, 8)
        made.clear()
        saved = Arena().saved(0)
        LocalAttention().forward(qkv, 8, saved, window=window)
        LocalAttention().backward(dy, saved)
        return sum(made)

    window, most = 2 * QUERY_BLOCK, 8 * LONG
    assert work(most, window) <= 7 * most * 8 * (window + 2 * QUERY_BLOCK)  # seven products
    assert work(most, window) <= 2.1 * work(most // 2, window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shared", [None, 2])
@pytest.mark.parametrize("context", [1, 70, LONG + 67])
def test_gpu_kernels_match_the_formula(context, shared, dtype, causal, rng, monkeypatch):
    host_kernels.install(monkeypatch, flash, kernels, tiles)
    _check(*_inputs(rng, dtype, 2, context, 4, 4, shared), 4, causal)


@pytest.mark.parametrize("shared", [None, 2])
@pytest.mark.parametrize("context", [33, LONG + 40])
def test_bits_do_not_depend_on_the_batch(context, shared, rng, monkeypatch):
    qkv, kv, dy = _inputs(rng, "float32", 3, context, 4, 8, shared)
    results = []
    for tile in (tiles.TILE, 1, 1 << 30):  # as it is, a head at a time, all at once
        monkeypatch.setattr(tiles, "TILE", tile)
        saved = Arena().saved(0)
        y = LocalAttention().forward(qkv, 8, saved, kv=kv)
        gradients = LocalAttention().backward(dy, saved)
        results.append([y, *((gradients,) if kv is None else gradients)])
    one = Arena().saved(0)
    assert (LocalAttention().forward(qkv[1:2], 8, one, kv=None if kv is None else kv[1:2]) == results[0][0][1]).all()
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


def test_memory_is_linear_in_the_context(rng):
    def held_bytes(context):
        qkv, _, dy = _inputs(rng, "float32", 1, context, 2, 8)
        ledger = Ledger()
        saved = Arena(ledger).saved(0)
        saved.draw = Draw(1, 1, 0)
        LocalAttention().forward(qkv, 8, saved, dropout=0.1)
        LocalAttention().backward(dy, saved)
        return ledger.peak["activations"], qkv.nbytes

    (short, _), (long, inputs) = held_bytes(2 * LONG), held_bytes(8 * LONG)
    assert long <= 4 * short
    assert long - short <= 2 * inputs  # output, sums and gradient: not one row of scores


def test_gradients_are_owned_by_the_stage(rng):
    arena = Arena()
    for shared in (None, 1):
        qkv, kv, dy = _inputs(rng, "float64", 1, 5, 2, 4, shared)
        saved = arena.saved(0)
        LocalAttention().forward(qkv, 4, saved, kv=kv)
        result = LocalAttention().backward(dy, saved, keep=True)
        assert all(saved.owns(array) for array in ((result,) if kv is None else result))
        saved.release()


@pytest.mark.parametrize("causal", [True, False])
def test_empty_batch_is_allowed(causal):
    saved = Arena().saved(0)
    y = LocalAttention().forward(np.empty((0, 5, 24), np.float32), 4, saved, causal=causal)
    assert y.shape == (0, 5, 8)
    assert LocalAttention().backward(y, saved).shape == (0, 5, 24)


@cases(
    "queries, kv",
    ((2, 5, 20), None),
    ((2, 5, 8), (2, 6, 16)),
    ((2, 5, 8), (2, 5, 12)),
    ((2, 5, 8), (2, 5, 24)),
    ((2, 5, 8), (2, 5, 0)),
)
def test_mismatched_shapes_are_rejected(queries, kv):
    given = None if kv is None else np.zeros(kv)
    with pytest.raises(UsageError, match="expected a multiple|must have"):
        LocalAttention().forward(np.zeros(queries), 4, Arena().saved(0), kv=given)


@pytest.mark.parametrize("causal", [True, False])
def test_non_finite_inputs_give_nan(causal, rng):
    qkv, _, dy = _inputs(rng, "float32", 1, 100, 2, 4)
    qkv[0, 50, 9] = np.nan  # of a key
    saved = Arena().saved(0)
    y = LocalAttention().forward(qkv, 4, saved, causal=causal)
    assert np.isnan(y[0, 50:, :]).any(axis=1).all()
    assert np.isnan(LocalAttention().backward(dy, saved)[0, 50]).any()


def test_causal_attention_ignores_later_tokens(rng):
    qkv = rng.standard_normal((1, 100, 24))
    changed = qkv.copy()
    changed[:, 70:] = 1e30
    y, other = (LocalAttention().forward(x, 4, Arena().saved(0)) for x in (qkv, changed))
    assert (y[:, :64] == other[:, :64]).all()
    np.testing.assert_allclose(y[:, :70], other[:, :70], rtol=1e-12)
