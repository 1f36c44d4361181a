"""signSGD: signs, both scales and the best one, and sums in the same order on CPU and GPU."""

import math

import numpy as np
import pytest

from harness.compressed.compressors import LARGEST, difficult_values, encode_and_decode
from hpcdist.compression.sign import SignSgd, magnitude


def test_both_zeros_are_positive():
    given = np.array([0.0, -0.0, 3.0, -1.0], np.float32)
    assert encode_and_decode(SignSgd(), given).tolist() == [1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize("name", [name for name, given in difficult_values().items() if given.size])
def test_signs_and_scale(name):
    given = difficult_values()[name]
    exact = [abs(float(v)) for v in given]
    mean, norm = math.fsum(exact) / given.size, math.sqrt(math.fsum(v * v for v in exact) / given.size)
    signs = np.where(given < 0, -1, 1)
    for scale, want in (("mean", mean), ("norm", norm)):
        assert (encode_and_decode(SignSgd(scale=scale), given) == signs * np.float32(want)).all()


def test_mean_magnitude_is_the_best_scale():
    given = np.random.default_rng(1).standard_normal(400) * 0.01
    given[[3, 99, 250]] = 5.0, -4.0, 3.0
    given = given.astype(np.float32).astype(np.float64)
    signs = np.where(given < 0, -1, 1)
    lost = {
        s: ((encode_and_decode(SignSgd(scale=s), given.astype(np.float32)) - given) ** 2).sum()
        for s in ("mean", "norm")
    }
    others = [((a * signs - given) ** 2).sum() for a in np.linspace(0, 1, 501)]
    whole = (given**2).sum()
    assert lost["mean"] <= min(others) * (1 + 1e-9) and lost["mean"] < whole < lost["norm"]
    np.testing.assert_allclose(lost["mean"], whole - np.abs(given).sum() ** 2 / given.size, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 65536, 65537, 70000])
def test_magnitude_sums_of_every_length_are_exact(n):
    given = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    exact = math.fsum(abs(float(v)) for v in given) / n
    assert magnitude(given, is_norm=False) == np.float32(exact)
    assert magnitude(np.full(n, LARGEST, np.float32), is_norm=True) == np.float32(LARGEST)
