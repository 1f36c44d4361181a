"""Top-k is exact: for every k it selects the first k of a stable sort by magnitude, with the predicted bytes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcdist.arrays import backend
from hpcdist.compression import coo, topk
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.topk import TopK
from hpcdist.errors import ConfigurationError, NonFiniteError, UsageError

KEY = RandomKey(0, 0, 0, 0)
AWKWARD = [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 2.0, 2.0000002]


def first_by_stable_sort(values, k):
    return np.sort(np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:k])


def selected_indices(values, k):
    payload = np.full(8 * k, 0xFF, np.uint8)
    topk.select(values, payload)
    where = coo.indices(payload)
    assert coo.values(payload).tobytes() == values[where].tobytes()
    return where


@given(st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=70))
@example([0.0, -0.0, 0.0])
def test_every_k_with_ties_matches_stable_sort(drawn):
    values = np.array(drawn, np.float32)
    for k in range(1, values.size + 1):
        assert selected_indices(values, k).tolist() == first_by_stable_sort(values, k).tolist()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70), st.data())
def test_any_floats_match_stable_sort(drawn, data):
    values = np.array(drawn, np.float32)
    k = data.draw(st.integers(1, values.size))
    assert selected_indices(values, k).tolist() == first_by_stable_sort(values, k).tolist()


def long_segments(rng):
    n = 4 * topk._SAMPLE + 12_345  # long enough for a threshold from a sample
    normal = rng.standard_normal(n).astype(np.float32)
    return {
        "normal": normal,
        "few levels": np.round(normal * 4) / 4,
        "nearly all zero": np.where(rng.random(n) < 0.003, normal, np.float32(0)),
        "all equal": np.full(n, -2.5, np.float32),
        "many equal, few larger": np.where(rng.random(n) < 0.005, normal + np.float32(9), np.float32(1)),
        "one block of large ones": np.concatenate([normal[: n - 500] * np.float32(1e-3), normal[n - 500 :]]),
        "wide": (normal * 10.0 ** rng.integers(-40, 30, n)).astype(np.float32),
        "period of the sample": np.where(np.arange(n) % (n // topk._SAMPLE) == 0, normal, normal * np.float32(1e-3)),
    }


def test_long_segments_match_stable_sort(rng):
    for name, values in long_segments(rng).items():
        order = np.argsort(-np.abs(values.astype(np.float64)), kind="stable")
        for k in (1, 77, values.size // 100, values.size // 5, values.size // 2, values.size - 1, values.size):
            assert np.array_equal(selected_indices(values, k), np.sort(order[:k])), (name, k)


@pytest.mark.parametrize("drawn", ["too low", "too high"])
def test_misleading_sample_keeps_the_selection_exact(drawn, rng, monkeypatch):
    values = long_segments(rng)["normal"]

    def mislead(words, sample):
        sample[:] = np.float32(0.0 if drawn == "too low" else 100.0).view(np.uint32)

    monkeypatch.setattr(topk, "_draw", mislead)
    assert np.array_equal(selected_indices(values, 700), first_by_stable_sort(values, 700))


def test_payload_bytes_and_round_trip(rng):
    compressor = TopK(density=0.07)
    assert compressor.payload_bytes(100) == 8 * 7  # not 8, though 0.07 * 100 is above 7 in floating point
    assert (compressor.payload_bytes(1), compressor.payload_bytes(101), compressor.payload_bytes(0)) == (8, 64, 0)
    assert not compressor.is_linear
    values, out = rng.standard_normal(1000).astype(np.float32), np.full(1000, np.nan, np.float32)
    payload = np.empty(compressor.payload_bytes(1000), np.uint8)
    compressor.encode(values, payload, KEY)
    compressor.decode(payload, out)
    kept = np.zeros(1000, bool)
    kept[first_by_stable_sort(values, 70)] = True
    assert np.array_equal(out, np.where(kept, values, 0))
    assert np.sum((values - out).astype(np.float64) ** 2) <= (1 - 70 / 1000) * np.sum(values.astype(np.float64) ** 2)
    compressor.add(payload, out, -2.0)
    assert np.array_equal(out, np.where(kept, -values, 0))
    empty = np.empty(0, np.float32)
    compressor.encode(empty, payload[:0], KEY)
    compressor.decode(payload[:0], empty)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [40, 100_000])
def test_nonfinite_values_are_rejected(bad, n, rng):
    values = rng.standard_normal(n).astype(np.float32)
    values[rng.integers(n)] = bad
    with pytest.raises(NonFiniteError, match="before compression"):
        selected_indices(values, 3)


def test_bad_input_is_rejected(rng):
    values = rng.standard_normal(10).astype(np.float32)
    for nbytes in (0, 88, 12):
        with pytest.raises(UsageError, match=r"a payload of 8 k bytes, with 1 <= k <= n"):
            topk.select(values, np.empty(nbytes, np.uint8))
    for density in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError, match="above 0 and at most 1"):
            TopK(density=density)
    assert TopK(density=1e-3).payload_bytes(2**31 - 1) == 8 * 2147484
    with pytest.raises(UsageError, match=r"int32 indices reach 2147483647 elements; encode it in pieces"):
        TopK(density=1e-3).payload_bytes(2**31)


def test_gpu_gives_the_same_bits_without_waits(gpu, rng):
    compressor = TopK(density=0.03)
    for values in (rng.standard_normal(3001), np.round(rng.standard_normal(3001)), np.zeros(5)):
        host = values.astype(np.float32)
        payload = np.empty(compressor.payload_bytes(host.size), np.uint8)
        compressor.encode(host, payload, KEY)
        out = host.copy()
        compressor.decode(payload, out)
        compressor.add(payload, out, 0.3)
        there, sent = backend.place(host, "gpu"), backend.empty(payload.shape, payload.dtype, "gpu")
        gpu.LOG.clear()
        compressor.encode(there, sent, KEY)
        result = backend.empty(host.shape, host.dtype, "gpu")
        compressor.decode(sent, result)
        compressor.add(sent, result, 0.3)
        assert gpu.LOG.events == []
        assert sent.get().tobytes() == payload.tobytes() and result.get().tobytes() == out.tobytes()
