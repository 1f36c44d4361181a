"""Rotary positions compared with products of complex numbers in float64."""

import numpy as np
import pytest

from hpcdist.errors import ConfigurationError
from hpcdist.models.arena import Arena
from hpcdist.models.config import Rotation
from hpcdist.models.layers.rotary import LocalRotary, rotary_table

BASE = 10000.0


def _bound(x, head_size, rotated):
    """Return the largest documented errors."""
    heads = np.abs(x[..., :rotated]).reshape(*x.shape[:2], -1, 2, head_size // 2)
    pairs = np.broadcast_to(heads.sum(3, keepdims=True), heads.shape).reshape(*x.shape[:2], rotated)
    angles = np.arange(x.shape[1])[:, None] if x.dtype == np.float64 else 0
    return 2 * np.finfo(x.dtype).eps * pairs * (1 + angles)


def _rotated(x, head_size, rotated, sign=1):
    want, half = x.astype(np.float64), head_size // 2
    frequency = BASE ** (-2 * np.arange(half) / head_size)
    turn = np.exp(sign * 1j * np.arange(x.shape[1])[:, None] * frequency)
    for first in range(0, rotated, head_size):
        head = want[..., first : first + head_size]
        turned = (head[..., :half] + 1j * head[..., half:]) * turn
        want[..., first : first + head_size] = np.concatenate([turned.real, turned.imag], axis=-1)
    return want


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("batch", "context", "head_size", "heads", "rest"), [(1, 1, 2, 1, 0), (2, 5, 6, 3, 7), (3, 70, 64, 4, 128)]
)
def test_rotary_matches_complex_multiplication(batch, context, head_size, heads, rest, dtype, rng):
    rotated = heads * head_size
    x = rng.standard_normal((batch, context, rotated + rest)).astype(dtype)
    before, saved = x.copy(), Arena().saved(0)
    got = LocalRotary().forward(x, Rotation(head_size), rotated, saved)
    assert got is x and (x[..., rotated:] == before[..., rotated:]).all()
    wrong = np.abs(got - _rotated(before, head_size, rotated))[..., :rotated]
    assert (wrong <= _bound(before, head_size, rotated)).all()
    dx = rng.standard_normal(x.shape).astype(dtype)
    want, bound = _rotated(dx, head_size, rotated, -1), _bound(dx, head_size, rotated)
    wrong = np.abs(LocalRotary().backward(dx, Rotation(head_size), rotated, saved) - want)[..., :rotated]
    assert (wrong <= bound).all()
    there = _bound(before, head_size, rotated) + 2 * _bound(got, head_size, rotated)
    back = np.abs(LocalRotary().backward(got, Rotation(head_size), rotated, saved) - before)[..., :rotated]
    assert (back <= there).all()


def test_rotary_scores_depend_only_on_the_distance(rng):
    q, k = rng.standard_normal((2, 8))
    x = np.broadcast_to(np.concatenate([q, k]), (1, 300, 16)).copy()
    LocalRotary().forward(x, Rotation(8), 16, Arena().saved(0))
    scores = x[0, :, :8] @ x[0, :, 8:].T
    for distance in (0, 1, 17):
        np.testing.assert_allclose(np.diagonal(scores, distance), scores[0, distance], atol=1e-12)


def test_longer_context_has_the_same_first_angles(rng):
    short = rotary_table(3, Rotation(10), rng.standard_normal(1)).copy()
    for context in (4, 9, 100):
        assert (rotary_table(context, Rotation(10), rng.standard_normal(1))[:3] == short).all()
    assert (rotary_table(3, Rotation(10), rng.standard_normal(1)) == short).all()


def test_odd_head_size_is_rejected():
    with pytest.raises(ConfigurationError, match=r"need an even head size, got 3; set model\.head_size"):
        LocalRotary().forward(np.zeros((1, 2, 6)), Rotation(3), 6, Arena().saved(0))


def test_nan_stays_visible():
    x = np.ones((1, 4, 4), np.float32)
    x[0, 2, 1] = np.nan
    LocalRotary().forward(x, Rotation(4), 4, Arena().saved(0))
    assert (np.isnan(x) == [[[0] * 4, [0] * 4, [0, 1, 0, 1], [0] * 4]]).all()
