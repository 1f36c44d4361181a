"""Sparse payloads are added by index and then by rank: one summation order on CPU and GPU."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.compression import coo, topk
from hpcdist.errors import UsageError


def payloads(rng, n, counts):
    made = [np.empty(8 * k, np.uint8) for k in counts]
    for payload in made:
        if payload.size:
            topk.select((rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32), payload)
    return made


def add_by_index_then_rank(result, n):
    """Reference implementation: add the entries sorted by (index, rank)."""
    entries = sorted(
        (int(index), rank, value)
        for rank, payload in enumerate(result)
        for index, value in zip(coo.indices(payload), coo.values(payload), strict=True)
    )
    out = np.zeros(n, np.float32)
    for index, _, value in entries:
        out[index] += value
    return out


@pytest.mark.parametrize(
    ("n", "counts"), [(50, [5, 5, 5]), (50, [50, 0, 1, 7]), (10_000, [900, 900, 30, 2, 900]), (1, [1])]
)
def test_sum_has_the_bits_of_its_definition(n, counts, rng):
    result = payloads(rng, n, counts)
    expected = add_by_index_then_rank(result, n)
    out = np.full(n, np.nan, np.float32)
    coo.write(result[0], out)
    for payload in result[1:]:
        coo.add(payload, out)
    assert np.array_equal(out, expected)


def test_gpu_gives_the_same_bits_without_waits(gpu, rng):
    result = payloads(rng, 700, [40, 0, 40, 13])
    placed = [backend.place(payload, "gpu") for payload in result]
    out = backend.zeros(700, np.dtype(np.float32), "gpu")
    gpu.LOG.clear()
    for payload in placed:
        coo.add(payload, out)
    expected = add_by_index_then_rank(result, 700)
    coo.clear(placed[0], out)
    assert gpu.LOG.events == []
    coo.clear(result[0], expected)
    assert not expected[coo.indices(result[0])].any() and out.get().tobytes() == expected.tobytes()


def test_payloads_of_another_tensor_are_rejected(rng):
    (payload,) = payloads(rng, 60, [4])
    coo.indices(payload)[-1] = 99
    out = np.zeros(60, np.float32)
    guarded = np.zeros(200, np.float32)
    for use in (coo.write, coo.add, coo.clear):
        with pytest.raises(
            UsageError, match=r"1 indices .* are negative or not below 60: the payload is for another tensor"
        ):
            use(payload, guarded[:60])
        assert not guarded[60:].any()  # nothing was written after the end
    coo.indices(payload)[:] = [5000, 3, 2, 1]
    with pytest.raises(UsageError, match="3 indices .* are negative or not below 2"):
        coo.add(payload, np.zeros(2, np.float32))
    coo.indices(payload)[0] = -1
    with pytest.raises(UsageError, match="another tensor"):
        coo.write(payload, out)
