"""GELU, ReLU and SwiGLU compared with their plain float64 formulas."""

import numpy as np
import pytest

from hpcdist.models.arena import Arena
from hpcdist.models.layers.linear import LocalActivation

WIDE = np.longdouble  # of the formulas: more digits than float64 where the processor has them


def _gelu(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    t = np.tanh(inner)
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), slope


def _relu(x):
    return np.maximum(x, 0), (x > 0).astype(float)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["gelu", "relu"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (1025,), (3, 4096), (0,)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_gelu_and_relu_match_the_formula(kind, shape, dtype, spread, rng):
    x, dy = (spread * rng.standard_normal(shape)).astype(dtype), rng.standard_normal(shape).astype(dtype)
    y, slope = (_gelu if kind == "gelu" else _relu)(x.astype(WIDE))
    saved, before = Arena().saved(0), dy.copy()
    operation = LocalActivation()
    got, eps = operation.forward(x, kind, saved), np.finfo(dtype).eps
    assert (np.abs(got - y) <= 2 * eps * np.abs(x)).all()
    assert (np.abs(operation.backward(dy, saved) - dy * slope) <= 4 * eps * np.abs(dy)).all()
    assert (dy == before).all()


def _swiglu(x, dy):
    width = x.shape[-1] // 2
    gate, value = x[..., :width], x[..., width:]
    share = 1 / (1 + np.exp(-gate))
    slope = share * (1 + gate * (1 - share))
    return gate * share * value, np.concatenate([dy * value * slope, dy * gate * share], axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 3, 14), (1, 2050), (70, 1026), (0, 6)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_swiglu_matches_the_formula(shape, dtype, spread, rng):
    x = (spread * rng.standard_normal(shape)).astype(dtype)
    dy = rng.standard_normal((*shape[:-1], shape[-1] // 2)).astype(dtype)
    (y, dx), (gate, value) = _swiglu(x.astype(WIDE), dy.astype(WIDE)), np.split(np.abs(x), 2, axis=-1)
    saved, before, eps = Arena().saved(0), dy.copy(), np.finfo(dtype).eps
    got = LocalActivation().forward(x, "swiglu", saved)
    assert got.shape == dy.shape
    assert (np.abs(got - y) <= 3 * eps * gate * value).all()
    got = LocalActivation().backward(dy, saved)
    assert got is x
    gates, values = np.split(np.abs(got - dx), 2, axis=-1)
    assert (gates <= 4 * eps * value * np.abs(dy)).all() and (values <= 3 * eps * gate * np.abs(dy)).all()
    assert (dy == before).all()


@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu"])
def test_extreme_arguments_give_the_limits(kind):
    """Exponentials overflow there without a warning."""
    x = np.array([[1e4, 500.0, -500.0, -1e4, 0.0], [1e4, 500.0, -500.0, -1e4, 0.0]], np.float32).T.copy()
    saved = Arena().saved(0)
    y = LocalActivation().forward(x, kind, saved)
    want = np.maximum(x, 0) if kind != "swiglu" else (np.maximum(x[:, :1], 0) * x[:, 1:])
    np.testing.assert_array_equal(y, want)
    dx = LocalActivation().backward(np.ones_like(y), saved)
    slope = [1, 1, 0, 0]
    if kind == "swiglu":
        np.testing.assert_array_equal(dx[:4, 1], [1e4, 500, 0, 0])
    else:
        np.testing.assert_array_equal(dx[:4, 0], slope)


def _huge(dtype):
    """Return numbers of every magnitude up to the largest, with both signs."""
    powers = np.linspace(0, np.log10(np.finfo(dtype).max) - 0.01, 200)
    magnitudes = np.append(10**powers, np.finfo(dtype).max).astype(dtype)
    return np.concatenate([magnitudes, -magnitudes])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_of_huge_numbers_is_finite(dtype):
    x, saved = _huge(dtype), Arena().saved(0)
    far, above = np.abs(x) > 40, x > 0
    np.testing.assert_array_equal(LocalActivation().forward(x, "gelu", saved)[far], np.where(above, x, 0)[far])
    slope = LocalActivation().backward(np.ones_like(x), saved)
    np.testing.assert_array_equal(slope[far], above[far])
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("value", "gradient"), [(1e10, 1), (-3e38, 1), (1, 1e10), (1, -3e38), (1e19, 1e19)])
def test_swiglu_of_huge_negative_gates_is_zero(dtype, value, gradient):
    """A closed gate gives 0 for any factor."""
    gates = _huge(dtype)
    gates, saved = gates[gates < -1000], Arena().saved(0)
    x = np.stack([gates, np.full_like(gates, value)], axis=1)
    y = LocalActivation().forward(x, "swiglu", saved)
    assert (y == 0).all()
    assert (LocalActivation().backward(np.full_like(y, gradient), saved) == 0).all()


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
    saved, dy = Arena().saved(0), np.ones_like(x)
    assert (np.isnan(LocalActivation().forward(x, kind, saved)) == np.isnan(x)).all()
    dy[7] = np.nan
    bad = np.isnan(LocalActivation().backward(dy, saved))
    assert bad[7] and bad.sum() == (2 if kind == "gelu" else 1)
