"""Recursive doubling: log2(p) messages of the whole buffer, and pairs that reduce p to a power of two."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.collectives import recursive_doubling_allreduce
from hpcdist.collectives.algorithms.hypercube import Hypercube
from hpcdist.comm.record.timing import count_traffic

SIZES = range(1, 9)


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_recursive_doubling_sends_the_buffer_once_per_step(comm, size):
    cube_size = {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8}[size]
    steps = cube_size.bit_length() - 1
    pairs = size - cube_size
    buffer = np.full(10, 2.0**comm.rank)
    with count_traffic(comm) as traffic:
        recursive_doubling_allreduce(comm, buffer)
    assert (buffer == 2**size - 1).all()
    if comm.rank < 2 * pairs:
        expected = steps + 1 if comm.rank % 2 else 1  # the odd rank of a pair acts for both
    else:
        expected = steps
    assert traffic.sent_bytes == expected * buffer.nbytes


@pytest.mark.parametrize("size", [*SIZES, 12, 31])
def test_hypercube_has_every_member_once(size):
    class Place:
        def __init__(self, rank):
            self.rank, self.size = rank, size

    cubes = [Hypercube.of(Place(rank)) for rank in range(size)]
    members = {cube.rank: rank for rank, cube in enumerate(cubes) if cube.rank is not None}
    assert sorted(members) == list(range(cubes[0].size))
    assert cubes[0].size <= size < 2 * cubes[0].size
    assert all(cubes[0].outer(member) == rank for member, rank in members.items())
