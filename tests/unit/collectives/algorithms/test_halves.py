"""The halves of an allreduce, ring and circulant: any ranges, any segments, the bytes of a ring."""

import functools

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import Range, consecutive, split
from hpcdist.collectives import circulant_allreduce, double_tree_allreduce, ring_allreduce
from hpcdist.collectives.algorithms import circulant, ring
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, UsageError

HALVES = {
    "ring": (ring_allreduce, ring.reduce_scatter, ring.all_gather),
    "both ways": tuple(
        functools.partial(half, bidirectional=True) for half in (ring_allreduce, ring.reduce_scatter, ring.all_gather)
    ),
    "circulant": (
        circulant_allreduce,
        circulant.reduce_scatter,
        lambda *call, segment_bytes=0: circulant.all_gather(*call),
    ),
}
WAYS = pytest.mark.parametrize("way", HALVES)


def uneven_ranges(size, rng):
    """Return ranges that are empty, unequal, not in rank order, and with gaps."""
    tiles = consecutive(rng.integers(0, 40, size).tolist())
    shuffled = [tiles[index] for index in rng.permutation(size)]
    gaps = [Range(50 * rank, 50 * rank + int(rng.integers(0, 50))) for rank in range(size)]
    return [tiles, shuffled, gaps, consecutive(range(size)), [*[Range(0, 0)] * (size - 1), Range(0, 9)]]


@WAYS
@pytest.mark.parametrize("segment_bytes", [64, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_halves_support_any_ranges(size, way, segment_bytes, rng):
    _, reduce_scatter, all_gather = HALVES[way]
    for ranges in uneven_ranges(size, rng):
        inputs = rng.integers(0, 100, (size, max(part.stop for part in ranges) + 3)).astype(np.float64)
        total = inputs.sum(axis=0)
        elements = sum(part.size for part in ranges)

        def body(comm, ranges=ranges, inputs=inputs, total=total, elements=elements):
            buffer, local_slice = inputs[comm.rank].copy(), ranges[comm.rank].slice
            with count_traffic(comm) as traffic:
                reduce_scatter(comm, buffer, ranges, segment_bytes=segment_bytes)
            assert np.array_equal(buffer[local_slice], total[local_slice])
            assert traffic.sent_bytes == 8 * (elements - ranges[comm.rank].size)
            summed = buffer[local_slice].copy()
            buffer[...] = -1
            buffer[local_slice] = summed
            with count_traffic(comm) as traffic:
                all_gather(comm, buffer, ranges, segment_bytes=segment_bytes)
            assert sum(comm.allgather_object(traffic.sent_bytes)) == 8 * (size - 1) * elements
            expected = np.full(buffer.size, -1.0)  # elements outside the ranges do not change
            for part in ranges:
                expected[part.slice] = total[part.slice]
            assert np.array_equal(buffer, expected)

        run_threads(size, body)


@WAYS
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
@on_threads(7)
def test_all_gather_supports_any_dtype(comm, dtype, way):
    ranges = split(700, 7, np.dtype(dtype).itemsize)
    buffer = np.zeros(700, dtype)
    buffer[ranges[comm.rank].slice] = comm.rank + 1
    HALVES[way][2](comm, buffer, ranges, segment_bytes=64)
    assert all((buffer[part.slice] == rank + 1).all() for rank, part in enumerate(ranges))


@WAYS
@pytest.mark.parametrize("segment_bytes", [128, 1 << 20])
@on_threads(7)
def test_two_halves_have_the_bits_of_an_allreduce(comm, way, segment_bytes, rng):
    allreduce, reduce_scatter, all_gather = HALVES[way]
    inputs = rng.standard_normal((7, 999)).astype(np.float32)
    for op in ("sum", "max"):
        whole, halves = inputs[comm.rank].copy(), inputs[comm.rank].copy()
        allreduce(comm, whole, op, segment_bytes=segment_bytes)
        chunks = split(999, 7, 4)
        reduce_scatter(comm, halves, chunks, op, segment_bytes=segment_bytes)
        all_gather(comm, halves, chunks, segment_bytes=segment_bytes)
        assert np.array_equal(whole, halves)
    assert np.array_equal(whole, inputs.max(axis=0))


@on_threads(3)
def test_bad_ranges_and_segments_are_rejected_before_sending(comm):
    with count_traffic(comm) as traffic:
        for _, *halves in HALVES.values():
            for half in halves:
                for ranges in ([], [Range(0, 4)] * 2, [Range(0, 2), Range(2, 4), Range(4, 7)]):
                    with pytest.raises(UsageError, match="one range of the buffer for each rank"):
                        half(comm, np.zeros(6), ranges)
                with pytest.raises(BufferHandoverError, match="1-D contiguous"):
                    half(comm, np.zeros((3, 3)), split(9, 3, 8))
        for allreduce in (ring_allreduce, circulant_allreduce, double_tree_allreduce):
            for segment_bytes in (0, -1):
                with pytest.raises(UsageError, match=f"segment_bytes must be at least 1, .* got {segment_bytes}"):
                    allreduce(comm, np.zeros(6), segment_bytes=segment_bytes)
    assert not traffic.calls
