"""Attention in 16-bit floats on the tensor cores of a GPU, here by their definition, against float64."""

import math

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.errors import UsageError
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.layers.dropout import ATTENTION, mask
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Draw
from stubs.gpu import cuda_compiler

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
# batch, context, query heads, key heads, head size: odd ones, more than one block, each padded size
SHAPES = (
    (1, 1, 1, 1, 16),
    (2, 7, 3, 3, 5),
    (1, 70, 2, 2, 64),
    (2, 130, 2, 1, 16),
    (1, 65, 4, 2, 24),
    (1, 40, 1, 1, 128),
)


def reference(q, k, v, dy, causal, factors):
    """Output and gradients of (batch, heads, context, size), keys repeated for their query heads, in float64."""
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    if causal:
        s = np.where(np.tri(q.shape[2], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    y = (p * factors) @ v
    dp = dy @ v.swapaxes(2, 3) * factors
    ds = p * (dp - (p * dp).sum(axis=3, keepdims=True)) / math.sqrt(q.shape[3])
    return y, ds @ k, ds.swapaxes(2, 3) @ q, (p * factors).swapaxes(2, 3) @ dy


def split(x, heads):
    """(batch, context, width) to (batch, heads, context, size), in float64."""
    return x.astype(np.float64).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def joined(x):
    batch, heads, context, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, context, heads * size)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.full_except("float16-(1, 1, 1, 1, 16)-causal-0.0")
def test_against_the_formula(gpu, dtype, shape, causal, dropout, rng):
    """Probabilities and their gradients are rounded to 16 bits on the way: errors are some units of the largest."""
    batch, context, heads, shared, size = shape
    kind, group = dtype_of(dtype), heads // shared
    q, dy = (rng.standard_normal((batch, context, heads * size)).astype(kind) for _ in range(2))
    k, v = (rng.standard_normal((batch, context, shared * size)).astype(kind) for _ in range(2))
    saved = Arena(on="gpu").saved(3)
    saved.draw = Draw(int(rng.integers(1 << 40)), 5, 2)
    together = heads == shared
    given = backend.place(np.concatenate([q, k, v] if together else [q], axis=2), "gpu")
    kv = None if together else backend.place(np.concatenate([k, v], axis=2), "gpu")
    operation = LocalAttention()
    y = operation.forward(given, size, saved, dropout=dropout, kv=kv, causal=causal)
    found = operation.backward(backend.place(dy, "gpu"), saved)
    factors = np.ones((batch * heads, context, context))
    dropped = mask(saved, dropout, ATTENTION, rows_per_sample=heads * context, columns=context, groups=heads,
                   pitch=context)  # fmt: skip
    if dropped is not None:
        dropped.drop(factors, 0, context, context)
    repeated = [np.repeat(split(x, shared), group, axis=1) for x in (k, v)]
    factors = factors.reshape(batch, heads, context, context)
    want, *gradients = reference(split(q, heads), *repeated, split(dy, heads), causal, factors)
    dq, dk, dv = (gradients[0], *(x.reshape(batch, shared, group, context, size).sum(axis=2) for x in gradients[1:]))
    whole = [joined(dq), joined(dk), joined(dv)]
    parts = (found,) if together else found
    got = np.concatenate([backend.to_host(part).astype(np.float64) for part in parts], axis=2)
    close(backend.to_host(y), joined(want), UNIT[dtype])
    close(got, np.concatenate(whole, axis=2), UNIT[dtype])


def test_more_pairs_than_a_grid_has_blocks_across(gpu, rng, monkeypatch):
    monkeypatch.setattr(cuda_compiler, "BLOCKS_ACROSS", 2)  # blocks of rows; pairs have no such limit
    test_against_the_formula(gpu, "float16", (3, 70, 2, 1, 16), True, 0.0, rng)
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        test_against_the_formula(gpu, "float16", (1, 130, 1, 1, 16), True, 0.0, rng)


def close(got, want, unit):
    error = np.abs(got.astype(np.float64) - want)
    assert error.max() <= 6 * unit * np.abs(want).max()
    assert np.linalg.norm(error) <= 2 * unit * np.linalg.norm(want)


def test_what_is_not_finite_shows_in_its_row_and_in_no_earlier_one(gpu, rng):
    qkv = rng.standard_normal((1, 70, 48)).astype(np.float16)
    qkv[0, 30, 5] = np.nan  # of a query
    qkv[0, 50, 20] = np.inf  # of a key
    y = LocalAttention().forward(backend.place(qkv, "gpu"), 16, Arena(on="gpu").saved(0)).get()[0]
    assert np.isnan(y[30]).all() and np.isfinite(y[:30]).all() and np.isfinite(y[31:50]).all()
    assert np.isnan(y[50:]).any()


def test_heads_that_no_kernel_has_are_refused(gpu):
    with pytest.raises(UsageError, match=r"heads of 144; its kernels have heads of at most 128: choose model.heads"):
        LocalAttention().forward(backend.zeros((1, 2, 432), np.dtype("float16"), "gpu"), 144, Arena(on="gpu").saved(0))
