"""Conversions of 16-bit floats, bit for bit: all 16-bit patterns, and float32 values near rounding boundaries."""

import ml_dtypes
import numpy as np
import pytest

from hpcdist.collectives import reduction

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def bits(array):
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def assert_equal_bits(result, expected):
    """Assert equal bits. For an expected NaN, any NaN with the same sign is accepted."""
    wide, nan = result.astype(np.float32), np.isnan(expected.astype(np.float32))
    assert np.array_equal(bits(result)[~nan], bits(expected)[~nan])
    assert np.isnan(wide[nan]).all()
    assert np.array_equal(np.signbit(wide[nan]), np.signbit(expected.astype(np.float32)[nan]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_is_widened_like_numpy(dtype):
    source, result = PATTERNS.view(dtype), np.empty(1 << 16, np.float32)
    reduction.widen_on_host(source, result)
    expected = source.astype(np.float32)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    assert_equal_bits(result, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_survives_a_round_trip(dtype):
    wide, result = np.empty(1 << 16, np.float32), np.empty(1 << 16, dtype)
    reduction.widen_on_host(PATTERNS.view(dtype), wide)
    reduction.round_on_host(result, wide)
    assert_equal_bits(result, PATTERNS.view(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_values_near_rounding_boundaries_are_rounded_like_numpy(dtype):
    finite = np.unique(PATTERNS.view(dtype).astype(np.float32))
    finite = finite[np.isfinite(finite)]
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)  # exact: needs one bit more
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    beyond = largest + (largest - finite[-2]) / 2  # values from here on round to infinity
    cases = np.concatenate([middle, [beyond, -beyond, np.inf, -np.inf, np.float32(3.4e38)]]).astype(np.float32)
    cases = np.concatenate([cases, np.nextafter(cases, np.float32(np.inf)), np.nextafter(cases, np.float32(-np.inf))])
    received = np.empty(cases.size, dtype)
    reduction.round_on_host(received, cases)
    with np.errstate(over="ignore"):
        assert_equal_bits(received, cases.astype(dtype))
    below, above = np.nextafter(beyond, np.float32(0)), beyond
    reduction.round_on_host(received[:2], np.array([below, above]))
    assert received[:2].astype(np.float32).tolist() == [largest, np.inf]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_random_float32_bits_are_rounded_like_numpy(dtype, rng):
    source = rng.integers(0, 1 << 32, 1_000_000, np.uint32).view(np.float32)
    received = np.empty(source.size, dtype)
    reduction.round_on_host(received, source)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_equal_bits(received, source.astype(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_nan_with_a_wide_payload_stays_nan(dtype):
    source = np.array([0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF], np.uint32).view(np.float32)
    received = np.empty(4, dtype)
    reduction.round_on_host(received, source)
    assert np.isnan(received.astype(np.float32)).all()
    assert np.signbit(received.astype(np.float32)).tolist() == [False, True, False, True]
