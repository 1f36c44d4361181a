"""Softmax over tiles of rows, causal and full, compared with the plain float64 formula."""

import numpy as np
import pytest

from hpcdist.models.attention import kernels
from hpcdist.models.attention.tiles import band
from stubs.gpu import host_kernels

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
PAIRS, BEFORE, SCALE = 3, 2, 0.3  # the pairs of the tiles follow BEFORE other pairs
ALL = band(0, 0, causal=False)


@pytest.fixture(params=["loops", "kernels"])
def functions(request, monkeypatch):
    """The compiled loops, and the kernels of a GPU, both on numpy memory."""
    if request.param == "kernels":
        host_kernels.install(monkeypatch, kernels)
    return kernels.softmax_advance, kernels.softmax_gradient


def _plain(x, causal, window=0):
    rows = x.astype(np.float64) * SCALE
    behind = np.arange(x.shape[1])[:, None] - np.arange(x.shape[2])[None, :]
    if causal:
        rows = np.where((behind < 0) | (behind >= (window or x.shape[2])), -np.inf, rows)
    e = np.exp(rows - rows.max(2, keepdims=True))
    return e / e.sum(2, keepdims=True)


def _forward(advance, x, causal, rows, columns, window=0):
    """Return the probabilities and (top, total) of square x, computed in tiles of ``rows`` x ``columns``."""
    count = x.shape[1]
    top, total = np.full((2, BEFORE + PAIRS, count), 7, x.dtype)
    p = np.zeros(x.shape)
    for first in range(0, count, rows):
        last = min(first + rows, count)
        shrink = np.ones((PAIRS, last - first), x.dtype)
        stop = last if causal else count
        for start in range(0, stop, columns):
            end = min(start + columns, stop)
            tile = x[:, first:last, start:end].copy()
            seen = band(first - start, window, causal=causal)
            advance(tile, (BEFORE, first, *seen, start == 0), SCALE, top, total, shrink)
            if start:
                p[:, first:last, :start] *= shrink[..., None]
            p[:, first:last, start:end] = tile
    assert (top[:BEFORE] == 7).all() and (total[:BEFORE] == 7).all()
    return p / total[BEFORE:, :, None], top, total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 1), (True, 7)])
@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (9, 4, 8), (65, 16, 64), (70, 64, 64), (33, 33, 33)])
def test_tiled_softmax_matches_the_formula(count, rows, columns, causal, window, dtype, functions, rng):
    """With a window, rows see nothing of some tiles, including the first tile."""
    advance, gradient = functions
    x = (20 * rng.standard_normal((PAIRS, count, count))).astype(dtype)
    p, top, total = _forward(advance, x, causal, rows, columns, window)
    want = _plain(x, causal, window)
    assert np.abs(p - want).max() <= 20 * TOLERANCE[dtype]
    d = rng.standard_normal(x.shape).astype(dtype)
    dots = np.zeros((BEFORE + PAIRS, count), dtype)
    dots[BEFORE:] = (want * d).sum(2)
    expected = want * (d - (want * d).sum(2, keepdims=True)) * SCALE
    for first in range(0, count, rows):
        for start in range(0, min(first + rows, count) if causal else count, rows):
            part = np.s_[:, first : first + rows, start : start + rows]
            s, g = x[part].copy(), d[part].copy()
            seen = band(first - start, window, causal=causal)
            gradient(s, g, (BEFORE, first, *seen, False), SCALE, top, total, dots)
            assert np.abs(s - want[part]).max() <= 20 * TOLERANCE[dtype]
            assert np.abs(g - expected[part]).max() <= 20 * TOLERANCE[dtype] * (1 + np.abs(d).max())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 5, 99])
def test_non_finite_rows_give_nan(column, bad, functions, rng):
    advance, gradient = functions
    x = rng.standard_normal((1, 4, 100)).astype(np.float32)
    x[0, 2, column] = bad
    top, total = np.zeros((2, 1, 4), np.float32)
    advance(x, (0, 0, *ALL, True), 1.0, top, total, np.empty((1, 4), np.float32))
    assert np.isnan(total[0, 2]) and np.isfinite(total[0, [0, 1, 3]]).all() and np.isfinite(x[0, [0, 1, 3]]).all()
    d = np.ones_like(x)
    gradient(x, d, (0, 0, *ALL, True), 1.0, top, total, np.ones((1, 4), np.float32))
    assert np.isnan(x[0, 2]).all() and np.isnan(d[0, 2]).all() and np.isfinite(d[0, [0, 1, 3]]).all()


def test_huge_scores_do_not_overflow():
    x = np.array([[[3e38, -3e38, 3e38]]], np.float32)
    top, total = np.zeros((2, 1, 1), np.float32)
    kernels.softmax_advance(x, (0, 0, *ALL, True), 1.0, top, total, np.empty((1, 1), np.float32))
    assert (x == np.float32([1, 0, 1])).all() and total == 2 and top == np.float32(3e38)


def test_masked_elements_are_ignored(rng):
    x = rng.standard_normal((1, 8, 8))
    x[0, 3, 5:] = np.nan
    top, total = np.zeros((2, 1, 8))
    kernels.softmax_advance(x, (0, 0, *band(0, 0, causal=True), True), 1.0, top, total, np.empty((1, 8)))
    assert np.isfinite(x).all() and (x[0, 3, 4:] == 0).all() and np.isfinite(total).all()
