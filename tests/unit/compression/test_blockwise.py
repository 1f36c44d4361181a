"""Blockwise integers: their float64 definition, their error bound, and unbiased stochastic rounding."""

import numpy as np
import pytest

from harness.compressed.compressors import (
    KEY,
    SMALLEST,
    decode_values,
    difficult_values,
    encode_and_decode,
    encode_values,
)
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.uniform import Blockwise

LEVELS = {8: 127, 4: 7}


def block_scales(given, block):
    """Return the largest magnitude in the block of each value, in float64."""
    starts = range(0, given.size, block)
    return np.concatenate([np.full(part.size, np.abs(part).max()) for part in (given[s : s + block] for s in starts)])


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_errors_are_within_the_bound(bits, rounding):
    compressor = Blockwise(bits=bits, rounding=rounding)
    worst = 0.0
    for name, given in difficult_values().items():
        if not given.size:
            continue
        wide = given.astype(np.float64)
        scales = block_scales(wide, 256)
        step = scales / LEVELS[bits] / (2 if rounding == "nearest" else 1)
        error = np.abs(encode_and_decode(compressor, given) - wide)
        # float32 roundings: the product with 1 / scale, the product with the scale, and subnormal results.
        assert (error <= step * (1 + 2**-14) + scales * 2**-22 + SMALLEST).all(), name
        if name == "uneven":
            worst = (error / step).max()
    assert worst > 0.8  # the bound is tight for this number of levels


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_match_the_definition(bits):
    compressor, levels = Blockwise(bits=bits, block=512), LEVELS[bits]
    given = difficult_values()["uneven"]
    scales = block_scales(given.astype(np.float64), 512)
    want = np.rint(given / scales * levels) / levels * scales
    got = encode_and_decode(compressor, given)
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=0)
    assert (got[np.abs(given) == scales] == given[np.abs(given) == scales]).all()  # the largest is exact


def test_ties_are_rounded_to_even():
    given = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], np.float32)
    np.testing.assert_allclose(encode_and_decode(Blockwise(), given), [127, 0, 2, 2, 0, -2, -2, 126], rtol=3e-7)
    given = np.array([7, 0.5, 1.5, -2.5, 6.5], np.float32)
    np.testing.assert_allclose(encode_and_decode(Blockwise(bits=4), given), [7, 0, 2, -2, 6], rtol=3e-7)


def test_outlier_affects_only_its_block():
    given = np.random.default_rng(3).standard_normal(1024).astype(np.float32)
    spoiled = given.copy()
    spoiled[300] = 1e6
    plain, other = encode_and_decode(Blockwise(), given), encode_and_decode(Blockwise(), spoiled)
    apart = np.flatnonzero(plain != other)
    assert apart.min() >= 256 and apart.max() < 512


@pytest.mark.parametrize("bits", LEVELS)
def test_stochastic_rounding_has_no_bias(bits):
    compressor, draws = Blockwise(bits=bits, rounding="stochastic"), 1500
    given = np.random.default_rng(5).standard_normal(300).astype(np.float32)
    payload = np.empty(compressor.payload_bytes(300), np.uint8)
    total, squares = np.zeros(300), np.zeros(300)
    for draw in range(draws):
        compressor.encode(given, payload, RandomKey(11, draw, 0, 0))
        error = decode_values(compressor, payload, 300).astype(np.float64) - given
        total += error
        squares += error**2
    step = block_scales(given.astype(np.float64), 256) / LEVELS[bits]
    rest = np.abs(given) / step % 1
    variance = step**2 * rest * (1 - rest)
    # Draws depend only on the key, so the test is deterministic: 5 standard deviations of the mean.
    assert (np.abs(total / draws) <= 5 * np.sqrt(variance / draws) + step * 1e-5).all()
    assert (variance <= step**2 / 4).all()
    np.testing.assert_allclose(squares.sum() / draws, variance.sum(), rtol=0.05)


def test_tensors_have_independent_draws():
    compressor = Blockwise(bits=4, rounding="stochastic")
    given = np.random.default_rng(6).standard_normal(4096).astype(np.float32)
    codes = [encode_values(compressor, given, RandomKey(KEY.seed, 1, 0, tensor))[64:] for tensor in range(4)]
    ups = np.array([np.unpackbits(code) for code in codes], float)
    assert len({code.tobytes() for code in codes}) == 4
    assert np.abs(np.corrcoef(ups - ups.mean(axis=0)) + 1 / 3 - np.eye(4) * 4 / 3).max() < 0.1
