"""GELU, ReLU and SwiGLU against their plain float64 formulas."""

import numpy as np
import pytest

from hpcdist.models.activation import BLOCK, LocalActivation
from hpcdist.models.arena import Arena

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


def _gelu(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), slope


def _relu(x):
    return np.maximum(x, 0), (x > 0).astype(float)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["gelu", "relu"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (BLOCK + 1,), (3, BLOCK)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_against_the_formula(kind, shape, dtype, spread, rng):
    x, dy = (spread * rng.standard_normal(shape)).astype(dtype), rng.standard_normal(shape).astype(dtype)
    y, slope = (_gelu if kind == "gelu" else _relu)(x.astype(np.float64))
    saved, before = Arena().saved(0), dy.copy()
    operation = LocalActivation()
    got = operation.forward(x, kind, saved)
    assert np.abs(got - y).max() <= TOLERANCE[dtype] * (1 + np.abs(y).max())
    dx = operation.backward(dy, saved)
    assert np.abs(dx - dy * slope).max() <= 4 * TOLERANCE[dtype] * (1 + np.abs(dy).max())
    assert (dy == before).all()


def _swiglu(x, dy):
    width = x.shape[-1] // 2
    gate, value = x[..., :width], x[..., width:]
    share = 1 / (1 + np.exp(-gate))
    slope = share * (1 + gate * (1 - share))
    return gate * share * value, np.concatenate([dy * value * slope, dy * gate * share], axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 3, 14), (1, 2 * BLOCK + 2), (70, 1026), (0, 6)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_swiglu_against_the_formula(shape, dtype, spread, rng):
    x = (spread * rng.standard_normal(shape)).astype(dtype)
    dy = rng.standard_normal((*shape[:-1], shape[-1] // 2)).astype(dtype)
    y, dx = _swiglu(x.astype(np.float64), dy.astype(np.float64))
    saved, before = Arena().saved(0), dy.copy()
    got = LocalActivation().forward(x, "swiglu", saved)
    assert got.shape == dy.shape
    np.testing.assert_allclose(got, y, rtol=0, atol=TOLERANCE[dtype] * spread**2)
    got = LocalActivation().backward(dy, saved)
    assert got is x
    np.testing.assert_allclose(got, dx, rtol=0, atol=20 * TOLERANCE[dtype] * spread**2)
    assert (dy == before).all()


@pytest.mark.parametrize("half", [0, 1])
def test_swiglu_leaves_nan_visible(half, rng):
    x = rng.standard_normal((6, 20)).astype(np.float32)
    x[4, 10 * half + 3] = np.nan
    y = LocalActivation().forward(x, "swiglu", Arena().saved(0))
    assert np.isnan(y[4, 3]) and np.isnan(y).sum() == 1


@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_nan_stays_visible(kind, rng):
    x = rng.standard_normal(100).astype(np.float32)
    x[31] = np.nan
    assert (np.isnan(LocalActivation().forward(x, kind, Arena().saved(0))) == np.isnan(x)).all()
