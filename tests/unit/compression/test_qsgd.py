"""QSGD: no bias, the variance of the fractions, the bound of the paper, and the levels."""

import numpy as np
import pytest

from harness.compressed.compressors import decode_values, difficult_values, encode_and_decode
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.uniform import Qsgd

DRAWS = 1500
SHAPES = {
    "normal": np.random.default_rng(1).standard_normal(600),
    "heavy tails": np.random.default_rng(2).standard_t(2, 600),
    "all alike": np.full(512, 0.3),
    "one of many": np.eye(1, 512, 77).reshape(-1) * 4,
    "a few": np.random.default_rng(3).standard_normal(5),
    "huge": np.random.default_rng(4).choice([-1, 1], 300) * 3e38,
}


def bucket_norms(given, bucket):
    parts = [given[start : start + bucket] for start in range(0, given.size, bucket)]
    return np.concatenate([np.full(part.size, np.linalg.norm(part)) for part in parts])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_and_variance_match_theory(bits, shape):
    compressor = Qsgd(bits=bits, bucket=256)
    given = SHAPES[shape].astype(np.float32)
    wide = given.astype(np.float64)
    payload = np.empty(compressor.payload_bytes(given.size), np.uint8)
    total, squares = np.zeros(given.size), np.zeros(given.size)
    for draw in range(DRAWS):
        compressor.encode(given, payload, RandomKey(0xABCDEF, draw, 1, 2))
        error = decode_values(compressor, payload, given.size) - wide
        total += error
        squares += error**2
    step = np.minimum(bucket_norms(wide, 256), np.finfo(np.float32).max) / compressor.levels
    rest = np.abs(wide) / np.where(step > 0, step, 1) % 1
    variance = step**2 * rest * (1 - rest)
    # Draws depend only on the key, so the test is deterministic: 5 standard deviations of the mean.
    assert (np.abs(total / DRAWS) <= 5 * np.sqrt(variance / DRAWS) + step * 1e-5).all()
    if variance.sum() > 1e-6 * (wide**2).sum():
        np.testing.assert_allclose(squares.sum() / DRAWS, variance.sum(), rtol=0.1)
    # The bound of the paper for each bucket: for the measured and for the computed variance.
    for start in range(0, given.size, 256):
        part = slice(start, start + 256)
        n, s = wide[part].size, compressor.levels
        bound = min(n / s**2, n**0.5 / s) * (wide[part] ** 2).sum()
        assert squares[part].sum() / DRAWS <= bound and variance[part].sum() <= bound


def test_values_are_rounded_to_multiples_of_the_norm():
    compressor = Qsgd(bits=4, bucket=256)
    for given in difficult_values().values():
        if not given.size:
            continue
        norms = np.minimum(bucket_norms(given.astype(np.float64), 256), np.finfo(np.float32).max)
        got = encode_and_decode(compressor, given) / np.where(norms > 0, norms, 1) * 7
        exact = norms > 1e-30  # smaller multiples of the norm are rounded as subnormals
        assert np.abs(got - np.rint(got))[exact].max(initial=0) < 1e-5
        assert np.abs(got)[exact].max(initial=0) <= 7 * (1 + 1e-6)


def test_signs_are_kept():
    given = SHAPES["normal"].astype(np.float32)
    got = encode_and_decode(Qsgd(bits=8), given)
    assert (got * given >= 0).all() and (got != 0).any()
