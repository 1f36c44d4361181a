"""Collectives through shared memory: no messages, the same bits on every path, and one node only."""

import numpy as np
import pytest

from harness.marks import cases, on_threads
from hpcdist import collectives
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, accumulation_dtype
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import node_shared_allreduce
from hpcdist.collectives.node import protocol, shared_memory
from hpcdist.comm.mpi.shared_memory import private_block
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, CommunicationError, MissingCapabilityError, UsageError

NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum}
FLOAT32 = np.dtype(np.float32)


def reduce_in_rank_order(inputs, op="sum"):
    """Return the reduction of the rows in order, rounded once."""
    wide = inputs.astype(accumulation_dtype(inputs.dtype))
    total = wide[0].copy()
    for row in wide[1:]:
        total = NUMPY[op](total, row)
    return total.astype(inputs.dtype)


@pytest.fixture
def small_halves(monkeypatch):
    """Make the staging areas so small that a few thousand elements need many pieces."""
    monkeypatch.setattr(shared_memory, "HALF_BYTES", 4096)
    monkeypatch.setattr(shared_memory, "SLOTS_BYTES", 2048)


@pytest.mark.parametrize("size", [2, 3, 8])
@on_threads("size")
def test_node_shared_sends_no_message(comm, size):
    buffer = np.full(1000, 2.0**comm.rank)
    node_shared_allreduce(comm, buffer)  # allocates the memory
    buffer[...] = 2.0**comm.rank
    with count_traffic(comm) as traffic:
        node_shared_allreduce(comm, buffer)
    assert (buffer == 2**size - 1).all()
    assert not traffic.calls and traffic.sent_bytes == 0


@pytest.mark.usefixtures("small_halves")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_path_gives_the_sum_in_rank_order(size, rng):
    """Small buffers, staged pieces and in-place buffers, with counts around every boundary, in random order."""
    row = 4096 // size // 64 * 16
    counts = [0, 1, 127, 128, 129, *(size * row * pieces + extra for pieces in (1, 2, 5) for extra in (-1, 0, 1))]
    inputs = {count: rng.standard_normal((size, count)).astype(np.float32) for count in counts}
    turns = rng.permutation([(count, way) for count in counts for way in range(2)])

    def body(comm):
        shared = shared_memory.allocate(comm, max(counts), FLOAT32)
        for count, way in turns:
            buffer = shared[:count] if way else np.empty(count, np.float32)
            buffer[...] = inputs[count][comm.rank]
            node_shared_allreduce(comm, buffer, scale=0.75)
            assert np.array_equal(buffer, reduce_in_rank_order(inputs[count]) * np.float32(0.75)), (count, way)

    run_threads(size, body)


@pytest.mark.usefixtures("small_halves")
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@on_threads("size")
def test_shared_reduce_scatter_and_all_gather(comm, size, op, rng):
    """Ranges may be uneven, empty, or not in rank order."""
    count = 5000
    inputs = rng.standard_normal((size, count)).astype(np.float32)
    expected = reduce_in_rank_order(inputs, op)
    cuts = [0, *sorted(rng.integers(0, count, size - 1).tolist()), count]
    uneven = [Range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    lonely = [Range(0, count), *[Range(count, count)] * (size - 1)]
    cases = [split(count, size, 4), uneven, uneven[::-1], lonely]
    shared = shared_memory.allocate(comm, count, FLOAT32)
    for ranges in cases:
        local_slice = ranges[comm.rank].slice
        for buffer in (np.empty(count, np.float32), shared):
            buffer[...] = inputs[comm.rank]
            shared_memory.reduce_scatter(comm, buffer, ranges, op)
            assert np.array_equal(buffer[local_slice], expected[local_slice])
            kept = buffer[local_slice].copy()
            buffer[...] = np.nan
            buffer[local_slice] = kept
            shared_memory.all_gather(comm, buffer, ranges)
            assert np.array_equal(buffer, expected)


@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values()], ids=[*FLOATS, *INTEGERS])
@on_threads(3)
@pytest.mark.full_except("float64")
@pytest.mark.matrix_except("float64", "float16", "bfloat16", "int16")
def test_shared_allreduce_supports_every_dtype_and_op(comm, dtype, rng):
    inputs = rng.integers(0, 30, (3, 3000)).astype(dtype)
    shared = shared_memory.allocate(comm, 3000, dtype)
    for op in NUMPY:
        for buffer in (inputs[comm.rank].copy(), shared, inputs[comm.rank][:100].copy()):
            buffer[...] = inputs[comm.rank][: buffer.size]
            node_shared_allreduce(comm, buffer, op)
            assert buffer.tobytes() == reduce_in_rank_order(inputs, op)[: buffer.size].tobytes()


@pytest.mark.parametrize("op", ["max", "min"])
@on_threads(3)
def test_shared_extremes_propagate_nan(comm, op):
    for holder in range(comm.size):
        buffer = np.arange(4.0)
        buffer[1] = np.nan if comm.rank == holder else 1
        node_shared_allreduce(comm, buffer, op)
        assert np.array_equal(np.isnan(buffer), [False, True, False, False])


@cases(
    "other, says",
    (lambda comm: node_shared_allreduce(comm, np.zeros(9)), r"rank 1: allreduce \(sum\) of 9 float64"),
    (lambda comm: node_shared_allreduce(comm, np.zeros(8, FLOAT32)), r"rank 1: .* of 8 float32"),
    (lambda comm: node_shared_allreduce(comm, np.zeros(8), "max"), r"rank 1: allreduce \(max\)"),
    (lambda comm: node_shared_allreduce(comm, np.zeros(8), scale=0.5), r"rank 1: allreduce \(sum times 0\.5\)"),
    (lambda comm: shared_memory.all_gather(comm, np.zeros(8), split(8, 2, 8)), "rank 1: all-gather"),
)
def test_different_calls_are_rejected_on_all_ranks(other, says):
    def reduce_usual(comm):
        node_shared_allreduce(comm, np.zeros(8))

    def body(comm):
        for _ in range(2):  # an error must not affect the next call
            bring = other if comm.rank else reduce_usual
            with pytest.raises(CommunicationError, match=says):
                bring(comm)
            buffer = np.ones(5000)
            node_shared_allreduce(comm, buffer)
            assert (buffer == comm.size).all()

    run_threads(2, body)


@on_threads(2)
def test_scales_are_compared_exactly(comm):
    for scales in ((-1.0, -2.0), (0.0, -0.0)):  # first equal hashes, then equal numbers
        with pytest.raises(CommunicationError, match="made different calls"):
            node_shared_allreduce(comm, np.ones(8), scale=scales[comm.rank])
    buffer = np.ones(8)
    node_shared_allreduce(comm, buffer, scale=np.nan)  # the same on all ranks, though NaN != NaN
    assert np.isnan(buffer).all()


@pytest.mark.parametrize("size", [2, 4, 5])
def test_scale_is_rounded_equally_on_every_path(size, rng):
    inputs = {dtype: rng.standard_normal((size, 40_000)).astype(dtype) for dtype in (np.float32, np.float16)}

    def body(comm):
        for dtype, brought in inputs.items():
            shared = shared_memory.allocate(comm, 40_000, np.dtype(dtype))
            expected = reduce_in_rank_order(brought.astype(np.float32)) * np.float32(1 / 3)
            for buffer in (np.empty(40_000, dtype), shared, np.empty(100, dtype)):
                buffer[...] = brought[comm.rank][: buffer.size]
                node_shared_allreduce(comm, buffer, scale=1 / 3)
                assert np.array_equal(buffer, expected[: buffer.size].astype(dtype))

    run_threads(size, body)


@on_threads(2)
def test_interrupted_collective_blocks_further_use(comm):
    """After an interrupted wait, the next call would rely on a barrier that never completed."""
    node_shared_allreduce(comm, np.zeros(4))
    if comm.rank == 0:
        block = shared_memory._memory[comm]._block
        block.check_alive = lambda since: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            node_shared_allreduce(comm, np.zeros(4))
        with pytest.raises(CommunicationError, match="was aborted"):
            node_shared_allreduce(comm, np.zeros(4))
    comm.barrier()


@pytest.mark.usefixtures("small_halves")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_common_result_has_the_bits_of_the_allreduce(size, rng):
    """In place and staged: the inputs stay, and the result has the bits of the allreduce."""
    inputs = {dtype: rng.standard_normal((size, 6000)).astype(dtype) for dtype in (np.float32, np.float16)}

    def body(comm):
        for dtype, brought in inputs.items():
            expected = reduce_in_rank_order(brought.astype(np.float32)) * np.float32(0.5)
            result = shared_memory.allocate_common(comm, 6000, np.dtype(dtype))
            for buffer in (brought[comm.rank].copy(), shared_memory.allocate(comm, 6000, np.dtype(dtype))):
                for count in (6000, 100, 0):
                    buffer[...] = brought[comm.rank]
                    comm.barrier()  # no rank reads the result of the previous call any more
                    shared_memory.allreduce_into(comm, buffer[:count], result[:count], scale=0.5)
                    assert np.array_equal(result[:count], expected[:count].astype(dtype))
                    assert np.array_equal(buffer, brought[comm.rank])
            with pytest.raises(UsageError, match="size and dtype must be equal"):
                shared_memory.allreduce_into(comm, buffer[:5], result)
            if comm.size > 1:
                with pytest.raises(UsageError, match="allocate_common"):
                    shared_memory.allreduce_into(comm, buffer, np.empty(6000, dtype))
        comm.barrier()

    run_threads(size, body)


@on_threads(2)
def test_scaled_integers_and_overlapping_ranges_are_rejected(comm):
    with pytest.raises(UsageError, match=r"int64 cannot be multiplied by 0\.5"):
        node_shared_allreduce(comm, np.ones(4, np.int64), scale=0.5)
    with pytest.raises(UsageError, match="the ranges of two ranks overlap"):
        shared_memory.reduce_scatter(comm, np.ones(4), [Range(0, 3), Range(2, 4)])


@on_threads(3)
def test_shared_buffer_on_one_rank_only_is_staged(comm):
    shared = shared_memory.allocate(comm, 20_000, FLOAT32)
    ordinary = np.empty(10_000, np.float32)
    for buffer in (shared[:10_000] if comm.rank else ordinary, shared[comm.rank * 16 :][:10_000]):
        buffer[...] = comm.rank + 1
        node_shared_allreduce(comm, buffer)
        assert (buffer == 6).all()


def test_failed_rank_releases_waits_in_shared_memory():
    def body(comm):
        node_shared_allreduce(comm, np.zeros(4))
        if comm.rank == 1:
            raise ArithmeticError("of rank 1")
        with pytest.raises(CommunicationError, match="another rank failed while this rank waited in shared memory"):
            node_shared_allreduce(comm, np.zeros(4))

    with pytest.raises(ArithmeticError):
        run_threads(3, body)


@on_threads(2, deadline_s=0.5)
def test_missing_rank_times_out(comm):
    node_shared_allreduce(comm, np.zeros(4))
    if comm.rank:
        with pytest.raises(CommunicationError, match=r"waited 0\.5 s for another rank in shared memory"):
            node_shared_allreduce(comm, np.zeros(4))


@on_threads(2)
def test_bad_buffers_are_rejected(comm):
    with pytest.raises(UsageError, match="choose one of sum, max, min"):
        node_shared_allreduce(comm, np.zeros(4), "mean")
    with pytest.raises(BufferHandoverError, match="contiguous"):
        node_shared_allreduce(comm, np.zeros(8)[::2])
    with pytest.raises(UsageError, match="one range of the buffer for each rank"):
        shared_memory.reduce_scatter(comm, np.zeros(4), [Range(0, 4)])


def test_node_shared_rejects_several_nodes():
    with pytest.raises(UsageError, match="4 ranks of world are on 2 nodes; choose hierarchical"):
        run_threads(4, lambda comm: node_shared_allreduce(comm, np.zeros(8)), ranks_per_node=2)


@on_threads(4, ranks_per_node=2)
def test_allocated_buffers_are_shared_within_each_node(comm):
    buffer = shared_memory.allocate(comm, 5000, FLOAT32)
    buffer[...] = comm.rank
    node_shared_allreduce(comm.nodes().intra, buffer)
    assert (buffer == 4 * (comm.rank // 2) + 1).all()
    collectives.release(comm)


def test_without_shared_memory_node_shared_is_rejected(monkeypatch):
    class Alone:
        def progress(self):
            raise AssertionError

        def check_alive(self, since):
            raise AssertionError

    def body(comm):
        comm._shared = lambda nbytes: private_block(comm.rank, [nbytes] * comm.size, Alone())
        assert not shared_memory.is_available(comm)
        buffer = shared_memory.allocate(comm, 100, FLOAT32)
        assert buffer.size == 100 and not buffer.any()
        with pytest.raises(MissingCapabilityError, match="cannot share memory"):
            node_shared_allreduce(comm, buffer)
        collectives.allreduce(comm, buffer, "ring")

    run_threads(2, body)


@on_threads(2)
def test_cached_memory_is_counted_and_released(comm):
    ledger = Ledger()
    collectives.account(ledger)
    for _ in range(2):
        collectives.allreduce(comm, np.zeros(1000), "node_shared")
        collectives.allreduce(comm, np.zeros(1000, np.float16), "recursive_doubling")
    shared = protocol.LINE_BYTES + 2 * shared_memory.slot_bytes(2) + 2 * shared_memory.HALF_BYTES
    assert ledger.current["communication"] == shared + 4000 * 2  # and a widened copy, a received copy
    collectives.release(comm)
    comm.allgather_object(None)  # wait until all threads have dropped the arrays
    assert ledger.current["communication"] == 0
    collectives.allreduce(comm, np.ones(10), "node_shared")
    collectives.account(None)
