"""Shards over real messages: reduced at their owners, and gathered on all ranks with the same bits."""

import hashlib

import numpy as np
import pytest

from hpcdist.arrays.dtypes import FLOATS
from hpcdist.collectives import SHARDED

COUNTS = (0, 1, 3, 1000, 100_003)


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"),
    [(name, None) for name in SHARDED] + [("hierarchical", 1), ("hierarchical", 2), ("hierarchical", 3)],
)
def test_rank_shards_are_reduced_at_owners_and_gathered(comm, algorithm, ranks_per_node, rng):
    comm.declared_node = None if ranks_per_node is None else comm.rank // ranks_per_node
    sharding = SHARDED[algorithm]
    for dtype in (np.float32, np.float64, np.int64):
        for count in COUNTS:
            inputs = (10 * rng.standard_normal((comm.size, count))).astype(dtype)
            exact = inputs.astype(np.float64).sum(axis=0)
            eps = np.finfo(dtype).eps if inputs.dtype.kind == "f" else 0.0
            bound = comm.size * eps * np.abs(inputs.astype(np.float64)).sum(axis=0)
            buffer = inputs[comm.rank].copy()
            shares = sharding.shares(comm, count, buffer.itemsize)
            assert all(other == shares for other in comm.allgather_object(shares))
            local_slice = shares[comm.rank].slice
            elsewhere = np.empty_like(buffer[local_slice])
            sharding.reduce_scatter(comm, buffer, shares, result=elsewhere)
            assert np.array_equal(buffer, inputs[comm.rank]), "a result elsewhere leaves the addends"
            sharding.reduce_scatter(comm, buffer, shares)
            assert np.array_equal(elsewhere, buffer[local_slice])
            assert (np.abs(buffer[local_slice] - exact[local_slice]) <= bound[local_slice]).all(), (
                f"{count} {buffer.dtype}"
            )
            mine = buffer[local_slice].copy()
            buffer[...] = 99
            buffer[local_slice] = mine
            sharding.all_gather(comm, buffer, shares)
            assert (np.abs(buffer - exact) <= bound).all(), f"{count} {buffer.dtype}"
            digests = comm.allgather_object(hashlib.sha256(buffer.tobytes()).hexdigest())
            assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"


@pytest.mark.parametrize("algorithm", SHARDED)
def test_rank_sharded_maximum_and_16_bit_sums(comm, algorithm, rng):
    comm.declared_node = None if algorithm == "node_shared" else comm.rank // 2
    sharding = SHARDED[algorithm]
    inputs = rng.standard_normal((comm.size, 999)).astype(np.float32)
    buffer = inputs[comm.rank].copy()
    shares = sharding.shares(comm, 999, 4)
    sharding.reduce_scatter(comm, buffer, shares, "max")
    sharding.all_gather(comm, buffer, shares)
    assert np.array_equal(buffer, inputs.max(axis=0))
    for dtype in (FLOATS["float16"], FLOATS["bfloat16"]):
        half = np.zeros(999, dtype)
        shares = sharding.shares(comm, 999, 2)
        half[shares[comm.rank].slice] = comm.rank + 1
        sharding.all_gather(comm, half, shares)
        assert all((half[share.slice] == rank + 1).all() for rank, share in enumerate(shares))
