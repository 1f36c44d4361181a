"""The leader of a node gets the sum of its ranks, and sends its buffer to them."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.collectives.algorithms.ring import LEADER, broadcast_from_leader, reduce_to_leader
from hpcdist.comm.record.timing import count_traffic


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@on_threads("size")
def test_leader_gets_the_sum_and_broadcasts_its_buffer(comm, size, rng):
    cases = [rng.integers(-9, 9, (size, count)).astype(np.float64) for count in (0, 1, 5, 300)]
    for inputs in cases:
        buffer = inputs[comm.rank].copy()
        reduce_to_leader(comm, buffer)
        if comm.rank == LEADER:
            assert np.array_equal(buffer, inputs.sum(axis=0))
            buffer *= 2
        broadcast_from_leader(comm, buffer)
        assert np.array_equal(buffer, 2 * inputs.sum(axis=0))


@on_threads(4)
def test_leader_bytes_match_formula(comm):
    buffer = np.ones(512)
    chunk = buffer.nbytes // comm.size
    with count_traffic(comm) as traffic:
        reduce_to_leader(comm, buffer)
    assert traffic.sent_bytes == (comm.size - 1) * chunk + (0 if comm.rank == LEADER else chunk)
    with count_traffic(comm) as traffic:
        broadcast_from_leader(comm, buffer)
    assert traffic.sent_bytes == (comm.size - 1) * chunk * (2 if comm.rank == LEADER else 1)
