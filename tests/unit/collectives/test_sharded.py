"""Shares of every algorithm tile the buffer, are summed at their owners, and are gathered; and their traffic."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.dtypes import FLOATS
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.collectives import SHARDED
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.transport import NULL_SINK
from hpcdist.errors import BufferHandoverError, UsageError

SIZES = range(1, 9)
NODES = (None, 2, 3)  # ranks per node
COUNTS = (0, 1, 5, 33, 1001)
NUMPY = {"sum": np.add, "max": np.maximum}


def assert_tiled(shares, size, itemsize):
    ordered = sorted(shares)
    assert ordered[0].start == 0 and ordered[-1].stop == size
    assert all(a.stop == b.start for a, b in zip(ordered, ordered[1:], strict=False))
    assert all(part.start * itemsize % ALIGN_BYTES == 0 for part in shares if part)


def nodes_for(algorithm, ranks_per_node):
    """Return the number of ranks per node to declare, or None for one node, which shared memory needs."""
    return None if algorithm == "node_shared" else ranks_per_node


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks_per_node", NODES)
@pytest.mark.parametrize("algorithm", SHARDED)
def test_shares_are_reduced_and_gathered(algorithm, ranks_per_node, size, rng):
    sharding = SHARDED[algorithm]
    dtypes = (np.float32, np.float64, np.int64)
    cases = [(op, (10 * rng.standard_normal((size, n))).astype(d)) for op in NUMPY for d in dtypes for n in COUNTS]

    def body(comm):
        seen = []
        for op, inputs in cases:
            buffer = inputs[comm.rank].copy()
            shares = sharding.shares(comm, buffer.size, buffer.itemsize)
            assert shares == sharding.shares(comm, buffer.size, buffer.itemsize)
            assert_tiled(shares, buffer.size, buffer.itemsize)
            exact = NUMPY[op].reduce(inputs.astype(np.float64))
            eps = np.finfo(buffer.dtype).eps if buffer.dtype.kind == "f" and op == "sum" else 0.0
            bound = size * eps * np.abs(inputs.astype(np.float64)).sum(axis=0)
            local_slice = shares[comm.rank].slice
            sharding.reduce_scatter(comm, buffer, shares, op)
            assert (np.abs(buffer[local_slice] - exact[local_slice]) <= bound[local_slice]).all(), (
                f"{op} of {buffer.size} {buffer.dtype}"
            )
            kept = buffer[local_slice].copy()
            buffer[: shares[comm.rank].start] = 99
            buffer[shares[comm.rank].stop :] = 99
            sharding.all_gather(comm, buffer, shares)
            assert np.array_equal(buffer[local_slice], kept)
            assert (np.abs(buffer - exact) <= bound).all(), f"{op} of {buffer.size} {buffer.dtype}"
            digests = comm.allgather_object(buffer.tobytes())
            assert len(set(digests)) == 1
            seen.append(shares)
        return seen

    everyone = run_threads(size, body, nodes_for(algorithm, ranks_per_node))
    assert all(seen == everyone[0] for seen in everyone), "the ranks disagree about the owners"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", SHARDED)
def test_16_bit_shares_are_summed_in_float32_and_rounded_once(algorithm, size, rng):
    for dtype in (FLOATS["float16"], FLOATS["bfloat16"]):
        inputs = rng.standard_normal((size, 777)).astype(dtype)
        total = inputs[0].astype(np.float32)
        for row in inputs[1:]:
            total += row.astype(np.float32)
        expected = total.astype(dtype)

        def body(comm, inputs=inputs, expected=expected):
            buffer = inputs[comm.rank].copy()
            shares = SHARDED[algorithm].shares(comm, buffer.size, 2)
            local_slice = shares[comm.rank].slice
            elsewhere = np.empty_like(buffer[local_slice])
            SHARDED[algorithm].reduce_scatter(comm, buffer, shares, result=elsewhere)
            assert buffer.tobytes() == inputs[comm.rank].tobytes()
            SHARDED[algorithm].reduce_scatter(comm, buffer, shares)
            assert buffer[local_slice].tobytes() == elsewhere.tobytes() == expected[local_slice].tobytes()
            SHARDED[algorithm].all_gather(comm, buffer, shares)
            assert buffer.tobytes() == expected.tobytes()

        run_threads(size, body, nodes_for(algorithm, 2))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("algorithm", SHARDED)
def test_invalid_calls_are_rejected(algorithm, size):
    sharding = SHARDED[algorithm]

    def call_reduce_scatter(buffer, op, result=None):
        def body(comm):
            sharding.reduce_scatter(comm, buffer, sharding.shares(comm, buffer.size, buffer.itemsize), op, result)

        run_threads(size, body)

    with pytest.raises(UsageError, match="reduction 'mean' is unknown"):
        call_reduce_scatter(np.zeros(64), "mean")
    with pytest.raises(BufferHandoverError, match="1-D contiguous"):
        call_reduce_scatter(np.zeros(64)[::2], "sum")
    with pytest.raises(UsageError, match=r"the result has 1 elements of float64, but .*; size and dtype must be equal"):
        call_reduce_scatter(np.zeros(64), "sum", np.zeros(1))
    with pytest.raises(BufferHandoverError, match="1-D contiguous"):
        run_threads(size, lambda comm: sharding.all_gather(comm, np.zeros((4, 4)), sharding.shares(comm, 16, 8)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # 16-bit values are sent as 16 bits
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_each_ring_half_sends_p_minus_one_over_p(comm, size, dtype):
    buffer = np.ones(32 * size, FLOATS[dtype])
    shares = SHARDED["ring"].shares(comm, buffer.size, buffer.itemsize)
    for call in (SHARDED["ring"].reduce_scatter, SHARDED["ring"].all_gather):
        with count_traffic(comm) as traffic:
            call(comm, buffer, shares)
        assert traffic.sent_bytes == buffer.nbytes * (size - 1) // size
        assert not traffic.unknown
    assert (buffer == size).all()


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (3, 2), (1, 4), (4, 1)])
def test_hierarchical_halves_bytes_match_formula(nodes, per_node):
    def body(comm):
        sharding = SHARDED["hierarchical"]
        buffer = np.full(16 * comm.size, 1.0, np.float32)
        shares = sharding.shares(comm, buffer.size, 4)
        inside = buffer.nbytes * (per_node - 1) // per_node
        between = buffer.nbytes // per_node * (nodes - 1) // nodes
        for call in (sharding.reduce_scatter, sharding.all_gather):
            sent = {"peers": 0, "node": 0}
            with count_traffic(comm) as traffic:
                traffic.inner = by_name = _ByName()
                call(comm, buffer, shares)
            assert traffic.sent_bytes == inside + between
            for name in sent:
                sent[name] = sum(n for comm_name, n in by_name.sent.items() if f"/{name}" in comm_name)
            assert sent == {"peers": between, "node": inside}
        assert (buffer == comm.size).all()

    run_threads(nodes * per_node, body, per_node)


class _ByName:
    """An event sink that adds up the bytes sent by each communicator, and records the operations."""

    def __init__(self):
        self.sent = {}
        self.begun = []
        self.open = 0

    def begin(self, comm, op, dtype, count, sent_bytes, peer, tag):
        self.sent[comm] = self.sent.get(comm, 0) + sent_bytes
        self.begun.append(f"{comm} {op} {count}")
        self.open += 1
        return NULL_SINK.begin(comm, op, dtype, count, sent_bytes, peer, tag)

    def end(self, token):
        self.open -= 1


@pytest.mark.parametrize("algorithm", SHARDED)
def test_each_half_has_one_event(algorithm):
    def body(comm):
        sharding = SHARDED[algorithm]
        shares = sharding.shares(comm, 100, 8)
        comm.events = looking_on = _ByName()
        sharding.reduce_scatter(comm, np.zeros(100), shares)
        sharding.all_gather(comm, np.zeros(100), shares)
        assert looking_on.begun[0] == f"world {algorithm}_reduce_scatter 100"
        assert f"world {algorithm}_all_gather 100" in looking_on.begun
        assert sum("world " + algorithm in begun for begun in looking_on.begun) == 2
        assert looking_on.open == 0

    run_threads(4, body, nodes_for(algorithm, 2))


@on_threads(4, ranks_per_node=2)
def test_node_shared_halves_reject_several_nodes(comm):
    shares = SHARDED["node_shared"].shares(comm, 100, 8)
    comm.events = looking_on = _ByName()
    for call in (SHARDED["node_shared"].reduce_scatter, SHARDED["node_shared"].all_gather):
        with pytest.raises(UsageError, match="4 ranks of world are on 2 nodes; choose hierarchical"):
            call(comm, np.zeros(100), shares)
    assert looking_on.begun and looking_on.open == 0, "a rejected call must not leave an open event"


@pytest.mark.parametrize("algorithm", SHARDED)
@on_threads(1)
def test_halves_on_one_rank_send_nothing(comm, algorithm):
    shares = SHARDED[algorithm].shares(comm, 7, 8)
    assert shares == [Range(0, 7)]
    buffer = np.arange(7.0)
    with count_traffic(comm) as traffic:
        SHARDED[algorithm].reduce_scatter(comm, buffer, shares)
        SHARDED[algorithm].all_gather(comm, buffer, shares)
    assert not traffic.calls and np.array_equal(buffer, np.arange(7.0))


@pytest.mark.parametrize("node_of", [[0, 1, 0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0]])
def test_hierarchical_halves_with_ranks_interleaved_over_nodes(node_of, rng):
    inputs = rng.integers(0, 100, (len(node_of), 777)).astype(np.float64)

    def body(comm):
        comm.declared_node = node_of[comm.rank]  # before nodes() is called
        sharding = SHARDED["hierarchical"]
        buffer = inputs[comm.rank].copy()
        shares = sharding.shares(comm, buffer.size, 8)
        assert_tiled(shares, buffer.size, 8)
        sharding.reduce_scatter(comm, buffer, shares)
        local_slice = shares[comm.rank].slice
        assert np.array_equal(buffer[local_slice], inputs.sum(axis=0)[local_slice])
        sharding.all_gather(comm, buffer, shares)
        assert np.array_equal(buffer, inputs.sum(axis=0))
        return shares

    assert len({tuple(shares) for shares in run_threads(len(node_of), body)}) == 1


@on_threads(4, ranks_per_node=2)
def test_hierarchical_rejects_shares_of_another_algorithm(comm):
    """Shares in rank order do not form one chunk per local rank. All ranks raise the error, and none waits."""
    shares = SHARDED["ring"].shares(comm, 100, 8)
    for call in (SHARDED["hierarchical"].reduce_scatter, SHARDED["hierarchical"].all_gather):
        with pytest.raises(UsageError, match="must be the result of `Sharding.shares`"):
            call(comm, np.zeros(100), shares)
