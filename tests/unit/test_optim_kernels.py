"""The loops and their ufunc twins against plain formulas, and the rounding to bfloat16 on awkward bits."""

import numpy as np
import pytest

from hpcdist.arrays import jit
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.optim import kernels


@pytest.fixture(params=["numba", "ufuncs"], autouse=True)
def path(request, monkeypatch):
    if request.param == "ufuncs":
        monkeypatch.setattr(kernels, "is_device", lambda array: True)


def awkward_bits(rng):
    edges = np.array(
        [
            *(0x0, 0x80000000, 0x1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF),
            *(0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF7FFFFF, 0x7F7F7FFF),
            0x7F7F8000,
        ],
        np.uint32,
    )
    return np.concatenate([edges, rng.integers(0, 2**32, 100_000, dtype=np.uint32)])


def test_bfloat16_rounds_to_nearest_even(rng):
    master = awkward_bits(rng).view(np.float32)
    working = np.zeros(master.size, BFLOAT16)
    kernels.round_into(master, working)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = master.astype(BFLOAT16)
    nan = np.isnan(master)
    assert np.array_equal(working.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(working[nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
def test_sums_of_16_bit_numbers_are_rounded_once(rng, dtype):
    held = (rng.standard_normal(1003) * 10.0 ** rng.integers(-6, 5, 1003)).astype(dtype)
    addend = (rng.standard_normal(1003) * 10.0 ** rng.integers(-6, 5, 1003)).astype(np.float32)
    kept = addend.copy()
    with np.errstate(over="ignore"):
        expected = (held.astype(np.float32) + addend).astype(dtype)
    kernels.add_rounded(held, addend)
    assert held.tobytes() == expected.tobytes() and addend.tobytes() == kept.tobytes()
    wide = np.zeros(1003, np.float32)
    kernels.widen(held, wide)
    assert wide.tobytes() == held.astype(np.float32).tobytes()


@pytest.mark.filterwarnings("error")
def test_what_is_beyond_float16_becomes_infinite():
    working = np.zeros(4, np.float16)
    kernels.round_into(np.array([65519, 65520, -1e9, 1e-8], np.float32), working)
    assert working.tolist() == [65504, np.inf, -np.inf, 0]
    kernels.add_rounded(working, np.array([65504, 0, 0, 1], np.float32))
    assert working.tolist() == [np.inf, np.inf, -np.inf, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_sum_of_squares(rng, dtype, size):
    values = rng.standard_normal(size).astype(dtype)
    got = float(kernels.sum_of_squares(values))
    assert got == pytest.approx(np.sum(values.astype(np.float64) ** 2), rel=1e-14)


def test_sum_of_squares_neither_overflows_nor_underflows_in_float32():
    values = np.array([3e30, 4e30, 1e-30], np.float32)
    assert float(kernels.sum_of_squares(values)) == pytest.approx(2.5e61, rel=1e-6)
    assert float(kernels.sum_of_squares(values[2:])) == pytest.approx(1e-60, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sum_of_squares_keeps_nonfinite_values_visible(bad):
    values = np.ones(9, np.float32)
    values[4] = bad
    assert not np.isfinite(float(kernels.sum_of_squares(values)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_direction_of_adam_in_its_dtype(rng, dtype):
    w, g, m, v = (rng.standard_normal(1001).astype(dtype) for _ in range(4))
    v **= 2
    before = [x.astype(np.float64) for x in (w, g, m, v)]
    options = dict(scale=0.3, beta1=0.9, beta2=0.99, epsilon=1e-8, decay=0.1, count=3)
    kernels.adam_direction(w, g, m, v, **options)
    g64 = 0.3 * before[1]
    m64, v64 = 0.9 * before[2] + 0.1 * g64, 0.99 * before[3] + 0.01 * g64**2
    u64 = (m64 / (1 - 0.9**3)) / (np.sqrt(v64 / (1 - 0.99**3)) + 1e-8) + 0.1 * before[0]
    tolerance = 2e-5 if dtype is np.float32 else 1e-13
    for got, expected in ((w, before[0]), (m, m64), (v, v64), (g, u64)):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_kernels_write_through_views_and_nothing_beside_them(rng):
    whole = rng.standard_normal((4, 30)).astype(np.float32)
    before = whole.copy()
    w, g, v, _ = (row[7:20] for row in whole)
    kernels.momentum_direction(w, g, v, scale=1.0, momentum=0.5, nesterov=True, decay=0.0)
    kernels.descend(w, g, 0.1)
    kernels.descend_with_velocity(w, g, v, rate=0.1, momentum=0.5, decay=0.2)
    assert np.array_equal(whole[:, :7], before[:, :7]) and np.array_equal(whole[:, 20:], before[:, 20:])
    assert np.array_equal(whole[3], before[3])
    fast = 0.5 * before[2, 7:20] + before[1, 7:20]
    step = before[1, 7:20] + 0.5 * fast
    moved = before[0, 7:20] - 0.1 * step
    fast2 = 0.5 * fast + 0.1 * (step + 0.2 * moved)
    np.testing.assert_allclose(g, step, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(v, fast2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(w, moved - fast2, rtol=1e-5, atol=1e-6)


def test_samples_are_of_the_types_that_training_uses(rng):
    """`hpcdist warmup` must leave nothing to compile for a float32 or float64 master."""
    mine = [k for k in jit._kernels if k.function.__module__ == kernels.__name__]
    assert len(mine) == 7
    for kernel in mine:
        for arguments in kernel._samples:
            kernel(*arguments())
    compiled = {k.__name__: len(k.compiled.signatures) for k in mine}
    for dtype in (np.float32, np.float64):
        w, g, m, v = (rng.random(33).astype(dtype)[1:17] for _ in range(4))
        kernels.adam_direction(w, g, m, v, scale=1.0, beta1=0.9, beta2=0.9, epsilon=1e-8, decay=0.0, count=1)
        kernels.momentum_direction(w, g, m, scale=1.0, momentum=0.9, nesterov=False, decay=0.0)
        kernels.descend(w, g, 1e-3)
        kernels.descend_with_velocity(w, g, m, rate=0.1, momentum=0.9, decay=0.0)
        kernels.sum_of_squares(w)
        kernels.round_into(w, np.zeros(16, BFLOAT16))
    assert {k.__name__: len(k.compiled.signatures) for k in mine} == compiled
