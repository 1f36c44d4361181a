"""The fixed tree: equal shards give equal bits on any number of ranks, with the bytes of a ring."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays import backend
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.algorithms.fixed_tree import FixedTree, nodes_within, shards_of, tree_sum
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import CommunicationError, UsageError

SHARDS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 23)


def recursive_sum(values, start, stop):
    """Reference implementation: the left part of a node is the largest power of two below the node's size."""
    if stop - start == 1:
        return values[start]
    width = max(2**k for k in range(10) if 2**k < stop - start)
    return recursive_sum(values, start, start + width) + recursive_sum(values, start + width, stop)


def reduce_shards(comm, inputs, op="sum", repeats=1):
    """Return the result of a tree over ``inputs`` (shards, elements). This rank adds its own shards."""
    tree = FixedTree(comm, len(inputs), op)
    local_shard = shards_of(len(inputs), comm.size)[comm.rank]
    for _ in range(repeats):
        buffer = np.empty_like(inputs[0])
        for shard in range(local_shard.start, local_shard.stop):
            buffer[...] = inputs[shard]  # one buffer for all shards, like gradients
            tree.add(shard, buffer, copy=shard < local_shard.stop - 1)
        tree.reduce(buffer)
    return buffer


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fixed_tree_bits_are_independent_of_the_number_of_ranks(shards, dtype, rng):
    inputs = (rng.standard_normal((shards, 333)) * 10.0 ** rng.integers(-6, 6, (shards, 333))).astype(dtype)
    expected = recursive_sum(inputs, 0, shards)
    if shards > 4:
        assert expected.tobytes() != inputs.sum(axis=0).tobytes(), "the order of these sums must matter"
    for size in range(1, min(shards, 8) + 1):
        for result in run_threads(size, lambda comm: reduce_shards(comm, inputs, repeats=2)):
            assert result.tobytes() == expected.tobytes(), f"{size} ranks"
    assert float(tree_sum(inputs[:, 0].astype(np.float64))) == recursive_sum(inputs.astype(np.float64), 0, shards)[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("shards", [4, 7, 8])
def test_fixed_tree_reduce_scatter_supports_any_shares(shards, dtype, rng):
    inputs = rng.standard_normal((shards, 200)).astype(dtype)
    expected = run_threads(1, lambda comm: reduce_shards(comm, inputs))[0]

    def body(comm, shares):
        tree, local_shard = FixedTree(comm, shards), shards_of(shards, comm.size)[comm.rank]
        buffer, mine = np.empty_like(inputs[0]), shares[comm.rank].slice
        for _ in range(2):
            for shard in range(local_shard.start, local_shard.stop):
                buffer[...] = inputs[shard]
                tree.add(shard, buffer, copy=shard < local_shard.stop - 1)
            tree.reduce_scatter(buffer, shares)
            assert buffer[mine].tobytes() == expected[mine].tobytes()

    for size in (1, 2, 3, 4):
        tiles = split(200, size, 64)
        for shares in (tiles, tiles[::-1], [Range(0, 200)] * size, [Range(0, 0)] * (size - 1) + [Range(7, 19)]):
            run_threads(size, lambda comm, shares=shares: body(comm, shares))


def test_fixed_tree_reduce_scatter_sends_half_of_a_ring(rng):
    inputs = rng.standard_normal((4, 4096))

    def body(comm):
        tree, local_shard = FixedTree(comm, 4), shards_of(4, comm.size)[comm.rank]
        for shard in range(local_shard.start, local_shard.stop):
            tree.add(shard, inputs[shard])
        with count_traffic(comm) as traffic:
            tree.reduce_scatter(np.empty(4096), split(4096, comm.size, 8))
        assert traffic.sent_bytes == 4096 * 8 * (comm.size - 1) // comm.size

    for size in (1, 2, 4):
        run_threads(size, body)


def test_invalid_shares_are_rejected():
    tree = FixedTree(solo(), 1)
    tree.add(0, np.ones(4))
    for shares in ([], [Range(0, 5)], [Range(0, 2), Range(2, 4)]):
        with pytest.raises(UsageError, match="4 elements on 1 ranks; pass one range within the buffer for each"):
            tree.reduce_scatter(np.ones(4), shares)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shards", [4, 7])
def test_16_bit_shards_are_summed_in_float32_and_rounded_once(dtype, shards, rng):
    inputs = rng.standard_normal((shards, 100)).astype(dtype)
    expected = recursive_sum(inputs.astype(np.float32), 0, shards).astype(dtype)
    for size in (1, 2, 3, 4):
        for result in run_threads(size, lambda comm: reduce_shards(comm, inputs, repeats=2)):
            assert result.tobytes() == expected.tobytes()


def test_nonfinite_values_and_signed_zeros_are_kept(rng):
    inputs = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float32), (6, 500))
    with np.errstate(invalid="ignore"):
        expected = recursive_sum(inputs, 0, 6)
    for size in range(1, 7):
        for result in run_threads(size, lambda comm: reduce_shards(comm, inputs)):
            assert np.array_equal(np.isnan(result), np.isnan(expected))
            there = ~np.isnan(expected)
            assert result[there].tobytes() == expected[there].tobytes()


@pytest.mark.parametrize(("op", "function"), [("max", np.max), ("min", np.min)])
def test_fixed_tree_max_and_min(op, function, rng):
    inputs = rng.integers(-1000, 1000, (5, 40))
    for size in (1, 2, 3, 5):
        for result in run_threads(size, lambda comm: reduce_shards(comm, inputs, op)):
            assert np.array_equal(result, function(inputs, axis=0))


@pytest.mark.parametrize("elements", [0, 1, 7, 17])
def test_fixed_tree_with_fewer_elements_than_ranks(elements, rng):
    inputs = rng.standard_normal((9, elements)).astype(np.float32)
    for size in (1, 2, 5, 8):
        for result in run_threads(size, lambda comm: reduce_shards(comm, inputs)):
            assert result.tobytes() == recursive_sum(inputs, 0, 9).tobytes()


def test_nodes_within_a_part_tile_it_with_maximal_nodes():
    for shards in range(1, 40):
        for start, stop in itertools.combinations(range(shards + 1), 2):
            nodes = nodes_within(shards, Range(start, stop))
            assert [node.start for node in nodes] == [start, *(node.stop for node in nodes[:-1])]
            assert nodes[-1].stop == stop
            for first, second in itertools.pairwise(nodes):
                joined = Range(first.start, second.stop)
                assert nodes_within(shards, joined) != [joined]
            assert len(nodes) <= 2 * np.log2(stop - start) + 1


@pytest.mark.parametrize(("shards", "sizes"), [(8, (1, 2, 4, 8)), (16, (2, 4)), (6, (3,)), (12, (3, 6))])
def test_one_partial_sum_per_rank_sends_the_bytes_of_a_ring(shards, sizes):
    def body(comm):
        inputs = np.ones((shards, 16 * 8 * 3), np.float32)
        with count_traffic(comm) as traffic:
            assert (reduce_shards(comm, inputs) == shards).all()
        assert not traffic.unknown
        assert traffic.sent_bytes == 2 * inputs[0].nbytes * (comm.size - 1) // comm.size

    for size in sizes:
        run_threads(size, body)


@on_threads(2)
def test_each_additional_partial_sum_is_sent_once(comm):
    inputs = np.ones((6, 64), np.float32)  # [0, 3) is (0, 2) and 2, [3, 6) is 3 and (4, 6)
    with count_traffic(comm) as traffic:
        reduce_shards(comm, inputs)
    assert traffic.sent_bytes == (2 + 1) * inputs[0].nbytes // 2


def test_partial_sums_need_one_buffer_per_binary_digit():
    tree = FixedTree(solo(), 64)
    for shard in range(64):
        tree.add(shard, np.ones(10, np.float32))
        assert len(tree._partials) == (shard + 1).bit_count()
    assert len(tree._partials) + len(tree._free) <= 7


def test_checked_mode_names_a_rank_with_a_different_call():
    def body(comm, size_of_rank_1, adds):
        comm.checked = True
        buffer = np.ones(size_of_rank_1 if comm.rank == 1 else 8, np.float32)
        tree = FixedTree(comm, comm.size)
        if adds or comm.rank != 1:
            tree.add(comm.rank, buffer)
        tree.reduce(buffer)
        assert (buffer == 3).all()

    run_threads(3, lambda comm: body(comm, 8, True))
    with pytest.raises(CommunicationError, match="fixed_tree allreduce .* of 9 float32, 3 shards"):
        run_threads(3, lambda comm: body(comm, 9, True))
    with pytest.raises(
        (CommunicationError, UsageError), match="reduce is called when rank 1 has added 0 of its shards"
    ):
        run_threads(3, lambda comm: body(comm, 8, False))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gpu_arrays_give_the_same_bits(gpu, dtype, rng):
    inputs = rng.standard_normal((7, 333)).astype(dtype)

    def body(comm):
        tree = FixedTree(comm, len(inputs))
        local_shard = shards_of(len(inputs), comm.size)[comm.rank]
        for shard in range(local_shard.start, local_shard.stop):
            buffer = backend.place(inputs[shard], "gpu")
            tree.add(shard, buffer, copy=False)
        tree.reduce(buffer)
        return backend.to_host(buffer)

    expected = run_threads(1, lambda comm: reduce_shards(comm, inputs))[0]
    for size in (1, 2, 3, 7):
        for result in run_threads(size, body):
            assert result.tobytes() == expected.tobytes()


def test_wrong_call_errors_name_the_expected_call():
    with pytest.raises(UsageError, match="2 logical shards are too few for 3 ranks"):
        run_threads(3, lambda comm: FixedTree(comm, 2))
    tree = FixedTree(solo(), 3)
    buffer = np.zeros(4, np.float32)
    tree.add(0, buffer)
    for wrong in (0, 2, 3):
        with pytest.raises(UsageError, match=f"shard {wrong} is added when rank 0 has added 1 of its shards 0 to 2"):
            tree.add(wrong, buffer)
    with pytest.raises(UsageError, match="reduce is called when rank 0 has added 1"):
        tree.reduce(buffer)
    with pytest.raises(UsageError, match="a buffer of 5 elements, but this FixedTree sums buffers of 4 elements"):
        tree.add(1, np.zeros(5, np.float32))
    with pytest.raises(UsageError, match="mean"):
        FixedTree(solo(), 3, "mean")
