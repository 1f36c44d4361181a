"""Allreduce by all-to-all: 16 bits on the wire, float32 in the sum, one rounding, in rank order."""

import ml_dtypes
import numpy as np
import pytest

from hpcdist.collectives import all_to_all_allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.threads import run_threads


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("size", range(1, 9))
def test_all_to_all_sends_the_bytes_of_the_ring_in_the_dtype_of_the_buffer(size: int, dtype: type) -> None:
    def body(comm: Communicator) -> None:
        buffer = np.full(64 * size, comm.rank, dtype)
        with recording(comm) as traffic:
            all_to_all_allreduce(comm, buffer)
        assert (buffer == size * (size - 1) / 2).all()
        assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size

    run_threads(size, body)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_to_all_rounds_the_float32_sum_in_rank_order_once(size: int, dtype: type, rng: np.random.Generator) -> None:
    inputs = rng.standard_normal((size, 1000)).astype(dtype)
    total = inputs[0].astype(np.float32)
    for addend in inputs[1:]:
        total += addend.astype(np.float32)

    def body(comm: Communicator) -> None:
        buffer = inputs[comm.rank].copy()
        all_to_all_allreduce(comm, buffer)
        assert np.array_equal(buffer, total.astype(dtype))

    run_threads(size, body)
