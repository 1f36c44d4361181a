"""16-bit floats through algorithms that send partial sums: float32 on the way, one rounding at the end."""

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
def test_16_bit_sums_are_those_of_float64_to_one_ulp_and_mostly_exact(algorithm, size, rng):
    """Of the elements 999 in 1000 are the once-rounded sum in float64, scaled or not; the others are next to it."""
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
            assert (np.abs(ordered(buffer) - ordered(exact)) <= 1).all()


def ordered(halves):
    """Return integers in the order of the numbers, one apart where these are neighbours."""
    bits = halves.view(np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", HALVES)
@on_threads(4)
def test_a_widened_ring_sends_float32_and_says_so(comm, dtype):
    buffer = np.ones(256, dtype)
    with count_traffic(comm) as traffic:
        collectives.allreduce(comm, buffer, "ring")
    assert traffic.sent_bytes == 2 * 3 * (256 * 4) // 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
@on_threads(2)
def test_a_sum_beyond_the_range_of_float16_is_infinite_without_a_warning(comm, algorithm):
    buffer = np.array([60_000, -60_000, 30_000], np.float16)
    collectives.allreduce(comm, buffer, algorithm)
    assert buffer.tolist() == [np.inf, -np.inf, 60_000]


@pytest.mark.parametrize("algorithm", OTHERS)
@on_threads(4)
def test_partial_sums_may_leave_the_range_of_float16(comm, algorithm):
    buffer = np.full(40, [60_000, 60_000, -60_000, -60_000][comm.rank], np.float16)
    collectives.allreduce(comm, buffer, algorithm)
    assert not buffer.any()
