"""Row softmax in place, causal and full, against the plain float64 formula."""

import numpy as np
import pytest

from hpcdist.models import device, softmax

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}


def _plain(x, valid, scale):
    rows = np.where(np.arange(x.shape[2])[None] < valid[:, None], x.astype(np.float64) * scale, -np.inf)
    e = np.exp(rows - rows.max(2, keepdims=True))
    return e / e.sum(2, keepdims=True), e.sum(2)


@pytest.fixture(params=["kernel", "array"])
def functions(request):
    """The compiled kernels, and the array expressions that a GPU uses, here on numpy."""
    if request.param == "kernel":
        return softmax.shift, softmax.normalise, softmax.softmax_backward
    return device.shift, device.normalise, device.softmax_backward


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "first", "last"), [(1, 1, 0, 1), (9, 9, 3, 7), (65, 65, 0, 65), (3, 257, 0, 3)]
)
def test_against_the_formula(rows, columns, first, last, causal, dtype, functions, rng):
    shift, normalise, backward = functions
    width = min(columns, last) if causal else columns
    ahead = 0 if causal else width
    x, d = ((20 * rng.standard_normal((3, rows, columns))).astype(dtype) for _ in range(2))
    valid = np.minimum(np.arange(rows) + 1, columns) if causal else np.full(rows, columns)
    p, sums = _plain(x, valid, 0.3)
    part = slice(first, last)
    outside = x[:, :, width:].copy(), x[:, :first].copy(), x[:, last:].copy()
    got, got_sums = x.copy(), np.zeros((3, rows), dtype)
    shift(got, first, last, width, ahead, 0.3)
    np.exp(got[:, part, :width], out=got[:, part, :width])
    normalise(got, first, last, width, got_sums)
    assert np.abs(got[:, part, :width] - p[:, part, :width]).max() <= 20 * TOLERANCE[dtype]
    np.testing.assert_allclose(got_sums[:, part], sums[:, part], rtol=100 * TOLERANCE[dtype])
    for now, then in zip((got[:, :, width:], got[:, :first], got[:, last:]), outside, strict=True):
        assert (now == then).all()
    p, g = got[:, part, :width].astype(np.float64), d[:, part, :width].astype(np.float64)
    want = p * (g - (p * g).sum(2, keepdims=True)) * 0.3
    backward(got, d, first, last, width, 0.3)
    assert np.abs(d[:, part, :width] - want).max() <= TOLERANCE[dtype] * (1 + np.abs(g).max())


@pytest.mark.parametrize("column", [0, 5, 99])
def test_nan_stays_visible(column, rng):
    x = rng.standard_normal((1, 4, 100)).astype(np.float32)
    x[0, 2, column] = np.nan
    softmax.shift(x, 0, 4, 100, 100, 1.0)
    np.exp(x, out=x)
    softmax.normalise(x, 0, 4, 100, np.empty((1, 4), np.float32))
    assert np.isnan(x[0, 2]).all() and np.isfinite(x[0, [0, 1, 3]]).all()


def test_huge_scores_do_not_overflow():
    x = np.array([[[3e38, -3e38, 3e38]]], np.float32)
    softmax.shift(x, 0, 1, 3, 3, 1.0)
    np.exp(x, out=x)
    softmax.normalise(x, 0, 1, 3, np.empty((1, 1), np.float32))
    assert (x == np.float32([0.5, 0, 0.5])).all()
