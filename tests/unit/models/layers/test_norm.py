"""Layer and RMS normalisation compared with their plain formulas, within the documented errors."""

import numpy as np
import pytest

from hpcdist.models.arena import Arena
from hpcdist.models.layers.norm import EPSILON, NORMS, LocalNorm

SHAPES = [(0, 5), (1, 1), (1, 7), (3, 1), (5, 33), (17, 128), (2, 3, 65), (300, 1027)]


class Into:
    def __init__(self, views, add):
        self.views, self.add = views, add

    def into(self, name):
        return self.views[name], self.add

    def wants(self, name):
        return name in self.views


def _plain(kind, x, scale, bias, dy):
    """Return y, dx, dscale and dbias, and the error bound of each for one unit of rounding."""
    x, scale, bias, dy = (a.astype(np.longdouble) for a in (x, scale, bias, dy))
    mean = x.mean(-1, keepdims=True) if kind == "layer" else np.zeros_like(x[..., :1])
    deviation = np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)
    normal, far = (x - mean) / deviation, 1 + np.abs(mean) / deviation
    g, dims = dy * scale, tuple(range(x.ndim - 1))
    centred = g - g.mean(-1, keepdims=True) if kind == "layer" else g
    dx = (centred - normal * (g * normal).mean(-1, keepdims=True)) / deviation
    root = np.sqrt((g * g).mean(-1, keepdims=True))
    worst = far * (1 + np.abs(normal))
    values = normal * scale + (bias if kind == "layer" else 0), dx, (dy * normal).sum(dims), dy.sum(dims)
    bounds = (
        4 * worst * np.abs(scale) + 2 * np.abs(bias),
        4 * (far * np.abs(g) + worst * root) / deviation,
        4 * (np.abs(dy) * worst).sum(dims),
        4 * np.abs(dy).sum(dims),
    )
    return values, bounds


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0, 3, 100])
def test_norms_match_the_formula(mean, shape, kind, dtype, rng):
    x, dy, residual = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    x += mean
    scale, bias = (rng.standard_normal(shape[-1]).astype(dtype) for _ in range(2))
    parameters = {"n.scale": scale, "n.bias": bias} if kind == "layer" else {"n.scale": scale}
    (y, dx, *sums), (of_y, of_dx, *of_sums) = _plain(kind, x, scale, bias, dy)
    saved, before, eps = Arena().saved(0), (x.copy(), dy.copy()), np.finfo(dtype).eps
    operation = LocalNorm()
    assert (np.abs(operation.forward(parameters, "n", x, saved, kind=kind) - y) <= eps * of_y).all()
    views = {name: rng.standard_normal(shape[-1]).astype(dtype) for name in parameters}
    got = operation.backward(parameters, Into(views, False), "n", dy, saved, None)
    assert (np.abs(got - dx) <= eps * of_dx).all()
    for view, want, bound in zip(views.values(), sums, of_sums, strict=False):
        assert (np.abs(view - want) <= eps * bound).all()
    want = residual + dx
    got = operation.backward(parameters, Into(views, True), "n", dy, saved, residual)
    assert got is residual and (np.abs(got - want) <= eps * (of_dx + np.abs(want))).all()
    for view, want, bound in zip(views.values(), sums, of_sums, strict=False):
        assert (np.abs(view - 2 * want) <= 2 * eps * bound).all()
    assert (x == before[0]).all() and (dy == before[1]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", NORMS)
def test_non_finite_value_stays_visible_in_its_row(kind, value, rng):
    x, dy = rng.standard_normal((2, 4, 64)).astype(np.float32)
    x[2, 5] = value
    parameters, saved = {name: np.ones(64, np.float32) for name in ("n.scale", "n.bias")}, Arena().saved(0)
    y = LocalNorm().forward(parameters, "n", x, saved, kind=kind)
    assert np.isnan(y[2]).any() and np.isfinite(y[[0, 1, 3]]).all()
    views = {name: np.zeros(64, np.float32) for name in parameters}
    dx = LocalNorm().backward(parameters, Into(views, False), "n", dy, saved, None)
    assert np.isnan(dx[2]).any() and np.isfinite(dx[[0, 1, 3]]).all()


def test_unknown_norm_kind_raises_assertion_error():
    with pytest.raises(AssertionError, match="a norm of the kind 'batch'; there are layer, rms"):
        LocalNorm().forward({}, "n", np.ones((1, 2)), Arena().saved(0), kind="batch")
