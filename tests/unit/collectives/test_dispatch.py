"""The allreduce entry point: scaling, rejected calls, cached decisions, and the events of a call."""

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
def test_result_is_scaled_once(comm, algorithm, size, dtype):
    for count in (0, 1, 300):
        for op, expected in (("sum", size * (size + 1) / 2), ("max", size), ("min", 1)):
            buffer = np.full(count, comm.rank + 1, dtype)
            collectives.allreduce(comm, buffer, algorithm, op, scale=0.25)
            assert (buffer == 0.25 * expected).all()


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@on_threads(2)
def test_16_bit_sums_are_scaled_before_rounding(comm, algorithm):
    """The sum exceeds the range of float16, but the mean does not."""
    buffer = np.full(70, 60_000, np.float16)
    collectives.allreduce(comm, buffer, algorithm, scale=0.5)
    assert (buffer == 60_000).all()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", INTEGERS.values(), ids=INTEGERS)
@on_threads("size")
def test_scaled_integers_are_rejected(comm, size, dtype):
    buffer = np.ones(4, dtype)
    with count_traffic(comm) as traffic, pytest.raises(UsageError, match=r"cannot be multiplied by 0\.5"):
        collectives.allreduce(comm, buffer, "ring", scale=0.5)
    assert not traffic.calls
    collectives.allreduce(comm, buffer, "ring", scale=1)
    assert (buffer == size).all()


@on_threads(2)
def test_cached_decision_still_checks_every_buffer(comm):
    """The first call caches algorithm, op and dtype, but every buffer is checked."""
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
def test_call_has_one_event_in_addition_to_its_messages(comm):
    for algorithm, within in (("native", {"allreduce": 1}), ("recursive_doubling", {"sendrecv": 1})):
        for _ in range(2):  # without and with the cached decision
            with count_traffic(comm) as traffic:
                collectives.allreduce(comm, np.zeros(1), algorithm)
            assert traffic.calls == {f"{algorithm}_allreduce": 1, **within}


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("checked", [False, True])
@on_threads(2, ranks_per_node=1)
def test_event_ends_after_rejected_but_not_after_failed_calls(comm, scale, checked, tmp_path):
    comm.events = recorder = Recorder(tmp_path / f"{comm.rank}.rec", comm.rank, comm.size)
    comm.checked = checked
    with pytest.raises(UsageError, match="choose hierarchical"):
        collectives.allreduce(comm, np.zeros(4), "node_shared", scale=scale)
    assert not recorder.running(), "an open event would make the watchdog end the job"
    with pytest.raises(CommunicationError, match=r"buffer of|different collective calls"):
        collectives.allreduce(comm, np.zeros(4 + comm.rank), "recursive_doubling", scale=scale)
    assert "recursive_doubling_allreduce" in recorder.describe(min(recorder.running())[1])


def test_with_scale_supports_algorithms_with_and_without_scale():
    def scale_in_algorithm(comm, buffer, op="sum", *, scale=1.0):
        buffer *= scale

    def ignore_scale(comm, buffer, op="sum"):
        buffer += 1

    assert dispatch.with_scale(scale_in_algorithm) is scale_in_algorithm
    buffer = np.ones(3, np.float32)
    dispatch.with_scale(ignore_scale)(solo(), buffer, "sum", scale=0.5)
    assert (buffer == 1).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", ["native", "ring", "node_shared"])
@on_threads(2)
def test_scaled_overflow_is_infinite_without_a_warning(comm, algorithm):
    buffer = np.array([3e38, np.inf, 0, -3e38], np.float32)
    collectives.allreduce(comm, buffer, algorithm, "max", scale=4.0)
    assert buffer.tolist() == [np.inf, np.inf, 0, -np.inf]
