"""Attention in 16-bit floats on tensor cores of a GPU, emulated by their definition, compared with float64."""

import math

import numpy as np
import pytest

from harness.marks import cases
from harness.models.documents import random_places, visibility_mask
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.errors import UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.attention import flash
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.documents import PackedTokens, unpacked
from hpcdist.models.layers.dropout import ATTENTION, mask
from hpcdist.models.stage import Draw
from stubs.gpu import cuda_compiler

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of roundings: relative errors are at most that,
LEAST = {"float16": 2.0**-25, "bfloat16": 0.0}  # and absolute ones at most that, where numbers are subnormal
SINGLE = 2.0**-16  # of sums in float32, generously
# batch, context, query heads, key heads, head size: odd ones, more than one block, each padded size
SHAPES = (
    (1, 1, 1, 1, 16),
    (2, 7, 3, 3, 5),
    (1, 70, 2, 2, 64),
    (2, 130, 2, 1, 16),
    (1, 65, 4, 2, 24),
    (1, 40, 1, 1, 128),
)


def reference(q, k, v, dy, seen, factors, unit, least):
    """Return output and gradients in float64, then the largest allowed error of each.


    Shapes are (batch, heads, context, size), with keys repeated for their query heads. Weights of values, slopes of
    scores, output and gradients are rounded. The slopes use the products of the rows of dy and of the rounded y. For a
    single token they should be 0, but they are the sum of the rounding changes, however small the exact gradients are.
    """
    scale = 1 / math.sqrt(q.shape[3])
    s = q @ k.swapaxes(2, 3) * scale
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    weights, dp = p * factors, dy @ v.swapaxes(2, 3) * factors
    dots = (p * dp).sum(axis=3, keepdims=True)
    ds = p * (dp - dots) * scale
    exact = weights @ v, ds @ k, ds.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dy

    of_weights = (unit + SINGLE) * weights + least
    of_y = of_weights @ abs(v) + unit * abs(exact[0]) + least
    of_dots = (abs(dy) * of_y).sum(axis=3, keepdims=True)
    sums = abs(dy) @ abs(v).swapaxes(2, 3) * factors
    in_single = SINGLE * (sums + (p * sums).sum(axis=3, keepdims=True))
    of_ds = p * (of_dots + in_single) * scale + unit * abs(ds) + least
    sources = of_ds @ abs(k), of_ds.swapaxes(2, 3) @ abs(q), of_weights.swapaxes(2, 3) @ abs(dy)
    most = of_y, *(source + unit * abs(gradient) + least for source, gradient in zip(sources, exact[1:], strict=True))
    return exact, [(1 + 4 * unit) * bound for bound in most]  # products of two roundings


def split(x, heads):
    """Return (batch, context, width) as (batch, heads, context, size), in float64."""
    return x.astype(np.float64).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def joined(x):
    batch, heads, context, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, context, heads * size)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.full_except("float16-(1, 1, 1, 1, 16)-causal-0.0")
def test_gpu_attention_matches_the_formula(gpu, dtype, shape, causal, dropout, rng):
    check_formula(dtype, shape, causal, dropout, rng)


def check_formula(dtype, shape, causal, dropout, rng, places=None, window=0):
    """Compare a pass with the formula, within the rounding bound."""
    batch, context, heads, shared, size = shape
    kind, group = dtype_of(dtype), heads // shared
    q, dy = (rng.standard_normal((batch, context, heads * size)).astype(kind) for _ in range(2))
    k, v = (rng.standard_normal((batch, context, shared * size)).astype(kind) for _ in range(2))
    saved = Arena(on="gpu").saved(3)
    saved.draw = Draw(int(rng.integers(1 << 40)), 5, 2)
    saved.documents = None if places is None else unpacked(PackedTokens.of(backend.place(places, "gpu"), places))[1]
    seen = np.tri(context, dtype=bool) if causal else np.ones((context, context), bool)
    if places is not None:
        seen = visibility_mask(places, causal)[:, None]
    if window:
        seen = seen & ~np.tri(context, k=-window, dtype=bool)
    together = heads == shared
    given = backend.place(np.concatenate([q, k, v] if together else [q], axis=2), "gpu")
    kv = None if together else backend.place(np.concatenate([k, v], axis=2), "gpu")
    operation = LocalAttention()
    y = operation.forward(given, size, saved, dropout=dropout, kv=kv, causal=causal, window=window)
    result = operation.backward(backend.place(dy, "gpu"), saved)
    factors = np.ones((batch * heads, context, context))
    dropped = mask(saved, dropout, ATTENTION, rows_per_sample=heads * context, columns=context, groups=heads,
                   pitch=context)  # fmt: skip
    if dropped is not None:
        dropped.drop(factors, 0, context, context)
    repeated = [np.repeat(split(x, shared), group, axis=1) for x in (k, v)]
    factors = factors.reshape(batch, heads, context, context)
    roundings = UNIT[dtype], LEAST[dtype]
    both = reference(split(q, heads), *repeated, split(dy, heads), seen, factors, *roundings)
    of_y, of_gradients = zip(*(outputs(results, shared, group) for results in both), strict=True)
    parts = (result,) if together else result
    got = np.concatenate([backend.to_host(part).astype(np.float64) for part in parts], axis=2)
    close(backend.to_host(y), *of_y, UNIT[dtype])
    close(got, *of_gradients, UNIT[dtype])


def outputs(results, shared, group):
    """Return the output and the gradients. Gradients of keys and values are summed over their queries."""
    y, dq, *others = results
    batch, _, context, size = y.shape
    dk, dv = (x.reshape(batch, shared, group, context, size).sum(axis=2) for x in others)
    return joined(y), np.concatenate([joined(dq), joined(dk), joined(dv)], axis=2)


@cases(
    "shape, causal, dropout, most",
    ((2, 130, 2, 1, 16), True, 0.0, 40),
    ((1, 200, 2, 2, 24), False, 0.3, 0),
    ((2, 70, 1, 1, 80), True, 0.2, 9),
)
def test_gpu_attention_in_documents_matches_the_formula(gpu, shape, causal, dropout, most, rng):
    check_formula("float16", shape, causal, dropout, rng, random_places(rng, *shape[:2], most))


@cases(
    "dtype, shape, dropout, most, window",
    ("bfloat16", (2, 130, 2, 1, 16), 0.0, None, 1),
    ("float16", (1, 200, 2, 2, 24), 0.3, None, 40),
    ("float16", (1, 200, 1, 1, 80), 0.0, None, 65),
    ("float16", (2, 150, 2, 1, 16), 0.2, 90, 30),
)
def test_gpu_attention_with_windows_matches_the_formula(gpu, dtype, shape, dropout, most, window, rng):
    places = None if most is None else random_places(rng, *shape[:2], most)
    check_formula(dtype, shape, True, dropout, rng, places, window)


def test_more_pairs_than_grid_blocks_are_split(gpu, rng, monkeypatch):
    monkeypatch.setattr(cuda_compiler, "BLOCKS_ACROSS", 2)  # blocks of rows; pairs have no such limit
    test_gpu_attention_matches_the_formula(gpu, "float16", (3, 70, 2, 1, 16), True, 0.0, rng)
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        test_gpu_attention_matches_the_formula(gpu, "float16", (1, 130, 1, 1, 16), True, 0.0, rng)


def close(got, want, most, unit):
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= most).all()
    if want.shape[1] > 1:  # the roundings of many tokens average out
        assert np.linalg.norm(error) <= 2 * unit * np.linalg.norm(want)


def test_non_finite_row_does_not_affect_earlier_rows(gpu, rng):
    qkv = rng.standard_normal((1, 70, 48)).astype(np.float16)
    qkv[0, 30, 5] = np.nan  # of a query
    qkv[0, 50, 20] = np.inf  # of a key
    y = LocalAttention().forward(backend.place(qkv, "gpu"), 16, Arena(on="gpu").saved(0)).get()[0]
    assert np.isnan(y[30]).all() and np.isfinite(y[:30]).all() and np.isfinite(y[31:50]).all()
    assert np.isnan(y[50:]).any()


def test_head_size_without_kernel_is_rejected(gpu):
    with pytest.raises(UsageError, match=r"heads of size 144; the maximum is 128: choose model.heads"):
        LocalAttention().forward(backend.zeros((1, 2, 432), np.dtype("float16"), "gpu"), 144, Arena(on="gpu").saved(0))


def test_context_above_the_grid_limit_is_rejected(gpu, monkeypatch):
    monkeypatch.setattr(flash, "MAX_FUSED_CONTEXT", 64)
    with pytest.raises(UsageError, match=r"context of 65 tokens; the maximum is 64: choose a shorter data"):
        LocalAttention().forward(backend.zeros((1, 65, 48), np.dtype("float16"), "gpu"), 16, Arena(on="gpu").saved(0))
