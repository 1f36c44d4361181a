"""exp and the order of floats in compiled loops, over their whole range."""

import numpy as np
import pytest

from hpcdist.models.layers.vector_math import row_maximum, write_exponentials

BOUNDS = {"float32": 1e-7, "float64": 3e-16}
RANGES = {"float32": (-87.3, 88.0), "float64": (-708.3, 709.0)}


def _exp(values, dtype):
    x = np.array(values, dtype)
    y = np.empty_like(x)
    write_exponentials(x, y)
    return x, y


@pytest.mark.parametrize("dtype", BOUNDS)
def test_exp_error_is_within_the_documented_bound(dtype, rng):
    low, high = RANGES[dtype]
    spread = rng.uniform(low, high, 200_001), rng.standard_normal(100_003) * 0.4, np.linspace(low, high, 5001)
    x, y = _exp(np.concatenate(spread), dtype)
    want = np.exp(x.astype(np.longdouble))
    inside = (x >= low) & (x <= high)
    assert (np.abs(y - want) / want)[inside].max() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_exp_outside_its_range_gives_0_inf_or_nan(dtype):
    low, high = RANGES[dtype]
    _, y = _exp([0, -0.0, 1.001 * low, -np.inf, np.finfo(dtype).min, 1.001 * high + 1, np.inf, np.nan, -np.nan], dtype)
    assert (y[:2] == 1).all() and (y[2:5] == 0).all() and (y[5:7] == np.inf).all() and np.isnan(y[7:]).all()


@pytest.mark.parametrize("size", [1, 2, 15, 64, 1001])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_row_maximum_equals_the_numpy_maximum(dtype, size, rng):
    for scale in (1e-30, 1.0, 1e30):
        x = (scale * rng.standard_normal(size)).astype(dtype)
        for row in (x, -np.abs(x), np.where(x > 0, x, dtype == "float32").astype(dtype)):
            assert row_maximum(row) == row.max()
    x[size // 2] = -np.inf
    assert row_maximum(x) == x.max()
    x[size // 3] = np.inf
    assert row_maximum(x) == np.inf
