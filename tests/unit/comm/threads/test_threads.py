"""Ranks as threads: messages, matching, collectives, sub-communicators, release after a failure."""

import numpy as np
import pytest

from harness.marks import cases, on_threads
from hpcdist.arrays.ranges import Range, split
from hpcdist.comm.communicator import ANY
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import BufferHandoverError, CommunicationError, DeadlineError

SIZES = [1, 2, 3, 4, 7]


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_sendrecv_ring_delivers_data_of_the_left_neighbour(comm, size):
    received = np.zeros(5)
    comm.sendrecv(np.full(5, float(comm.rank)), (comm.rank + 1) % size, received, (comm.rank - 1) % size)
    assert (received == (comm.rank - 1) % size).all()


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_native_collectives_match_reference(comm, size):
    ranges = split(50, size, 8)
    data = np.arange(50.0) + comm.rank
    total = np.arange(50.0) * size + size * (size - 1) / 2
    summed = data.copy()
    comm.allreduce(summed)
    assert np.array_equal(summed, total)
    comm.reduce_scatter(data, ranges)
    local_slice = ranges[comm.rank].slice
    assert np.array_equal(data[local_slice], total[local_slice])
    comm.all_gather(data, ranges)
    assert np.array_equal(data, total)
    sent, got = np.full(size, float(comm.rank)), np.zeros(size)
    each = [Range(q, q + 1) for q in range(size)]
    comm.all_to_all(sent, got, each, each)
    assert np.array_equal(got, np.arange(float(size)))
    comm.broadcast(got, root=size - 1)
    assert comm.allgather_object(comm.rank) == list(range(size))
    assert comm.broadcast_object(comm.rank, root=size - 1) == size - 1


@on_threads(2)
def test_tags_and_matched_probe_separate_messages(comm):
    if comm.rank == 0:
        comm.send(np.array([1, 2], np.int32), 1, tag=7)
        comm.send(np.array([3], np.int32), 1, tag=8)
    else:
        late = np.zeros(1, np.int32)
        comm.recv(late, 0, tag=8)
        message = comm.probe(ANY, ANY)
        assert (message.source, message.tag, message.nbytes) == (0, 7, 8)
        early = np.zeros(2, np.int32)
        message.recv(early)
        assert late.tolist() == [3] and early.tolist() == [1, 2]


@on_threads(2)
def test_poll_takes_arrived_message_without_waiting(comm):
    if comm.rank == 0:
        assert comm.poll() is None
        comm.barrier()
        comm.barrier()
        assert comm.poll(1, tag=8) is None
        message = comm.poll(ANY, ANY)
        assert message is not None and (message.source, message.tag, message.nbytes) == (1, 7, 8)
        assert comm.poll() is None, "taken out of the matching"
        received = np.zeros(2, np.int32)
        message.recv(received)
        assert received.tolist() == [1, 2]
    else:
        comm.barrier()
        comm.send(np.array([1, 2], np.int32), 0, tag=7)
        comm.barrier()


@on_threads(3)
def test_requests_complete_in_any_order(comm):
    if comm.rank == 0:
        buffers = [np.zeros(1), np.zeros(1)]
        requests = [comm.irecv(buffers[0], 1, tag=1), comm.irecv(buffers[1], 2, tag=2)]
        requests[1 - comm.wait_any(requests)].wait()
        assert [b[0] for b in buffers] == [1.0, 2.0]
    else:
        comm.isend(np.array([float(comm.rank)]), 0, tag=comm.rank).wait()


@on_threads(2)
def test_receives_match_in_posting_order(comm):
    if comm.rank == 0:
        first, second = np.zeros(1), np.zeros(1)
        requests = [comm.irecv(first, 1), comm.irecv(second, 1)]
        requests[1].wait()
        requests[0].wait()
        assert (first[0], second[0]) == (1.0, 2.0)
    else:
        comm.send(np.array([1.0]), 0)
        comm.send(np.array([2.0]), 0)


def test_wait_any_has_a_deadline():
    def body(comm):
        if comm.rank == 0:
            comm.wait_any([comm.irecv(np.zeros(1), 1)])

    with pytest.raises(DeadlineError, match="no outstanding request"):
        run_threads(2, body, deadline_s=0.2)


@on_threads(5, ranks_per_node=2)
def test_split_and_nodes_follow_colors_and_declared_nodes(comm):
    parity = comm.split(comm.rank % 2, key=-comm.rank)
    assert parity is not None and parity.allgather_object(comm.rank) == sorted(
        [r for r in range(5) if r % 2 == comm.rank % 2], reverse=True
    )
    assert (comm.split(0 if comm.rank == 3 else None) is None) == (comm.rank != 3)
    nodes = comm.nodes()
    assert (nodes.count, nodes.uniform, nodes.index) == (3, False, comm.rank // 2)
    assert nodes.intra.rank == comm.rank % 2
    assert (nodes.leaders is None) == (comm.rank % 2 == 1)


@on_threads(3)
def test_shared_memory_is_seen_by_all(comm):
    block = comm.shared(16)
    block.views[comm.rank][...] = comm.rank + 1
    comm.barrier()
    assert [int(view.sum()) for view in block.views] == [16 * (r + 1) for r in range(comm.size)]
    comm.barrier()
    block.close()


def test_first_failure_is_raised_and_releases_other_ranks():
    def body(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        if comm.rank == 0:
            comm.recv(np.zeros(1), 1)
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_threads(3, body)


def test_receive_without_message_exceeds_deadline():
    with pytest.raises(DeadlineError, match="receive from rank 1"):
        run_threads(2, lambda comm: comm.recv(np.zeros(1), 1) if comm.rank == 0 else None, deadline_s=0.2)


def test_message_of_wrong_size_is_rejected():
    def body(comm):
        comm.sendrecv(np.zeros(3), 1 - comm.rank, np.zeros(2 + comm.rank), 1 - comm.rank)

    with pytest.raises(CommunicationError, match="arrived for a buffer"):
        run_threads(2, body)


@cases(
    "buffer",
    np.zeros((2, 2)),
    np.zeros(4)[::2],
    np.zeros(2, ">f4"),
    np.zeros(2, complex),
    np.array(1.0),
    ids=["2-D", "strided", "foreign byte order", "complex", "0-D"],
)
def test_unsupported_buffers_are_rejected(buffer):
    with pytest.raises(BufferHandoverError):
        solo().send(buffer, 0)


def test_read_only_receive_buffers_are_rejected():
    buffer = np.zeros(3)
    buffer.flags.writeable = False
    solo().send(buffer, 0)
    with pytest.raises(BufferHandoverError, match="read-only"):
        solo().recv(buffer, 0)


def test_native_sums_of_16_bit_floats_are_rejected():
    with pytest.raises(BufferHandoverError, match="sums in float32"):
        solo().allreduce(np.zeros(3, np.float16))


def test_solo_is_a_world_of_one():
    comm = solo()
    data = np.arange(3.0)
    comm.allreduce(data)
    comm.send(data, 0)
    copy = np.zeros(3)
    comm.recv(copy, 0)
    assert comm.size == 1 and np.array_equal(copy, np.arange(3.0)) and comm.nodes().count == 1


@on_threads(2)
def test_traffic_count_includes_child_communicators(comm):
    nodes = comm.nodes()
    with count_traffic(comm) as traffic:
        comm.sendrecv(np.zeros(10, np.float32), 1 - comm.rank, np.zeros(10, np.float32), 1 - comm.rank)
        nodes.intra.send(np.zeros(3), 1 - comm.rank)
        nodes.intra.recv(np.zeros(3), 1 - comm.rank)
        comm.allreduce(np.zeros(4))
    assert traffic.sent_bytes == 40 + 24 and traffic.unknown == {"allreduce": 1}
    assert traffic.calls == {"sendrecv": 1, "send": 1, "recv": 1, "allreduce": 1}
