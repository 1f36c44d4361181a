"""Layer and RMS normalisation against their plain float64 formulas."""

import numpy as np
import pytest

from hpcdist.models.arena import Arena
from hpcdist.models.norm import EPSILON, LocalNorm

SHAPES = [(1, 1), (1, 7), (3, 1), (5, 33), (17, 128), (2, 3, 65)]
TOLERANCE = {"float32": 2e-6, "float64": 1e-13}


class Into:
    def __init__(self, views, add):
        self.views, self.add = views, add

    def into(self, name):
        return self.views[name], self.add


def _plain(x, scale, bias, dy):
    x, scale, bias, dy = (a.astype(np.float64) for a in (x, scale, bias, dy))
    mean = x.mean(-1, keepdims=True)
    deviation = np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)
    normal = (x - mean) / deviation
    g = dy * scale
    dx = (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True)) / deviation
    dims = tuple(range(x.ndim - 1))
    return normal * scale + bias, dx, (dy * normal).sum(dims), dy.sum(dims)


def _close(got, want, limit):
    return np.abs(got - want).max() <= limit * (1 + np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_formula(shape, dtype, rng):
    x, dy, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    x += 3
    scale, bias = (rng.standard_normal(shape[-1]).astype(dtype) for _ in range(2))
    parameters = {"n.scale": scale, "n.bias": bias}
    y, dx, dscale, dbias = _plain(x, scale, bias, dy)
    # Rounding of the centred row is divided by its deviation, which is sqrt(EPSILON) in rows of one element.
    limit = TOLERANCE[dtype] * (1 + 1 / np.sqrt(x.var(-1).min() + EPSILON))
    saved, before = Arena().saved(0), (x.copy(), dy.copy())
    operation = LocalNorm()
    assert _close(operation.forward(parameters, "n", x, saved), y, limit)
    views = {name: rng.standard_normal(shape[-1]).astype(dtype) for name in parameters}
    assert _close(operation.backward(parameters, Into(views, False), "n", dy, saved), dx, limit)
    assert _close(views["n.scale"], dscale, limit) and _close(views["n.bias"], dbias, limit)
    want = residual + dx
    assert _close(operation.backward(parameters, Into(views, True), "n", dy, saved, residual), want, limit)
    assert _close(residual, want, limit)
    assert _close(views["n.scale"], 2 * dscale, limit) and _close(views["n.bias"], 2 * dbias, limit)
    assert (x == before[0]).all() and (dy == before[1]).all()


def test_nan_stays_visible(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    x[2, 5] = np.nan
    one = np.ones(64, np.float32)
    y = LocalNorm().forward({"n.scale": one, "n.bias": one}, "n", x, Arena().saved(0))
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()


def _plain_rms(x, scale, dy):
    x, scale, dy = (a.astype(np.float64) for a in (x, scale, dy))
    root = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    normal, g = x / root, dy * scale
    dx = (g - normal * (g * normal).mean(-1, keepdims=True)) / root
    return normal * scale, dx, (dy * normal).sum(tuple(range(x.ndim - 1)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_against_the_formula(shape, dtype, rng):
    x, dy, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    scale = rng.standard_normal(shape[-1]).astype(dtype)
    parameters, limit = {"n.scale": scale}, 5 * TOLERANCE[dtype]
    y, dx, dscale = _plain_rms(x, scale, dy)
    saved, before, operation = Arena().saved(0), (x.copy(), dy.copy()), LocalNorm()
    assert _close(operation.forward(parameters, "n", x, saved, kind="rms"), y, limit)
    views = {"n.scale": rng.standard_normal(shape[-1]).astype(dtype)}
    assert _close(operation.backward(parameters, Into(views, False), "n", dy, saved), dx, limit)
    assert _close(views["n.scale"], dscale, limit)
    want = residual + dx
    assert _close(operation.backward(parameters, Into(views, True), "n", dy, saved, residual), want, limit)
    assert _close(views["n.scale"], 2 * dscale, limit)
    assert (x == before[0]).all() and (dy == before[1]).all()


def test_rms_leaves_nan_visible(rng):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    x[2, 5] = np.nan
    y = LocalNorm().forward({"n.scale": np.ones(64, np.float32)}, "n", x, Arena().saved(0), kind="rms")
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()
