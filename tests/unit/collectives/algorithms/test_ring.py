"""The ring: its two halves on their own, the volume it promises, both directions."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import ALLREDUCE, all_gather, reduce_scatter, ring_allreduce
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import UsageError

SIZES = range(1, 9)


def uneven(size):
    """Chunks of 0, 1, 2, ... elements: the first is empty."""
    bounds = [rank * (rank - 1) // 2 for rank in range(size + 1)]
    return [Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_sends_two_p_minus_one_over_p_of_the_buffer(comm, size, bidirectional):
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
@pytest.mark.parametrize("size", SIZES)
def test_ring_reduce_scatter_leaves_each_rank_its_range(size, bidirectional, rng):
    for ranges in (uneven(size), split(40 * size, size, 8), [*[Range(0, 0)] * (size - 1), Range(0, 9)]):
        inputs = rng.integers(0, 100, (size, ranges[-1].stop)).astype(np.float64)

        def body(comm, ranges=ranges, inputs=inputs):
            buffer = inputs[comm.rank].copy()
            with count_traffic(comm) as traffic:
                reduce_scatter(comm, buffer, ranges, bidirectional=bidirectional)
            own = ranges[comm.rank].slice
            assert np.array_equal(buffer[own], inputs.sum(axis=0)[own])
            assert traffic.sent_bytes == buffer.nbytes - 8 * ranges[comm.rank].size

        run_threads(size, body)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_all_gather_fills_the_other_ranges(comm, size, dtype, bidirectional):
    ranges = uneven(size)
    buffer = np.full(ranges[-1].stop + 3, 99, dtype)
    buffer[ranges[comm.rank].slice] = comm.rank
    all_gather(comm, buffer, ranges, bidirectional=bidirectional)
    expected = np.concatenate([np.full(part.size, rank) for rank, part in enumerate(ranges)])
    assert np.array_equal(buffer[:-3], expected.astype(dtype))
    assert (buffer[-3:] == 99).all()  # outside the ranges nothing changes


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_is_its_two_halves_one_after_the_other(comm, size, rng):
    inputs = rng.standard_normal((size, 333)).astype(np.float32)
    whole, halves = inputs[comm.rank].copy(), inputs[comm.rank].copy()
    ring_allreduce(comm, whole)
    chunks = split(333, size, 4)
    reduce_scatter(comm, halves, chunks)
    all_gather(comm, halves, chunks)
    assert np.array_equal(whole, halves)


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_in_both_directions(comm, size, count, rng):
    inputs = rng.integers(0, 100, (size, count))
    for op, expected in (("sum", inputs.sum(axis=0)), ("max", inputs.max(axis=0))):
        buffer = inputs[comm.rank].copy()
        ring_allreduce(comm, buffer, op, bidirectional=True)
        assert np.array_equal(buffer, expected)


@pytest.mark.parametrize("ranges", [[], [Range(0, 4)], [Range(0, 2), Range(2, 5)]])
def test_ring_refuses_ranges_that_are_not_one_for_each_rank_inside_the_buffer(ranges):
    for half in (reduce_scatter, all_gather):
        with pytest.raises(UsageError, match="one range inside them for each rank"):
            run_threads(2, lambda comm, half=half: half(comm, np.zeros(4), ranges))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", [*SIZES, 9, 13])
@pytest.mark.full_except("5-False")
def test_ring_in_segments_gives_the_same_bits(size, bidirectional, rng):
    """The sum of an element does not depend on how its chunk is cut, nor do the bytes sent."""
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


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_ring_halves_in_segments_take_any_ranges(comm, size, bidirectional, rng):
    bounds = np.cumsum([0, *rng.integers(0, 60, size)])
    tiles = [Range(int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    ranges = [tiles[index] for index in rng.permutation(size)]
    inputs = rng.integers(0, 100, (size, int(bounds[-1]))).astype(np.float64)
    buffer = inputs[comm.rank].copy()
    own = ranges[comm.rank].slice
    with count_traffic(comm) as traffic:
        reduce_scatter(comm, buffer, ranges, bidirectional=bidirectional, segment_bytes=64)
    assert np.array_equal(buffer[own], inputs.sum(axis=0)[own])
    assert traffic.sent_bytes == buffer.nbytes - 8 * ranges[comm.rank].size
    buffer = np.where(np.isin(np.arange(buffer.size), np.arange(buffer.size)[own]), buffer, -1)
    all_gather(comm, buffer, ranges, bidirectional=bidirectional, segment_bytes=64)
    assert np.array_equal(buffer, inputs.sum(axis=0))


@on_threads(3)
def test_ring_passes_short_chunks_in_one_message(comm):
    for segment_bytes, calls in ((400, {"sendrecv": 4}), (399, {"isend": 8, "irecv": 8})):
        buffer = np.ones(300, np.float32)
        chunks = [Range(0, 100), Range(100, 200), Range(200, 300)]
        with count_traffic(comm) as traffic:
            reduce_scatter(comm, buffer, chunks, segment_bytes=segment_bytes)
            all_gather(comm, buffer, chunks, segment_bytes=segment_bytes)
        assert traffic.calls == calls
        assert (buffer == 3).all()


@on_threads(5)
def test_ring_by_name_in_both_directions(comm, rng):
    inputs = rng.standard_normal((5, 500))
    named, called = inputs[comm.rank].copy(), inputs[comm.rank].copy()
    ALLREDUCE["ring_bidirectional"](comm, named)
    ring_allreduce(comm, called, bidirectional=True)
    assert np.array_equal(named, called)


@on_threads(2)
def test_ring_refuses_segments_of_nothing(comm):
    with count_traffic(comm) as traffic, pytest.raises(UsageError, match="segment_bytes = 0; it must be at least 1"):
        ring_allreduce(comm, np.zeros(100), segment_bytes=0)
    assert not traffic.calls
