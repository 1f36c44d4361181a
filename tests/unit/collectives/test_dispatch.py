"""The front door: the scale, what it refuses, what it settles once, and the events of a call."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist import collectives
from hpcdist.arrays.dtypes import INTEGERS
from hpcdist.collectives import ALLREDUCE, dispatch
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import BufferHandoverError, CommunicationError, UsageError


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@on_threads("size")
def test_the_result_is_multiplied_exactly_once(comm, algorithm, size, dtype):
    for count in (0, 1, 300):
        for op, expected in (("sum", size * (size + 1) / 2), ("max", size), ("min", 1)):
            buffer = np.full(count, comm.rank + 1, dtype)
            collectives.allreduce(comm, buffer, algorithm, op, scale=0.25)
            assert (buffer == 0.25 * expected).all()


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@on_threads(2)
def test_16_bits_are_scaled_before_they_are_rounded(comm, algorithm):
    """The sum is beyond the range of float16, its mean is not."""
    buffer = np.full(70, 60_000, np.float16)
    collectives.allreduce(comm, buffer, algorithm, scale=0.5)
    assert (buffer == 60_000).all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", INTEGERS.values(), ids=INTEGERS)
@on_threads("size")
def test_integers_are_not_scaled(comm, size, dtype):
    buffer = np.ones(4, dtype)
    with count_traffic(comm) as traffic, pytest.raises(UsageError, match=r"cannot be multiplied by 0\.5"):
        collectives.allreduce(comm, buffer, "ring", scale=0.5)
    assert not traffic.calls
    collectives.allreduce(comm, buffer, "ring", scale=1)
    assert (buffer == size).all()


@on_threads(2)
def test_what_was_settled_does_not_let_another_buffer_through(comm):
    """The first call settles algorithm, op and dtype; every later buffer is looked at all the same."""
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    collectives.allreduce(comm, np.zeros(4), "ring")
    for message, buffer in {
        "1-D contiguous": np.zeros(8)[::2],
        "shape": np.zeros((2, 2)),
        "read-only": read_only,
        "native byte order": np.zeros(4, ">f8"),
    }.items():
        with count_traffic(comm) as traffic, pytest.raises(BufferHandoverError, match=message):
            collectives.allreduce(comm, buffer, "ring")
        assert not traffic.calls
    unaligned = np.zeros(33, np.uint8)[1:].view(np.float64)
    unaligned[:] = 1
    collectives.allreduce(comm, unaligned, "ring")
    assert (unaligned == 2).all()


@on_threads(2)
def test_a_call_leaves_one_event_over_those_of_its_messages(comm):
    for algorithm, within in (("native", {"allreduce": 1}), ("recursive_doubling", {"sendrecv": 1})):
        for _ in range(2):  # settled now, and settled before
            with count_traffic(comm) as traffic:
                collectives.allreduce(comm, np.zeros(1), algorithm)
            assert traffic.calls == {f"{algorithm}_allreduce": 1, **within}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("checked", [False, True])
@on_threads(2, ranks_per_node=1)
def test_the_event_of_a_call_that_is_refused_ends_and_that_of_one_that_fails_does_not(comm, scale, checked, tmp_path):
    comm.events = recorder = Recorder(tmp_path / f"{comm.rank}.rec", comm.rank, comm.size)
    comm.checked = checked
    with pytest.raises(UsageError, match="choose hierarchical"):
        collectives.allreduce(comm, np.zeros(4), "node_shared", scale=scale)
    assert not recorder.running(), "the watchdog would end the job"
    with pytest.raises(CommunicationError, match=r"buffer of|different calls"):
        collectives.allreduce(comm, np.zeros(4 + comm.rank), "recursive_doubling", scale=scale)
    assert "recursive_doubling_allreduce" in recorder.describe(min(recorder.running())[1])


def test_algorithms_that_take_a_scale_are_given_it():
    def takes(comm, buffer, op="sum", *, scale=1.0):
        buffer *= scale

    def does_not(comm, buffer, op="sum"):
        buffer += 1

    assert dispatch.with_scale(takes) is takes
    buffer = np.ones(3, np.float32)
    dispatch.with_scale(does_not)(solo(), buffer, "sum", scale=0.5)
    assert (buffer == 1).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", ["native", "ring", "node_shared"])
@on_threads(2)
def test_a_product_beyond_the_range_is_infinite_without_a_warning(comm, algorithm):
    buffer = np.array([3e38, np.inf, 0, -3e38], np.float32)
    collectives.allreduce(comm, buffer, algorithm, "max", scale=4.0)
    assert buffer.tolist() == [np.inf, np.inf, 0, -np.inf]
