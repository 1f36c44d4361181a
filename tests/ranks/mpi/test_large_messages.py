"""Messages above the largest count of an MPI call. Tests lower this limit; one test sends 2^31 + 5 bytes."""

import numpy as np
import pytest

from hpcdist.arrays.ranges import Range, split
from hpcdist.comm import transport
from hpcdist.comm.communicator import ANY
from hpcdist.comm.mpi.shared_memory import available_bytes
from hpcdist.errors import CommunicationError

COUNTS = (7, 8, 15, 29, 42)  # below and above multiples of the limit of 7 elements


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(transport, "LARGEST_COUNT", 7)


def _values(count, rank, dtype=np.float32):
    return (np.arange(count) % 50 + rank).astype(dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64], ids=["uint8", "float64"])
def test_rank_messages_between_two_ranks_are_split(comm, small_limit, count, dtype):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = _values(count, comm.rank, dtype), np.zeros(count, dtype)
    comm.sendrecv(sent, right, received, left)
    assert np.array_equal(received, _values(count, left, dtype))
    request = comm.isend(sent, right, tag=5)
    received[...] = 0
    comm.recv(received, left, tag=5)
    request.wait()
    assert np.array_equal(received, _values(count, left, dtype))
    received[...] = 0
    requests = [comm.irecv(received, left, tag=5), comm.isend(sent, right, tag=5)]
    for request in requests:
        request.wait()
    assert np.array_equal(received, _values(count, left, dtype))
    if comm.size > 1 and comm.rank < 2:
        if comm.rank == 0:
            comm.send(sent, 1, tag=6)
        else:
            comm.recv(received, 0, tag=6)
            assert np.array_equal(received, _values(count, 0, dtype))


def test_rank_probe_returns_the_whole_size_of_a_large_message(comm, small_limit):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.isend(_values(29, comm.rank), right, tag=9)
    message = comm.probe(ANY, 9)
    received = np.zeros(29, np.float32)
    assert message.nbytes == received.nbytes
    message.recv(received)
    request.wait()
    assert np.array_equal(received, _values(29, left))


def test_rank_large_message_into_a_wrong_size_raises(comm, small_limit):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.isend(_values(15, comm.rank), right, tag=9)
    with pytest.raises(CommunicationError, match="a message of 60 bytes .* arrived for a buffer of 116 bytes"):
        comm.recv(np.zeros(29, np.float32), left, tag=9)
    request.wait()


@pytest.mark.parametrize("count", COUNTS)
def test_rank_native_collectives_are_split(comm, small_limit, count):
    size = comm.size
    total = sum(_values(count, rank) for rank in range(size))
    reduced = _values(count, comm.rank)
    comm.allreduce(reduced)
    assert np.array_equal(reduced, total)
    largest = _values(count, comm.rank)
    request = comm.iallreduce(largest, "max")
    request.wait()
    assert np.array_equal(largest, _values(count, size - 1))
    polled = _values(count, comm.rank)
    request = comm.iallreduce(polled)
    while not request.test():
        pass
    assert np.array_equal(polled, total)
    data = _values(count, comm.rank)
    comm.broadcast(data, size - 1)
    assert np.array_equal(data, _values(count, size - 1))


@pytest.mark.parametrize("count", COUNTS)
def test_rank_native_scatter_and_gather_are_split(comm, small_limit, count):
    size = comm.size
    total = sum(_values(count, rank) for rank in range(size))
    uneven = [min(count, rank * count // (2 * size) + 1) for rank in range(size - 1)]  # and the rest for the last rank
    starts = np.cumsum([0, *uneven, count - sum(uneven)]).tolist()
    for ranges in (split(count, size, 4, 4), [Range(*ends) for ends in zip(starts[:-1], starts[1:], strict=True)]):
        data = _values(count, comm.rank)
        comm.reduce_scatter(data, ranges)
        local_slice = ranges[comm.rank].slice
        assert np.array_equal(data[local_slice], total[local_slice])
        comm.all_gather(data, ranges)
        assert np.array_equal(data, total)


@pytest.mark.parametrize("longest", [1, 3, 9, 20])
def test_rank_native_all_to_all_is_split(comm, small_limit, longest):
    """Parts differ: some are above the limit and some below. The parts are not in rank order."""
    sizes = np.array(
        [[(source * 5 + to * 3) % (longest + 1) for to in range(comm.size)] for source in range(comm.size)]
    )

    def reversed_ranges(counts):
        stops = np.cumsum(counts[::-1])[::-1].tolist()
        return [Range(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]

    send_ranges, receive_ranges = reversed_ranges(sizes[comm.rank]), reversed_ranges(sizes[:, comm.rank])
    send, receive = np.zeros(sizes[comm.rank].sum(), np.int32), np.full(sizes[:, comm.rank].sum(), -1, np.int32)
    for to, part in enumerate(send_ranges):
        send[part.slice] = 100 * comm.rank + 10 * to + np.arange(part.size)
    comm.all_to_all(send, receive, send_ranges, receive_ranges)
    for source, part in enumerate(receive_ranges):
        assert np.array_equal(receive[part.slice], 100 * source + 10 * comm.rank + np.arange(part.size))


def test_rank_large_objects_are_split(comm, small_limit):
    values = comm.allgather_object("x" * (20 + 9 * comm.rank))
    assert values == ["x" * (20 + 9 * rank) for rank in range(comm.size)]
    assert comm.broadcast_object({"text": "y" * 31} if comm.rank == comm.size - 1 else None, comm.size - 1) == {
        "text": "y" * 31
    }


def test_rank_large_window_transfers_are_split(comm, small_limit):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    window = comm.window(40)
    sent, received = _values(29, comm.rank, np.uint8), np.zeros(29, np.uint8)
    window.put(sent, right, 5)
    window.flush(right)
    comm.barrier()
    window.sync()
    assert np.array_equal(window.memory[5:34], _values(29, left, np.uint8)) and not window.memory[34:].any()
    window.get(received, right, 5)
    window.flush(right)
    assert np.array_equal(received, sent)
    comm.barrier()
    window.close()


@pytest.mark.full
@pytest.mark.alone
def test_rank_message_above_the_largest_count_arrives(comm):
    """A broadcast of 2^31 + 5 bytes: two calls of MPI. The ranks hold 4.3 GB."""
    if not all(comm.allgather_object(available_bytes() > 12 * 2**30)):
        pytest.skip("needs 12 GiB of free memory")
    data = np.zeros(2**31 + 5, np.uint8)
    if comm.rank == 0:
        data[:: 2**20] = 3
        data[-6:] = 7
    comm.broadcast(data)
    assert (data[-6:] == 7).all() and (data[: -(2**20) : 2**20] == 3).all()
