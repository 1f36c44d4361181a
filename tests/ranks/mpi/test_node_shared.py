"""Shared memory between real processes: every algorithm, long sequences of small calls, and no messages."""

import os

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays.ranges import split
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.record.timing import count_traffic

FLOAT32 = np.dtype(np.float32)


def test_rank_node_shared_allreduce_in_pieces_is_exact(comm, rng):
    """There are several pieces and consecutive calls, so a half that is overwritten too early would be detected."""
    row = shared_memory.HALF_BYTES // 4
    shared = shared_memory.allocate(comm, 5 * row, FLOAT32)
    for count in (row - 1, row + 1, 5 * row, 1, 3 * row, 0, 100):
        inputs = rng.integers(0, 1000, (comm.size, count)).astype(np.float32)
        for buffer in (np.empty(count, np.float32), shared[:count]):
            buffer[...] = inputs[comm.rank]
            with count_traffic(comm) as traffic:
                shared_memory.node_shared_allreduce(comm, buffer, scale=0.5)
            assert np.array_equal(buffer, inputs.sum(axis=0) * 0.5)
            assert traffic.sent_bytes == 0 and set(traffic.unknown) <= {"shared"}
    collectives.release(comm)
    buffer = np.ones(10)
    collectives.node_shared_allreduce(comm, buffer)
    assert (buffer == comm.size).all()


def test_rank_node_shared_reduce_scatter_and_all_gather(comm, rng):
    count = 300_000
    inputs = rng.standard_normal((comm.size, count)).astype(np.float32)
    expected = np.add.reduce(inputs, axis=0)
    ranges = split(count, comm.size, 4)
    local_slice = ranges[comm.rank].slice
    for buffer in (np.empty(count, np.float32), shared_memory.allocate(comm, count, FLOAT32)):
        buffer[...] = inputs[comm.rank]
        shared_memory.reduce_scatter(comm, buffer, ranges)
        assert np.array_equal(buffer[local_slice], expected[local_slice])
        kept = buffer[local_slice].copy()
        buffer[...] = np.nan
        buffer[local_slice] = kept
        shared_memory.all_gather(comm, buffer, ranges)
        assert np.array_equal(buffer, expected)


@pytest.mark.parametrize("calls", [20_000, 100_000])
@pytest.mark.matrix_except("20000")
def test_rank_thousands_of_small_collectives_are_exact(comm, calls):
    """Each call has unique values, so data that is read or overwritten too early would be detected.


    Sizes lie on both sides of the slot size, so calls with one and with two synchronisations alternate. Ranks lag in
    turn. Where ranks share cores, each call waits for the scheduler, so there are fewer calls.
    """
    calls = calls if comm.size <= len(os.sched_getaffinity(0)) else calls // 10
    slot = shared_memory.slot_bytes(comm.size) // 8
    shared = shared_memory.allocate(comm, 2 * slot, np.dtype(np.int64))
    ordinary = np.empty(2 * slot, np.int64)
    ranks = comm.size * (comm.size - 1) // 2
    for call in range(calls):
        count = (1, 3, 64, 8)[call & 3] if call % 50 else slot + call // 50 % slot
        buffer = (shared if call & 16 else ordinary)[:count]
        buffer.fill(call * comm.size + comm.rank)
        if call % 1000 == comm.rank:
            np.sort(np.arange(5000)[::-1])  # late
        shared_memory.node_shared_allreduce(comm, buffer)
        expected = call * comm.size * comm.size + ranks
        assert buffer[0] == expected and buffer[-1] == expected, (call, count, buffer[0], expected)
        if not call % 50:
            assert (buffer == expected).all()


def test_rank_node_memory_is_shared_by_all_its_ranks(comm):
    """All ranks of a node see what a rank writes, at the same place."""
    block = comm.nodes().intra.shared(4096)
    assert block.is_shared
    block.views[comm.nodes().intra.rank][:] = comm.nodes().intra.rank + 1
    comm.barrier()
    assert [int(view[4095]) for view in block.views] == list(range(1, comm.nodes().intra.size + 1))
    comm.barrier()
    block.close()
