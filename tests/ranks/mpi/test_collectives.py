"""Every algorithm over real messages: exact sums, the same bits on all ranks, and the documented volumes."""

import functools
import hashlib

import numpy as np
import pytest

import hpcdist
from hpcdist import collectives
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, is_16bit_float
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import ALL_TO_ALL, ALLREDUCE, BROADCAST
from hpcdist.comm.record.timing import count_traffic
from hpcdist.errors import BufferHandoverError, UsageError

COUNTS = (0, 1, 3, 1000, 100_003)
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def assert_same_bits_everywhere(comm, buffer):
    """Fail unless all ranks hold the same bits."""
    digests = comm.allgather_object(hashlib.sha256(buffer.tobytes()).hexdigest())
    assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "uint8"])
def test_rank_allreduce_is_exact_on_small_integers(comm, algorithm, name, rng):
    dtype = (FLOATS | INTEGERS)[name]
    for count in COUNTS[:-1]:
        for op in NUMPY:
            inputs = rng.integers(0, 16, (comm.size, count)).astype(dtype)
            buffer = inputs[comm.rank].copy()
            collectives.allreduce(comm, buffer, algorithm, op)
            expected = NUMPY[op].reduce(inputs.astype(np.int64), axis=0)
            assert np.array_equal(buffer.astype(np.int64), expected), f"{count} elements, {op}"


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_rank_max_and_min_propagate_nan_of_any_rank(comm, algorithm, op, rng):
    for dtype in FLOATS.values():
        for count in COUNTS[1:]:
            inputs = rng.standard_normal((comm.size, count)).astype(dtype)
            inputs[rng.integers(0, comm.size, count), np.arange(count)] = np.nan  # each element on one rank
            inputs[:, ::3] = np.arange(comm.size)[:, None]
            buffer = inputs[comm.rank].copy()
            collectives.allreduce(comm, buffer, algorithm, op)
            expected = NUMPY[op].reduce(inputs.astype(np.float64), axis=0)
            assert np.array_equal(buffer.astype(np.float64), expected, equal_nan=True), f"{dtype}, {count} elements"


@pytest.mark.parametrize("op", ["max", "min"])
def test_rank_native_max_and_min_keep_nan(comm, op, rng):
    inputs = rng.standard_normal((comm.size, 40 * comm.size))
    inputs[rng.integers(0, comm.size, inputs.shape[1]), np.arange(inputs.shape[1])] = np.nan
    inputs[:, ::3] = np.arange(comm.size)[:, None]
    expected = NUMPY[op].reduce(inputs, axis=0)
    begun = inputs[comm.rank].copy()
    comm.iallreduce(begun, op).wait()
    assert np.array_equal(begun, expected, equal_nan=True)
    part, shares = inputs[comm.rank].copy(), split(inputs.shape[1], comm.size, 8)
    comm.reduce_scatter(part, shares, op)
    local_slice = shares[comm.rank].slice
    assert np.array_equal(part[local_slice], expected[local_slice], equal_nan=True)
    several = np.full((1 << 17) * 3 + 5, float(comm.rank))  # MPI gets it in several pieces
    several[comm.rank :: comm.size + 3] = np.nan
    collectives.allreduce(comm, several, "native", op)
    is_nan = np.arange(several.size) % (comm.size + 3) < comm.size
    assert np.array_equal(several, np.where(is_nan, np.nan, 0 if op == "min" else comm.size - 1), equal_nan=True)
    number = hpcdist.allreduce(np.nan if comm.rank == comm.size - 1 else 1.0, op, comm=comm)
    assert np.isnan(number)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_rank_allreduce_has_the_same_bits_on_all_ranks(comm, algorithm, dtype, rng):
    for count in COUNTS:
        inputs = rng.standard_normal((comm.size, count)).astype(dtype)
        buffer, again = inputs[comm.rank].copy(), inputs[comm.rank].copy()
        collectives.allreduce(comm, buffer, algorithm)
        assert_same_bits_everywhere(comm, buffer)
        collectives.allreduce(comm, again, algorithm)
        assert np.array_equal(buffer, again)
        exact = inputs.astype(np.float64).sum(axis=0)
        if is_16bit_float(dtype):
            assert np.count_nonzero(buffer != exact.astype(dtype)) <= count / 100  # rounded once
        else:
            magnitude = np.abs(inputs.astype(np.float64)).sum(axis=0)
            assert (np.abs(buffer - exact) <= comm.size * np.finfo(dtype).eps * magnitude).all()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_rank_ring_equals_reduce_scatter_and_all_gather(comm, bidirectional, rng):
    inputs = rng.integers(0, 100, (comm.size, 64 * comm.size)).astype(np.float32)
    total = inputs.sum(axis=0)
    whole, halves = inputs[comm.rank].copy(), inputs[comm.rank].copy()
    with count_traffic(comm) as traffic:
        collectives.ring_allreduce(comm, whole, bidirectional=bidirectional)
    assert np.array_equal(whole, total)
    assert traffic.sent_bytes == 2 * (comm.size - 1) * whole.nbytes // comm.size
    ranges = split(halves.size, comm.size, 4)
    local_slice = ranges[comm.rank].slice
    collectives.reduce_scatter(comm, halves, ranges, bidirectional=bidirectional)
    assert np.array_equal(halves[local_slice], total[local_slice])
    collectives.all_gather(comm, halves, ranges, bidirectional=bidirectional)
    assert np.array_equal(halves, total)


def test_rank_hierarchical_allreduce_over_declared_nodes(comm, rng):
    """Nodes have one or two ranks, and there are one or several segments.

    With an odd number of ranks the last node is smaller.
    """
    for ranks_per_node in (1, 2):
        declared = comm.dup()
        declared.declared_node = comm.rank // ranks_per_node
        assert declared.nodes().count == -(-comm.size // ranks_per_node)
        for count in (*COUNTS, 700_001):
            inputs = rng.standard_normal((comm.size, count))
            buffer, again = inputs[comm.rank].copy(), inputs[comm.rank].copy()
            collectives.hierarchical_allreduce(declared, buffer)
            assert_same_bits_everywhere(comm, buffer)
            assert np.allclose(buffer, inputs.sum(axis=0), rtol=0, atol=1e-13)
            collectives.hierarchical_allreduce(declared, again)
            assert np.array_equal(buffer, again)
        declared.free()


@pytest.mark.parametrize(("segment_bytes", "counts"), [(1000, (0, 5, 3000, 20_003)), (60_000, (100_003, 700_001))])
def test_rank_segmented_allreduce_has_the_same_bits(comm, segment_bytes, counts, rng):
    """There are long and short messages with many in flight, so both eager and rendezvous protocols are used."""
    ways = {
        "ring": collectives.ring_allreduce,
        "ring in both directions": functools.partial(collectives.ring_allreduce, bidirectional=True),
        "circulant": collectives.circulant_allreduce,
        "double tree": collectives.double_tree_allreduce,
    }
    for count in counts:
        inputs = rng.standard_normal((comm.size, count)).astype(np.float32)
        exact = inputs.astype(np.float64).sum(axis=0)
        bound = comm.size * np.finfo(np.float32).eps * np.abs(inputs).sum(axis=0)
        for name, way in ways.items():
            buffer, whole = inputs[comm.rank].copy(), inputs[comm.rank].copy()
            with count_traffic(comm) as traffic:
                way(comm, buffer, segment_bytes=segment_bytes)
            assert (np.abs(buffer - exact) <= bound).all(), f"{name} of {count}"
            assert not traffic.unknown
            way(comm, whole, segment_bytes=1 << 30)
            assert np.array_equal(buffer, whole), f"{name} of {count}"
            assert_same_bits_everywhere(comm, buffer)
        buffer = inputs[comm.rank].copy()
        collectives.rabenseifner_allreduce(comm, buffer, halves_bytes=0)
        assert (np.abs(buffer - exact) <= bound).all()
        assert_same_bits_everywhere(comm, buffer)


@pytest.mark.parametrize("algorithm", [*BROADCAST, "auto"])
def test_rank_broadcast_from_every_root_is_exact(comm, algorithm, rng):
    for dtype in (np.float64, FLOATS["bfloat16"], INTEGERS["uint8"]):
        for count in COUNTS:
            inputs = rng.standard_normal((comm.size, count)).astype(dtype)
            for root in {0, comm.size - 1}:
                buffer = inputs[comm.rank].copy()
                collectives.broadcast(comm, buffer, root, algorithm)
                assert buffer.tobytes() == inputs[root].tobytes(), f"{count} {dtype} from {root}"


@pytest.mark.parametrize("algorithm", ALL_TO_ALL)
def test_rank_all_to_all_of_uneven_parts_is_exact(comm, algorithm, rng):
    for dtype in (np.float64, FLOATS["float16"]):
        for block in (0, 1, 37, 30_001):
            values = rng.standard_normal((comm.size, comm.size, block)).astype(dtype)  # (from, to, elements)
            ranges = [Range(block * rank, block * (rank + 1)) for rank in range(comm.size)]
            received = np.empty(block * comm.size, dtype)
            collectives.all_to_all(comm, values[comm.rank].reshape(-1), received, ranges, ranges, algorithm)
            assert np.array_equal(received, values[:, comm.rank].reshape(-1))


def test_rank_bad_calls_are_rejected_before_any_message(comm):
    with pytest.raises(UsageError, match="choose one of native, ring"):
        collectives.allreduce(comm, np.zeros(4), "butterfly")
    for algorithm in ALLREDUCE:
        with pytest.raises(UsageError, match="choose one of sum, max, min"):
            collectives.allreduce(comm, np.zeros(4), algorithm, "mean")
        with pytest.raises(BufferHandoverError, match="float32"):
            collectives.allreduce(comm, np.zeros(4, complex), algorithm)
        with count_traffic(comm) as traffic:
            collectives.allreduce(comm, np.ones(0, np.float32), algorithm)
        assert traffic.sent_bytes == 0
