"""Exact sums of squares: the float64 nearest to the true sum for any order and split; updates for any split."""

import math
from fractions import Fraction

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import UsageError
from hpcdist.optim import exact, kernels, norms, optimizer
from hpcdist.optim.config import OptimizerConfig

DTYPES = (np.float32, np.float64)


def digits_of(values):
    digits = exact.zeros()
    exact.add_squares(values, digits)
    return digits


def random(rng, dtype, size):
    """Return numbers of any magnitude, including subnormal numbers and zeros. Squares of float64 stay in range."""
    low, high = (-46, 38) if dtype == np.float32 else (-160, 153)
    values = rng.standard_normal(size) * 10.0 ** rng.uniform(low, high, size)
    largest = np.finfo(dtype).max  # no draw becomes infinite in ``dtype``
    return np.where(rng.random(size) < 0.1, 0.0, np.clip(values, -largest, largest)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.full_except("float32")
def test_sum_is_rounded_once_for_any_order_and_split(dtype, rng):
    for _ in range(300):
        values = random(rng, dtype, int(rng.integers(0, 200)))
        squares = values.astype(np.float64) ** 2
        expected = math.fsum(squares)
        assert expected == float(sum(map(Fraction, squares.tolist())))
        assert float(exact.rounded(digits_of(values))) == expected
        cuts = np.sort(rng.integers(0, values.size + 1, int(rng.integers(0, 9))))
        parts = np.split(rng.permutation(values), cuts)
        assert float(exact.rounded(sum(map(digits_of, parts), exact.zeros()))) == expected  # as ranks add them up
        one_by_one = exact.zeros()
        for part in parts:
            exact.add_squares(part, one_by_one)
        assert float(exact.rounded(one_by_one)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_do_not_overflow_a_digit(dtype):
    value = dtype(1) - np.finfo(dtype).epsneg  # all bits of the mantissa
    digits = digits_of(np.full(300_000, value))
    assert (digits >= 0).all() and (digits < 1 << 32).all()
    assert float(exact.rounded(digits)) == float(300_000 * Fraction(float(np.float64(value) ** 2)))


@cases(
    "values, expected",
    ([], 0.0),
    ([0.0, -0.0], 0.0),
    ([5e-324], 0.0),
    ([2.0**-537], 2.0**-1074),
    ([1.3e154] * 2, math.inf),  # though each square is finite
    ([1.3e154], 1.3e154**2),
    ([math.inf, 1.0], math.inf),
    ([-math.inf], math.inf),
    ([math.nan, math.inf], math.nan),
    ([1e200], math.inf),
)
def test_sums_at_the_ends_of_the_range(values, expected):
    np.testing.assert_equal(float(exact.rounded(digits_of(np.array(values)))), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_non_finite_element_is_detected(dtype, bad, rng):
    values = rng.standard_normal(70_001).astype(dtype)
    values[66_000] = bad
    digits = digits_of(values)
    np.testing.assert_equal(float(exact.rounded(digits)), np.nan if np.isnan(bad) else np.inf)
    assert digits[exact.NAN] + digits[exact.INFINITE] == 1


def test_16_bit_values_are_rejected():
    with pytest.raises(UsageError, match="float16; convert the array"):
        exact.add_squares(np.ones(3, np.float16), exact.zeros())


def test_exact_sums_exclude_padding(rng):
    layout = Layout.of([TensorSpec(0, "a", (5,)), TensorSpec(0, "b", (7,))])
    store = FlatStore(layout, np.dtype(np.float32))
    store.array[...] = np.nan
    for segment, where in store.tensors():
        store.range(where)[...] = rng.standard_normal(segment.range.size)
    whole = Range(0, layout.size)
    digits = norms.exact_squares(store, [whole])
    expected = math.fsum(np.float64(x) ** 2 for _, where in store.tensors() for x in store.range(where))
    assert float(exact.rounded(digits)) == expected == pytest.approx(norms.sum_of_squares(store, [whole]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "sgd"])
def test_update_in_pieces_has_the_bits_of_the_whole_update(dtype, name, rng):
    layout = Layout.of([TensorSpec(0, "a", (37, 11)), TensorSpec(0, "b", (53,), adapted=False)])
    config = OptimizerConfig(name=name, weight_decay=0.1)
    start, gradients = rng.standard_normal(layout.size), rng.standard_normal((3, layout.size))

    def weights(cuts):
        rule = optimizer.build(config, layout, Range(0, layout.size), np.dtype(dtype), total_steps=9)
        rule.sum_exactly()
        master, gradient = FlatStore(layout, np.dtype(dtype)), FlatStore(layout, np.dtype(dtype))
        master.array[...] = start
        pieces = [Range(a, b) for a, b in zip([0, *cuts], [*cuts, layout.size], strict=True)]
        for values in gradients:
            gradient.array[...] = values
            rule.begin_step()
            for piece in pieces:
                rule.direction(piece, master, gradient, 0.37)
            norms = exact.rounded(rule.partial_norms()) if rule.needs_norms else None
            for piece in pieces:
                rule.apply(piece, master, gradient, None, norms)
        return b"".join(master.range(where).tobytes() for _, where in master.tensors())

    expected = weights([])
    for _ in range(20):
        cuts = sorted(rng.integers(0, layout.size + 1, int(rng.integers(1, 12))).tolist())
        assert weights(cuts) == expected, f"cut at {cuts}"


def test_exact_sum_agrees_with_the_rounded_sum(rng):
    values = rng.standard_normal(10_000).astype(np.float32)
    assert float(exact.rounded(digits_of(values))) == pytest.approx(kernels.sum_of_squares(values), rel=1e-12)
