"""Conversions of 16-bit floats, bit for bit: every pattern of 16 bits, and float32s where rounding is hardest."""

import ml_dtypes
import numpy as np
import pytest

from hpcdist.collectives import half_precision

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def bits(array):
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def assert_same(found, expected):
    """The same bits; where a NaN is expected, one of its sign."""
    wide, nan = found.astype(np.float32), np.isnan(expected.astype(np.float32))
    assert np.array_equal(bits(found)[~nan], bits(expected)[~nan])
    assert np.isnan(wide[nan]).all()
    assert np.array_equal(np.signbit(wide[nan]), np.signbit(expected.astype(np.float32)[nan]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_is_widened_as_numpy_does(dtype):
    source, found = PATTERNS.view(dtype), np.empty(1 << 16, np.float32)
    half_precision.widen_on_host(source, found)
    expected = source.astype(np.float32)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_survives_the_way_there_and_back(dtype):
    wide, found = np.empty(1 << 16, np.float32), np.empty(1 << 16, dtype)
    half_precision.widen_on_host(PATTERNS.view(dtype), wide)
    half_precision.round_on_host(found, wide)
    assert_same(found, PATTERNS.view(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_lies_half_way_or_a_bit_beside_it_is_rounded_as_numpy_does(dtype):
    finite = np.unique(PATTERNS.view(dtype).astype(np.float32))
    finite = finite[np.isfinite(finite)]
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)  # exact: one bit more
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    beyond = largest + (largest - finite[-2]) / 2  # from here on it is infinite
    cases = np.concatenate([middle, [beyond, -beyond, np.inf, -np.inf, np.float32(3.4e38)]]).astype(np.float32)
    cases = np.concatenate([cases, np.nextafter(cases, np.float32(np.inf)), np.nextafter(cases, np.float32(-np.inf))])
    found = np.empty(cases.size, dtype)
    half_precision.round_on_host(found, cases)
    with np.errstate(over="ignore"):
        assert_same(found, cases.astype(dtype))
    below, above = np.nextafter(beyond, np.float32(0)), beyond
    half_precision.round_on_host(found[:2], np.array([below, above]))
    assert found[:2].astype(np.float32).tolist() == [largest, np.inf]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32s_of_any_bits_are_rounded_as_numpy_does(dtype, rng):
    source = rng.integers(0, 1 << 32, 1_000_000, np.uint32).view(np.float32)
    found = np.empty(source.size, dtype)
    half_precision.round_on_host(found, source)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same(found, source.astype(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_nan_whose_payload_does_not_fit_stays_one(dtype):
    source = np.array([0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF], np.uint32).view(np.float32)
    found = np.empty(4, dtype)
    half_precision.round_on_host(found, source)
    assert np.isnan(found.astype(np.float32)).all()
    assert np.signbit(found.astype(np.float32)).tolist() == [False, True, False, True]
