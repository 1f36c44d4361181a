"""Adaptive levels: never worse than equal spacing for the counted values, and much better for heavy tails."""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from harness.compressed.compressors import (
    decode_values,
    difficult_values,
    encode_and_decode,
    encode_values,
    student_t_values,
)
from hpcdist.compression.adaptive import BINS, HEAD_BYTES, LEVELS, Adaptive, fit_levels, spacing, tables
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.uniform import Blockwise

DISTRIBUTIONS = {
    "Student's t, 2 degrees": (student_t_values, 0.3),
    "Student's t, 4 degrees": (lambda n, seed: np.random.default_rng(seed).standard_t(4, n), 0.5),
    "Laplace": (lambda n, seed: np.random.default_rng(seed).laplace(size=n), 0.6),
    "log-normal, sigma 2": (lambda n, seed: np.exp(2 * np.random.default_rng(seed).standard_normal(n)), 0.3),
    "normal": (lambda n, seed: np.random.default_rng(seed).standard_normal(n), 0.8),
}


def rounding_variance(counts, levels):
    """Return the sum of (b - r)(r - a) over the counted magnitudes. r is a bin's centre, a and b its levels."""
    at, centres, _ = tables(np)
    place = np.clip(np.searchsorted(levels, centres, side="right") - 1, 0, LEVELS - 1)
    assert np.isin(levels, at).all()
    return (counts * (levels[place + 1] - centres) * (centres - levels[place])).sum()


def even_levels():
    at, _, evenly = tables(np)
    np.testing.assert_allclose(at[evenly], np.arange(LEVELS + 1) / LEVELS, atol=0.016)
    return at[evenly]


@drawn(st.integers(0, 10**9), st.integers(0, 400), st.integers(1, 60))
@pytest.mark.full
def test_levels_are_never_worse_than_equally_spaced_ones(seed, peak, width):
    rng = np.random.default_rng(seed)
    counts = np.zeros(BINS, np.uint32)
    np.add.at(counts, np.clip(rng.normal(peak, width, 3000), 0, BINS - 1).astype(int), 1)
    counts[rng.integers(0, BINS, 3)] += 1000
    levels = fit_levels(counts).astype(np.float64)
    assert levels[0] == 0 and levels[-1] == 1 and (np.diff(levels) > 0).all()
    assert rounding_variance(counts, levels) <= rounding_variance(counts, even_levels()) * (1 + 1e-9)


def test_no_level_can_be_moved_to_reduce_the_variance():
    at, _, _ = tables(np)
    counts = np.random.default_rng(1).integers(0, 50, BINS).astype(np.uint32)
    levels = fit_levels(counts).astype(np.float64)
    least = rounding_variance(counts, levels)
    for j in range(1, LEVELS):
        for edge in at[(at > levels[j - 1]) & (at < levels[j + 1])]:
            moved = levels.copy()
            moved[j] = edge
            assert rounding_variance(counts, moved) >= least * (1 - 2e-3), (j, edge)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.full
def test_error_is_below_equal_spacing_with_the_same_bits(name):
    draw, most = DISTRIBUTIONS[name]
    uniform = Blockwise(bits=4, rounding="stochastic")
    for seed in range(3):
        given = draw(20_000, seed).astype(np.float32)
        errors = [((encode_and_decode(c, given) - given.astype(np.float64)) ** 2).sum() for c in (Adaptive(), uniform)]
        assert errors[0] < most * errors[1], (name, seed, errors[0] / errors[1])
    assert Adaptive().payload_bytes(20_000) == uniform.payload_bytes(20_000) + HEAD_BYTES


def test_adaptive_rounding_has_no_bias():
    compressor, draws = Adaptive(), 1500
    given = student_t_values(300, 9)
    payload = np.empty(compressor.payload_bytes(300), np.uint8)
    total = np.zeros(300)
    for draw in range(draws):
        compressor.encode(given, payload, RandomKey(3, draw, 0, 0))
        total += decode_values(compressor, payload, 300).astype(np.float64) - given
    levels = payload[:HEAD_BYTES].view(np.float32).astype(np.float64)
    scales = np.repeat(payload[HEAD_BYTES : HEAD_BYTES + 8].view(np.float32), 256)[:300].astype(np.float64)
    r = np.abs(given) / scales
    place = np.clip(np.searchsorted(levels, r, side="right") - 1, 0, LEVELS - 1)
    variance = scales**2 * (levels[place + 1] - r) * (r - levels[place])
    # Draws depend only on the key, so the test is deterministic: 5 standard deviations of the mean.
    assert (np.abs(total / draws) <= 5 * np.sqrt(np.maximum(variance, 0) / draws) + scales * 1e-5).all()


def test_value_is_rounded_to_an_adjacent_level():
    for name, given in difficult_values().items():
        if not given.size:
            continue
        payload = encode_values(Adaptive(), given)
        levels = payload[:HEAD_BYTES].view(np.float32).astype(np.float64)
        count = -(-given.size // 256)
        scales = np.repeat(payload[HEAD_BYTES : HEAD_BYTES + 4 * count].view(np.float32), 256)[: given.size]
        scales = scales.astype(np.float64)
        r = np.abs(given.astype(np.float64)) / np.where(scales > 0, scales, 1)
        place = np.clip(np.searchsorted(levels, r * (1 + 1e-6), side="right") - 1, 0, LEVELS - 1)
        gap = (levels[place + 1] - levels[place]) * scales
        error = np.abs(decode_values(Adaptive(), payload, given.size) - given.astype(np.float64))
        assert (error <= gap * (1 + 1e-5) + scales * 1e-6 + 2.0**-149).all(), name


def test_blocks_of_large_values_determine_the_levels():
    """Blocks of tiny values must not move the levels away from the blocks that dominate the error."""
    loud, quiet = student_t_values(128 * 256, 4), np.linspace(-1e-4, 1e-4, 128 * 256, dtype=np.float32)
    together = np.concatenate([quiet, loud])
    levels = [encode_values(Adaptive(), part)[:HEAD_BYTES].view(np.float32)[1:-1] for part in (loud, quiet, together)]
    np.testing.assert_allclose(levels[2], levels[0], rtol=0.05)
    assert (levels[1] > 1.5 * levels[0]).any()


def test_histogram_sample_is_bounded_and_spread():
    for rows, block in ((1, 256), (255, 256), (256, 256), (257, 256), (10**6, 256), (10, 1 << 20)):
        counted = len(range(0, rows, spacing(rows, block)))
        assert counted * block <= max(1 << 16, block) and counted >= 1


def test_gpu_samples_the_same_blocks(gpu):
    given = student_t_values(300 * 256 + 5, 8)
    compressor = Adaptive()
    want = encode_values(compressor, given)
    payload = gpu.empty(want.size, np.uint8)
    compressor.encode(gpu.asarray(given), payload, RandomKey(0x123456789ABCDEF, 17, 3, 5))
    assert payload.get().tobytes() == want.tobytes()
