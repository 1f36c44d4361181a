"""Circulant graphs: any number of ranks in ceil(log2 p) rounds, each half with the bytes of the ring."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import circulant_allreduce
from hpcdist.collectives.algorithms.circulant import all_gather, reduce_scatter
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, UsageError

SIZES = [*range(1, 10), 13, 16]


@pytest.fixture(params=[128, 1 << 20])
def segment_bytes(request):
    """Messages in pieces, and whole."""
    return int(request.param)


def rounds(size):
    """Return ceil(log2 size)."""
    return (size - 1).bit_length()


def uneven(size, rng):
    """Ranges that are empty, unequal, in another order than the ranks, and with gaps."""
    bounds = np.cumsum([0, *rng.integers(0, 40, size)])
    tiles = [Range(int(a), int(b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    shuffled = [tiles[index] for index in rng.permutation(size)]
    gaps = [Range(50 * rank, 50 * rank + int(rng.integers(0, 50))) for rank in range(size)]
    return [tiles, shuffled, gaps, [*[Range(0, 0)] * (size - 1), Range(0, 9)]]


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_circulant_sends_the_bytes_of_the_ring_in_the_rounds_of_a_tree(comm, size):
    buffer = np.full(16 * size, float(comm.rank), np.float32)
    with count_traffic(comm) as traffic:
        circulant_allreduce(comm, buffer)
    assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size
    assert not traffic.unknown
    assert (buffer == size * (size - 1) / 2).all()
    messages = traffic.calls["sendrecv"] + traffic.calls["isend"]
    assert 2 * rounds(size) <= messages <= 4 * rounds(size)  # one message a round, or two where the blocks wrap


@pytest.mark.parametrize("size", SIZES)
def test_circulant_halves_take_any_ranges(size, segment_bytes, rng):
    for ranges in uneven(size, rng):
        inputs = rng.integers(0, 100, (size, max(part.stop for part in ranges) + 3)).astype(np.float64)

        def body(comm, ranges=ranges, inputs=inputs):
            buffer = inputs[comm.rank].copy()
            own = ranges[comm.rank].slice
            with count_traffic(comm) as traffic:
                reduce_scatter(comm, buffer, ranges, segment_bytes=segment_bytes)
            assert np.array_equal(buffer[own], inputs.sum(axis=0)[own])
            assert traffic.sent_bytes == 8 * sum(part.size for part in ranges) - 8 * ranges[comm.rank].size
            kept = buffer[own].copy()
            buffer[...] = -1
            buffer[own] = kept
            with count_traffic(comm) as traffic:
                all_gather(comm, buffer, ranges)
            sent = comm.allgather_object(traffic.sent_bytes)
            assert sum(sent) == 8 * (size - 1) * sum(part.size for part in ranges)
            for part in ranges:
                assert np.array_equal(buffer[part.slice], inputs.sum(axis=0)[part.slice])
            outside = np.ones(buffer.size, bool)
            for part in ranges:
                outside[part.slice] = False
            assert (buffer[outside] == -1).all()

        run_threads(size, body)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
@on_threads(7)
def test_circulant_all_gather_of_any_dtype(comm, dtype):
    ranges = split(700, 7, np.dtype(dtype).itemsize)
    buffer = np.zeros(700, dtype)
    buffer[ranges[comm.rank].slice] = comm.rank + 1
    all_gather(comm, buffer, ranges)
    assert all((buffer[part.slice] == rank + 1).all() for rank, part in enumerate(ranges))


@on_threads(7)
def test_circulant_is_its_two_halves_one_after_the_other(comm, segment_bytes, rng):
    inputs = rng.standard_normal((7, 999)).astype(np.float32)
    whole, halves = inputs[comm.rank].copy(), inputs[comm.rank].copy()
    circulant_allreduce(comm, whole, "max", segment_bytes=segment_bytes)
    chunks = split(999, 7, 4)
    reduce_scatter(comm, halves, chunks, "max", segment_bytes=segment_bytes)
    all_gather(comm, halves, chunks)
    assert np.array_equal(whole, halves)
    assert np.array_equal(whole, inputs.max(axis=0))


@on_threads(3)
def test_circulant_refuses_bad_calls_on_every_rank_before_anything_is_sent(comm):
    buffer = np.zeros(6)
    with count_traffic(comm) as traffic:
        for ranges in ([], [Range(0, 4)] * 2, [Range(0, 2), Range(2, 4), Range(4, 7)]):
            for half in (reduce_scatter, all_gather):
                with pytest.raises(UsageError, match="one range inside them for each rank"):
                    half(comm, buffer, ranges)
        for segment_bytes in (0, -1):
            with pytest.raises(UsageError, match="segment_bytes = .*at least 1"):
                circulant_allreduce(comm, buffer, segment_bytes=segment_bytes)
        with pytest.raises(UsageError, match="choose one of sum, max, min"):
            circulant_allreduce(comm, buffer, "mean")
        with pytest.raises(BufferHandoverError, match="rounded at every partial sum"):
            circulant_allreduce(comm, np.zeros(6, np.float16))
        with pytest.raises(BufferHandoverError, match="1-D contiguous"):
            all_gather(comm, np.zeros((3, 3)), split(9, 3, 8))
    assert not traffic.calls
