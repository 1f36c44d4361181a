"""The communicator over MPI: the same guarantees as for threads, at any number of ranks."""

import numpy as np
import pytest

from hpcdist.arrays.dtypes import FLOATS, INTEGERS
from hpcdist.arrays.ranges import split
from hpcdist.comm.communicator import ANY
from hpcdist.errors import BufferHandoverError


@pytest.mark.parametrize("dtype", [*FLOATS.values(), *INTEGERS.values()], ids=[*FLOATS, *INTEGERS])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_rank_messages_of_every_dtype_arrive(comm, dtype, count):
    sent = (np.arange(count) % 100 + comm.rank).astype(dtype)
    received = np.zeros(count, dtype)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.sendrecv(sent, right, received, left)
    assert np.array_equal(received, (np.arange(count) % 100 + left).astype(dtype))
    passed_on = np.zeros(count, dtype)
    requests = [comm.irecv(passed_on, left, tag=5), comm.isend(received, right, tag=5)]
    for request in requests:
        request.wait()
    assert np.array_equal(passed_on, (np.arange(count) % 100 + (comm.rank - 2) % comm.size).astype(dtype))


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_rank_native_collectives_match_numpy(comm, count):
    size = comm.size
    data = np.arange(count, dtype=np.float64) + comm.rank
    total = np.arange(count, dtype=np.float64) * size + size * (size - 1) / 2
    reduced = data.copy()
    comm.allreduce(reduced)
    assert np.array_equal(reduced, total)
    largest = data.copy()
    comm.allreduce(largest, "max")
    assert np.array_equal(largest, np.arange(count) + size - 1.0)
    ranges = split(count, size, 8)
    comm.reduce_scatter(data, ranges)
    local_slice = ranges[comm.rank].slice
    assert np.array_equal(data[local_slice], total[local_slice])
    comm.all_gather(data, ranges)
    assert np.array_equal(data, total)
    sent, received = np.full(count, comm.rank, np.int32), np.zeros(count, np.int32)
    comm.all_to_all(
        sent, np.zeros(ranges[comm.rank].size * size, np.int32), ranges, _blocks(ranges[comm.rank].size, size)
    )
    comm.broadcast(sent, root=size - 1)
    assert (sent == size - 1).all() and not received.any()


def _blocks(each, size):
    from hpcdist.arrays.ranges import Range

    return [Range(q * each, (q + 1) * each) for q in range(size)]


def test_rank_matched_probe_returns_source_tag_and_size(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.isend(np.full(3, comm.rank, np.int64), right, tag=9)
    message = comm.probe(ANY, 9)
    assert (message.source, message.tag, message.nbytes) == (left, 9, 24)
    received = np.zeros(3, np.int64)
    message.recv(received)
    request.wait()
    assert (received == left).all()


def test_rank_poll_returns_a_message_once(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    assert comm.poll(left, 11) is None
    comm.barrier()
    request = comm.isend(np.full(3, comm.rank, np.int64), right, tag=11)
    while (message := comm.poll(ANY, 11)) is None:
        pass
    assert (message.source, message.tag, message.nbytes) == (left, 11, 24)
    received = np.zeros(3, np.int64)
    message.recv(received)
    request.wait()
    assert (received == left).all() and comm.poll() is None


def test_rank_all_ranks_of_this_machine_share_a_node(comm):
    nodes = comm.nodes()
    assert nodes.count == 1 and nodes.uniform and nodes.intra.size == comm.size and nodes.peers.size == 1
    assert nodes.intra.allgather_object(comm.rank) == list(range(comm.size))


def test_rank_shared_memory_is_visible_to_all_ranks(comm):
    block = comm.nodes().intra.shared(100 + comm.rank)
    assert [view.nbytes for view in block.views] == [100 + rank for rank in range(comm.size)]
    assert not block.views[comm.rank].any()
    block.views[comm.rank][...] = comm.rank + 1
    comm.barrier()
    assert [int(view[99]) for view in block.views] == [rank + 1 for rank in range(comm.size)]
    comm.barrier()
    block.close()


def test_rank_bad_buffers_are_rejected_before_any_message(comm):
    with pytest.raises(BufferHandoverError, match="contiguous"):
        comm.allreduce(np.zeros(10)[::2])
    with pytest.raises(BufferHandoverError, match="sums in float32"):
        comm.allreduce(np.zeros(4, np.float16))


def test_rank_split_and_dup_make_separate_communicators(comm):
    half = comm.split(comm.rank % 2, key=-comm.rank)
    assert half is not None
    assert half.allgather_object(comm.rank) == sorted(
        (r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True
    )
    local_data = comm.dup()
    assert (local_data.rank, local_data.size) == (comm.rank, comm.size)
    half.free()
    local_data.free()
