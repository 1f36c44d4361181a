"""The global norm, the clipping factor, and the search for a tensor that is not finite."""

import math

import numpy as np
import pytest

from harness.inputs import random_store
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import norms

LAYOUT = Layout.of([TensorSpec(0, "a", (9, 7)), TensorSpec(0, "b", (5,)), TensorSpec(1, "a", (70_000,))])
ALL = Range(0, LAYOUT.size)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", BFLOAT16], ids=str)
def test_norm_of_parts_excludes_padding(rng, dtype):
    store = random_store(LAYOUT, rng, np.dtype(dtype))
    expected = sum(np.sum(store.view(s.key).astype(np.float64) ** 2) for s in LAYOUT.segments)
    store.array[63:64] = 1e4  # padding after 0.a
    for parts in range(1, 6):
        got = sum(norms.sum_of_squares(store, part) for part in split(LAYOUT.size, parts, 8))
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16], ids=str)
def test_norm_of_the_largest_values_does_not_overflow(dtype):
    store = FlatStore(LAYOUT, np.dtype(dtype))
    largest = 6e4 if dtype == "float16" else 3e38
    for segment in LAYOUT.segments:
        store.range(segment.range)[...] = largest
    assert norms.sum_of_squares(store, ALL) == pytest.approx(LAYOUT.parameters * largest**2, rel=1e-2)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("size", [1, norms._WIDEN, norms._WIDEN + 1])
def test_norm_of_16_bit_values_is_computed_in_blocks(rng, dtype, size):
    values = rng.standard_normal(size).astype(dtype)
    expected = np.sum(values.astype(np.float64) ** 2)
    assert norms._squares_of_halves(values) == pytest.approx(expected, rel=1e-12)
    values[-1] = np.nan
    assert math.isnan(norms._squares_of_halves(values))


def test_clip_scale_reduces_the_norm_to_the_limit(rng):
    store = random_store(LAYOUT, rng, np.dtype("float64"))
    factor = norms.clip_scale(norms.sum_of_squares(store, ALL), 1.5)
    store.array *= factor
    assert math.sqrt(norms.sum_of_squares(store, ALL)) == pytest.approx(1.5, rel=1e-12)
    assert norms.clip_scale(4.0, 2.0) == 1.0  # at the limit
    assert norms.clip_scale(4.0, 3.0) == 1.0
    assert norms.clip_scale(4.0, 0.0) == 1.0  # off
    assert norms.clip_scale(0.0, 1.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_non_finite_norm_raises(bad, limit):
    with pytest.raises(NonFiniteError, match="must be finite"):
        norms.clip_scale(bad, limit)


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16], ids=str)
def test_first_nonfinite_names_the_tensor(rng, dtype):
    store = random_store(LAYOUT, rng, np.dtype(dtype))
    store.array[63] = np.nan  # padding does not count
    assert norms.first_nonfinite(store, ALL) is None
    store.view("1.a")[69_999] = np.inf
    assert norms.first_nonfinite(store, ALL) == "1.a"
    store.view("0.b")[2] = np.nan
    assert norms.first_nonfinite(store, ALL) == "0.b"
    assert norms.first_nonfinite(store, Range(0, 32)) is None
    assert not math.isfinite(norms.sum_of_squares(store, ALL))
