"""Random-k: equal keys give equal indices, all indices are equally likely, and payloads may be summed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.arrays import backend
from hpcdist.compression import randomk
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.randomk import RandomK
from hpcdist.errors import ConfigurationError, UsageError


def encode(compressor, values, key):
    payload = np.full(compressor.payload_bytes(values.size), 0xFF, np.uint8)
    compressor.encode(values, payload, key)
    return payload


@given(st.integers(1, 5000), st.floats(1e-4, 1), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_indices_are_distinct_and_in_range(n, density, seed, step):
    payload = encode(RandomK(density=density), np.zeros(n, np.float32), RandomKey(seed, step, 0, 3))
    where = randomk.indices(payload, n)
    assert where.min() >= 0 and where.max() < n and np.unique(where).size == where.size
    assert (np.diff(where) < 0).sum() <= 1  # ascending, with at most one wrap-around


def test_payload_bytes_and_round_trip(rng):
    values = rng.standard_normal(1000).astype(np.float32)
    out = np.full(1000, np.nan, np.float32)
    for compressor, scale in ((RandomK(density=0.03), 1000 / 30), (RandomK(density=0.03, scaled=False), 1)):
        payload = encode(compressor, values, RandomKey(1, 2, 0, 3))
        assert payload.size == 16 + 4 * 30 and compressor.payload_bytes(0) == 0
        compressor.decode(payload, out)
        where = randomk.indices(payload, 1000)
        expected = np.zeros(1000)
        expected[where] = values[where].astype(np.float64) * scale
        np.testing.assert_allclose(out, expected, rtol=2e-7)
        compressor.add(payload, out, -0.5)
        np.testing.assert_allclose(out, expected / 2, rtol=4e-7)
    everything = RandomK(density=1.0)
    everything.decode(encode(everything, values, RandomKey(1, 2, 0, 3)), out)
    assert np.array_equal(out, values)
    empty = np.empty(0, np.float32)
    everything.decode(encode(everything, empty, RandomKey(1, 2, 0, 3)), empty)


def test_payloads_of_all_ranks_may_be_summed(rng):
    compressor, key = RandomK(density=0.1), RandomKey(5, 6, 0, 7)
    ranks = [rng.integers(-100, 100, 640).astype(np.float32) for _ in range(5)]  # sums of whole numbers are exact
    payloads = [encode(compressor, values, key) for values in ranks]
    assert compressor.is_linear
    for payload in payloads[1:]:
        compressor.summable(payloads[0])[...] += compressor.summable(payload)
    summed, expected = np.empty((2, 640), np.float32)
    compressor.decode(payloads[0], summed)
    compressor.decode(encode(compressor, sum(ranks), key), expected)
    assert np.array_equal(summed, expected)


def test_different_keys_give_different_indices():
    zeros = np.zeros(4000, np.float32)
    keys = [
        RandomKey(0, 0, 0, 0),
        RandomKey(1, 0, 0, 0),
        RandomKey(1 << 40, 0, 0, 0),
        RandomKey(0, 1, 0, 0),
        RandomKey(0, 0, 0, 1),
    ]
    drawn = [randomk.indices(encode(RandomK(density=0.01), zeros, key), 4000).tolist() for key in keys]
    assert len({tuple(one) for one in drawn}) == len(keys)
    with pytest.raises(UsageError, match="pass rank 0 on all ranks"):
        encode(RandomK(density=0.01), zeros, RandomKey(0, 0, 1, 0))


@pytest.mark.parametrize(("n", "density"), [(7, 0.4), (23, 0.5), (64, 0.05)])
def test_every_index_is_equally_likely(n, density, rng):
    draws, seed = 6_000, int(rng.integers(2**62))
    compressor = RandomK(density=density)
    payload, zeros = np.empty(compressor.payload_bytes(n), np.uint8), np.zeros(n, np.float32)
    counts = np.zeros(n)
    for step in range(draws):
        compressor.encode(zeros, payload, RandomKey(seed, step, 0, 0))
        counts[randomk.indices(payload, n)] += 1
    share = (payload.size - 16) // 4 / n
    # Six standard deviations of a binomial: about one false alarm in 10^7 runs.
    assert np.abs(counts - draws * share).max() <= 6 * np.sqrt(draws * share * (1 - share))


def test_error_matches_the_formula(rng):
    n, draws, seed = 200, 4000, int(rng.integers(2**62))
    values = rng.standard_normal(n).astype(np.float32)
    norm = np.sum(values.astype(np.float64) ** 2)
    for compressor, expected in ((RandomK(density=0.1), n / 20 - 1), (RandomK(density=0.1, scaled=False), 1 - 20 / n)):
        out = np.empty(n, np.float32)
        errors = []
        for step in range(draws):
            compressor.decode(encode(compressor, values, RandomKey(seed, step, 0, 0)), out)
            errors.append(np.sum((out - values).astype(np.float64) ** 2) / norm)
        assert abs(np.mean(errors) - expected) <= 6 * np.std(errors) / np.sqrt(draws)


@pytest.mark.parametrize("k", [1, 2, 1000])
def test_longest_segments_are_supported(k, gpu, rng):
    n = 2**31 - 1
    payload = np.zeros(16 + 4 * k, np.uint8)
    payload[:16] = rng.integers(0, 256, 16)
    where = randomk.indices(payload, n)
    assert where.min() >= 0 and where.max() < n and np.unique(where).size == k
    assert np.array_equal(randomk.indices(backend.place(payload, "gpu"), n).get(), where)


def test_bad_input_is_rejected():
    for density in (0.0, 1.01, float("nan")):
        with pytest.raises(ConfigurationError, match="above 0 and at most 1"):
            RandomK(density=density)
    with pytest.raises(UsageError, match="encode it in pieces"):
        RandomK(density=0.1).payload_bytes(2**31)
    with pytest.raises(UsageError, match="float32"):
        encode(RandomK(density=0.5), np.zeros(4), RandomKey(0, 0, 0, 0))


def test_gpu_gives_the_same_bits_without_waits(gpu, rng):
    for n, density in ((3001, 0.037), (17, 1.0), (1, 0.5)):
        compressor, key = RandomK(density=density), RandomKey(2**45 + 3, 9, 0, 4)
        values = rng.standard_normal(n).astype(np.float32)
        payload, out = encode(compressor, values, key), np.zeros(n, np.float32)
        compressor.decode(payload, out)
        compressor.add(payload, out, 0.3)
        there, sent = backend.place(values, "gpu"), backend.empty(payload.shape, payload.dtype, "gpu")
        result = backend.empty((n,), out.dtype, "gpu")
        gpu.LOG.clear()
        compressor.encode(there, sent, key)
        compressor.decode(sent, result)
        compressor.add(sent, result, 0.3)
        assert gpu.LOG.events == []
        assert sent.get().tobytes() == payload.tobytes() and result.get().tobytes() == out.tobytes()
