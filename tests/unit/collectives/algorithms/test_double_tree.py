"""The double tree: every rank is an inner node of one tree, and segments are pipelined through both."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import split
from hpcdist.collectives import double_tree_allreduce
from hpcdist.collectives.algorithms.double_tree import trees
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads

SIZES = [*range(1, 10), 13, 16]


@pytest.mark.parametrize("size", [*range(1, 34), 63, 64, 65, 100])
def test_both_trees_span_all_ranks_with_distinct_inner_nodes(size):
    for index in (0, 1):
        tree = [places[index] for places in trees(size)]
        roots = [rank for rank, place in enumerate(tree) if place.parent is None]
        assert len(roots) == 1 and tree[roots[0]].depth == 0
        for rank, place in enumerate(tree):
            assert len(place.children) <= 2
            assert all(tree[child].parent == rank for child in place.children)
            if place.parent is not None:
                assert rank in tree[place.parent].children
                assert place.depth == tree[place.parent].depth + 1
        assert max(place.depth for place in tree) <= size.bit_length()
    inside = [sum(bool(place.children) for place in places) for places in trees(size)]
    assert all(count <= 1 or (size % 2 and rank == 0) for rank, count in enumerate(inside))


@pytest.mark.parametrize("segment_bytes", [128, 1 << 20])
@pytest.mark.parametrize("size", SIZES)
def test_double_tree_sends_half_the_buffer_to_each_neighbour(size, segment_bytes):
    def body(comm):
        buffer = np.full(16 * 20, float(comm.rank), np.float32)
        halves = split(buffer.size, 2, 4)
        with count_traffic(comm) as traffic:
            double_tree_allreduce(comm, buffer, segment_bytes=segment_bytes)
        neighbours = [len(place.children) + (place.parent is not None) for place in trees(size)[comm.rank]]
        assert traffic.sent_bytes == sum(n * 4 * half.size for n, half in zip(neighbours, halves, strict=True))
        assert traffic.sent_bytes <= 2 * buffer.nbytes
        pieces = [-(-4 * half.size // segment_bytes) for half in halves]
        assert traffic.calls["isend"] == sum(n * count for n, count in zip(neighbours, pieces, strict=True))
        assert not traffic.unknown
        assert (buffer == size * (size - 1) / 2).all()
        return traffic.sent_bytes

    assert sum(run_threads(size, body)) == 2 * (size - 1) * 16 * 20 * 4


@on_threads(6)
def test_double_tree_sum_is_independent_of_segments(comm, rng):
    inputs = rng.standard_normal((6, 777)).astype(np.float32)
    buffers = [inputs[comm.rank].copy() for _ in range(3)]
    for buffer, segment_bytes in zip(buffers, (64, 500, 1 << 20), strict=True):
        double_tree_allreduce(comm, buffer, segment_bytes=segment_bytes)
    assert np.array_equal(buffers[0], buffers[1]) and np.array_equal(buffers[0], buffers[2])
