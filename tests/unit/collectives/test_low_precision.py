"""16-bit floats in algorithms that send partial sums: float32 in messages, and one rounding at the end."""

import ml_dtypes
import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist import collectives
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads

HALVES = [np.float16, ml_dtypes.bfloat16]
OTHERS = sorted(set(collectives.ALLREDUCE) - {"all_to_all"})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
def test_16_bit_sums_are_within_one_ulp_of_float64(algorithm, size, rng):
    """999 of 1000 elements equal the float64 sum rounded once, scaled or not. The others differ by one ulp."""
    cases = [(np.dtype(dtype), scale) for dtype in HALVES for scale in (1.0, 1 / 3)]
    inputs = [rng.standard_normal((size, 10_000)).astype(dtype) for dtype, _ in cases]

    def body(comm):
        buffers = [brought[comm.rank].copy() for brought in inputs]
        for buffer, (_, scale) in zip(buffers, cases, strict=True):
            collectives.allreduce(comm, buffer, algorithm, scale=scale)
        return buffers

    for buffers in run_threads(size, body):
        for buffer, brought, (dtype, scale) in zip(buffers, inputs, cases, strict=True):
            exact = (brought.astype(np.float64).sum(axis=0) * scale).astype(dtype)
            assert np.mean(buffer != exact) <= 1e-3
            assert (np.abs(ordered_integers(buffer) - ordered_integers(exact)) <= 1).all()


def ordered_integers(halves):
    """Map 16-bit floats to integers in the same order, so that neighbouring floats differ by 1."""
    bits = halves.view(np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", HALVES)
@on_threads(4)
def test_widened_ring_counts_float32_bytes(comm, dtype):
    buffer = np.ones(256, dtype)
    with count_traffic(comm) as traffic:
        collectives.allreduce(comm, buffer, "ring")
    assert traffic.sent_bytes == 2 * 3 * (256 * 4) // 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
@on_threads(2)
def test_float16_overflow_is_infinite_without_a_warning(comm, algorithm):
    buffer = np.array([60_000, -60_000, 30_000], np.float16)
    collectives.allreduce(comm, buffer, algorithm)
    assert buffer.tolist() == [np.inf, -np.inf, 60_000]


@pytest.mark.parametrize("algorithm", OTHERS)
@on_threads(4)
def test_partial_sums_may_exceed_the_range_of_float16(comm, algorithm):
    buffer = np.full(40, [60_000, 60_000, -60_000, -60_000][comm.rank], np.float16)
    collectives.allreduce(comm, buffer, algorithm)
    assert not buffer.any()
