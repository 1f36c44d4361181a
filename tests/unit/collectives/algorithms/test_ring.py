"""The ring: its volume, both directions, and segments."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import ALLREDUCE, all_gather, reduce_scatter, ring_allreduce
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads

SIZES = range(1, 9)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_bytes_are_two_p_minus_one_over_p_of_the_buffer(comm, size, bidirectional):
    count = 64 * size  # chunks, and their halves, of equal size
    buffer = np.full(count, float(comm.rank), np.float32)
    with count_traffic(comm) as traffic:
        ring_allreduce(comm, buffer, bidirectional=bidirectional)
    assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size
    messages = "isend" if bidirectional else "sendrecv"
    assert traffic.calls[messages] == 2 * (size - 1) * (2 if bidirectional else 1)
    assert not traffic.unknown
    assert (buffer == size * (size - 1) / 2).all()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", [*SIZES, 9, 13])
@pytest.mark.full_except("5-False")
def test_ring_segments_change_neither_bits_nor_bytes(size, bidirectional, rng):
    """Neither the sum nor the bytes sent depend on the segment size."""
    for count in (0, 1, 7, 300, 1003):
        inputs = rng.standard_normal((size, count)).astype(np.float32)

        def body(comm, inputs=inputs):
            whole = inputs[comm.rank].copy()
            with count_traffic(comm) as expected:
                ring_allreduce(comm, whole, bidirectional=bidirectional)
            for segment_bytes in (1, 64, 100, 1000):
                buffer = inputs[comm.rank].copy()
                with count_traffic(comm) as traffic:
                    ring_allreduce(comm, buffer, bidirectional=bidirectional, segment_bytes=segment_bytes)
                assert np.array_equal(buffer, whole)
                assert traffic.sent_bytes == expected.sent_bytes

        run_threads(size, body)


@on_threads(3)
def test_ring_sends_short_chunks_in_one_message(comm):
    for segment_bytes, calls in ((400, {"sendrecv": 4}), (399, {"isend": 8, "irecv": 8})):
        buffer = np.ones(300, np.float32)
        chunks = [Range(0, 100), Range(100, 200), Range(200, 300)]
        with count_traffic(comm) as traffic:
            reduce_scatter(comm, buffer, chunks, segment_bytes=segment_bytes)
            all_gather(comm, buffer, chunks, segment_bytes=segment_bytes)
        assert traffic.calls == calls
        assert (buffer == 3).all()


@on_threads(5)
def test_ring_bidirectional_name_matches_the_option(comm, rng):
    inputs = rng.standard_normal((5, 500))
    named, called = inputs[comm.rank].copy(), inputs[comm.rank].copy()
    ALLREDUCE["ring_bidirectional"](comm, named)
    ring_allreduce(comm, called, bidirectional=True)
    assert np.array_equal(named, called)
