"""Rabenseifner: the bytes of the ring in 2 log2(p) messages."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.collectives import rabenseifner_allreduce
from hpcdist.comm.record.timing import count_traffic


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@on_threads("size")
def test_rabenseifner_sends_ring_bytes_in_fewer_messages(comm, size):
    buffer = np.full(16 * size, 2.0**comm.rank)
    with count_traffic(comm) as traffic:
        rabenseifner_allreduce(comm, buffer)
    assert (buffer == 2**size - 1).all()
    assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size
    assert sum(traffic.calls.values()) == traffic.calls["sendrecv"] == 2 * (size.bit_length() - 1)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 13])
@on_threads("size")
def test_rabenseifner_bytes_of_ranks_above_a_power_of_two(comm, size, rng):
    """The active rank of a pair sends 5/2 - 2/q of the buffer, the other 3/2. With whole buffers: 3 - 2/q and 1."""
    cube = 1 << (size.bit_length() - 1)
    pairs = size - cube
    inputs = rng.integers(-100, 100, (size, 16 * cube)).astype(np.float64)
    buffer = inputs[comm.rank].copy()
    with count_traffic(comm) as traffic:
        rabenseifner_allreduce(comm, buffer, halves_bytes=0)
    assert np.array_equal(buffer, inputs.sum(axis=0))
    if comm.rank >= 2 * pairs:
        assert traffic.sent_bytes == 2 * (cube - 1) * buffer.nbytes // cube
        return
    vertex, held = divmod(comm.rank, 2)
    goes_on = held == (vertex >= cube // 2)
    assert traffic.sent_bytes == (
        5 * buffer.nbytes // 2 - 2 * buffer.nbytes // cube if goes_on else 3 * buffer.nbytes // 2
    )


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 13])
@on_threads("size")
def test_rabenseifner_folds_short_buffers(comm, size):
    cube = 1 << (size.bit_length() - 1)
    buffer = np.full(16 * cube, 2.0**comm.rank)
    with count_traffic(comm) as traffic:
        rabenseifner_allreduce(comm, buffer, halves_bytes=buffer.nbytes + 1)
    assert (buffer == 2**size - 1).all()
    inside = 2 * (cube - 1) * buffer.nbytes // cube
    if comm.rank >= 2 * (size - cube):
        assert traffic.sent_bytes == inside
    else:
        assert traffic.sent_bytes == (inside if comm.rank % 2 else 0) + buffer.nbytes
