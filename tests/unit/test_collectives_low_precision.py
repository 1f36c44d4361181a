"""16-bit floats through algorithms that send partial sums: float32 on the way, one rounding at the end."""

import ml_dtypes
import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.threads import run_threads

HALVES = [np.float16, ml_dtypes.bfloat16]
OTHERS = sorted(set(collectives.ALLREDUCE) - {"all_to_all"})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
def test_16_bit_sums_are_rounded_once(algorithm: str, dtype: type, rng: np.random.Generator) -> None:
    """Partial sums in 16 bits would leave a fifth of the elements and more different from the rounded true sum."""
    inputs = rng.standard_normal((4, 20_000)).astype(dtype)
    exact = inputs.astype(np.float64).sum(axis=0).astype(dtype)

    def body(comm: Communicator) -> float:
        buffer = inputs[comm.rank].copy()
        collectives.allreduce(comm, buffer, algorithm)
        return float(np.mean(buffer != exact))

    assert max(run_threads(4, body)) < 1e-3


@pytest.mark.parametrize("dtype", HALVES)
def test_a_widened_ring_sends_float32_and_says_so(dtype: type) -> None:
    def body(comm: Communicator) -> None:
        buffer = np.ones(256, dtype)
        with recording(comm) as traffic:
            collectives.allreduce(comm, buffer, "ring")
        assert traffic.sent_bytes == 2 * 3 * (256 * 4) // 4

    run_threads(4, body)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
def test_a_sum_beyond_the_range_of_float16_is_infinite_without_a_warning(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        buffer = np.array([60_000, -60_000, 30_000], np.float16)
        collectives.allreduce(comm, buffer, algorithm)
        assert buffer.tolist() == [np.inf, -np.inf, 60_000]

    run_threads(2, body)


@pytest.mark.parametrize("algorithm", OTHERS)
def test_partial_sums_may_leave_the_range_of_float16(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        buffer = np.full(40, [60_000, 60_000, -60_000, -60_000][comm.rank], np.float16)
        collectives.allreduce(comm, buffer, algorithm)
        assert not buffer.any()

    run_threads(4, body)
