"""All-to-all algorithms, and the allreduce built on one: 16 bits in messages, one rounding, sums in rank order."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import ALL_TO_ALL, all_to_all, all_to_all_allreduce
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, UsageError

SIZES = [*range(1, 10), 13, 16]


def end_to_end(sizes):
    """Return ranges of ``sizes`` with a gap of one element between them."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)])
    return [Range(int(start), int(start) + size) for start, size in zip(starts, sizes, strict=False)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("size", range(1, 9))
@on_threads("size")
def test_all_to_all_allreduce_sends_the_bytes_of_a_ring(comm, size, dtype):
    buffer = np.full(64 * size, comm.rank, dtype)
    with count_traffic(comm) as traffic:
        all_to_all_allreduce(comm, buffer)
    assert (buffer == size * (size - 1) / 2).all()
    assert traffic.sent_bytes == 2 * (size - 1) * buffer.nbytes // size


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_to_all_allreduce_rounds_float32_sum_once(size, dtype, rng):
    inputs = rng.standard_normal((size, 1000)).astype(dtype)
    total = inputs[0].astype(np.float32)
    for addend in inputs[1:]:
        total += addend.astype(np.float32)

    def body(comm):
        buffer = inputs[comm.rank].copy()
        all_to_all_allreduce(comm, buffer)
        assert np.array_equal(buffer, total.astype(dtype))

    run_threads(size, body)


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("algorithm", ALL_TO_ALL)
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_with_equal_blocks(size, algorithm, dtype, rng):
    for block in (0, 1, 37):
        values = rng.integers(0, 200, (size, size, block)).astype(dtype)  # (from, to, elements)

        def body(comm, values=values, block=block):
            ranges = end_to_end([block] * size)
            send, receive = np.zeros(size * (block + 1), dtype), np.full(size * (block + 1), 99, dtype)
            for to, part in enumerate(ranges):
                send[part.slice] = values[comm.rank, to]
            before = send.copy()
            send.flags.writeable = False
            with count_traffic(comm) as traffic:
                all_to_all(comm, send, receive, ranges, ranges, algorithm)
            for source, part in enumerate(ranges):
                assert np.array_equal(receive[part.slice], values[source, comm.rank])
                assert receive[part.stop] == np.array(99).astype(dtype)  # the gap
            assert np.array_equal(send, before)
            passed_on = sum(bin(distance).count("1") for distance in range(size))
            blocks = passed_on if algorithm == "bruck" else size - 1
            if algorithm != "hierarchical":
                assert traffic.sent_bytes == blocks * block * send.itemsize
            if algorithm in ("pairwise", "bruck"):
                assert traffic.calls["sendrecv"] == ((size - 1).bit_length() if algorithm == "bruck" else size - 1)

        run_threads(size, body)


@pytest.mark.parametrize("algorithm", [name for name in ALL_TO_ALL if name != "bruck"])
@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_all_to_all_with_unequal_blocks(comm, size, algorithm, rng):
    sizes = rng.integers(0, 20, (size, size))  # (from, to)
    values = [[rng.standard_normal(count) for count in row] for row in sizes]
    outgoing, incoming = end_to_end(sizes[comm.rank].tolist()), end_to_end(sizes[:, comm.rank].tolist())
    send, receive = np.zeros(outgoing[-1].stop), np.zeros(incoming[-1].stop)
    for to, part in enumerate(outgoing):
        send[part.slice] = values[comm.rank][to]
    with count_traffic(comm) as traffic:
        all_to_all(comm, send, receive, outgoing, incoming, algorithm)
    for source, part in enumerate(incoming):
        assert np.array_equal(receive[part.slice], values[source][comm.rank])
    if algorithm in ("native", "pairwise"):
        assert traffic.sent_bytes == 8 * (sizes[comm.rank].sum() - sizes[comm.rank, comm.rank])


@on_threads(3)
def test_all_to_all_rejects_bad_calls_before_sending(comm):
    thirds = [Range(0, 2), Range(2, 4), Range(4, 6)]
    unequal = [Range(0, 1), Range(1, 4), Range(4, 6)]
    send, receive = np.zeros(6), np.zeros(6)
    with count_traffic(comm) as traffic:
        for name in ("ring", "node_shared"):  # names of allreduce algorithms
            with pytest.raises(UsageError, match=f"'{name}' is unknown; choose one of native, pairwise, bruck, hier"):
                all_to_all(comm, send, receive, thirds, thirds, name)
        with pytest.raises(UsageError, match=r"ranges of equal size, got the sizes \[1, 2, 3\]; use pairwise"):
            all_to_all(comm, send, receive, unequal, unequal, "bruck")
        for name in ALL_TO_ALL:
            call = partial(all_to_all, algorithm=name)
            with pytest.raises(UsageError, match="one range of the buffer for each rank"):
                call(comm, send, receive[:5], thirds, thirds)
            with pytest.raises(UsageError, match="one range of the buffer for each rank"):
                call(comm, send, receive, thirds[:2], thirds)
            with pytest.raises(UsageError, match=f"rank {comm.rank} sends itself 2 elements, but receives 1;"):
                call(comm, send, receive, thirds, [Range(part.start, part.start + 1) for part in thirds])
            with pytest.raises(
                BufferHandoverError, match="of equal dtype, got .*float64, .* receive buffer of float32"
            ):
                call(comm, send, receive.astype(np.float32), thirds, thirds)
            with pytest.raises(BufferHandoverError, match="1-D contiguous"):
                call(comm, np.zeros((3, 2)), receive, thirds, thirds)
    assert not traffic.calls


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (5, 2), (7, 3), (6, 1), (8, 4)])
def test_hierarchical_sends_one_message_between_two_nodes(size, per_node, rng):
    """Nodes may have unequal numbers of ranks, and blocks may be empty."""
    sizes = rng.integers(0, 4, (size, size))

    def body(comm):
        outgoing, incoming = end_to_end(sizes[comm.rank].tolist()), end_to_end(sizes[:, comm.rank].tolist())
        send, receive = np.full(outgoing[-1].stop, np.nan), np.full(incoming[-1].stop, np.nan)
        for to, part in enumerate(outgoing):
            send[part.slice] = 100 * comm.rank + to + np.arange(part.size) / 8
        all_to_all(comm, send, receive, outgoing, incoming, "hierarchical")  # memory is shared
        with count_traffic(comm) as traffic:
            all_to_all(comm, send, receive, outgoing, incoming, "hierarchical")
        for source, part in enumerate(incoming):
            assert np.array_equal(receive[part.slice], 100 * source + comm.rank + np.arange(part.size) / 8)
        return traffic.calls["isend"]

    nodes = -(-size // per_node)
    assert sum(run_threads(size, body, per_node)) == nodes * (nodes - 1)
