"""Seconds and bytes per operation: only outermost operations count, for all threads and algorithms."""

import math
import threading
import time

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import collectives
from hpcdist.arrays.ranges import split
from hpcdist.collectives import nonblocking
from hpcdist.collectives.dispatch import ALLREDUCE
from hpcdist.comm.record.timing import BytesMoved, MessageTraffic, OperationTiming
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.comm.transport import UNKNOWN_BYTES
from hpcdist.errors import UsageError


class Listening:
    """An inner sink that keeps all events. Its tokens are zero, negative or repeated."""

    def __init__(self):
        self.began = []
        self.ended = []

    def begin(self, *event):
        self.began.append(event)
        return (0, -1, 7, 0)[len(self.began) % 4]

    def end(self, token):
        self.ended.append(token)


def begin(timing, op, count=0, sent=0, dtype="float32"):
    return timing.begin("world", op, dtype, count, sent, -1, 0)


def totals_of_ranks(ranks, work):
    """Run ``work(comm)`` on ``ranks`` threads and return the OperationTiming of each rank."""

    def timed(comm):
        comm.events = timing = OperationTiming(comm.events)
        work(comm)
        return timing

    return run_threads(ranks, timed)


def test_events_are_forwarded_with_the_inner_tokens():
    inner = Listening()
    timing = OperationTiming(inner)
    outer = begin(timing, "ring_allreduce", 4)
    first = begin(timing, "isend", 2, 8)
    for token in (begin(timing, "recv", 2), first, outer):
        timing.end(token)
    later = begin(timing, "isend")
    other = begin(timing, "isend")
    timing.end(later)
    timing.end(other)
    assert [event[1] for event in inner.began] == ["ring_allreduce", "isend", "recv", "isend", "isend"]
    assert inner.ended == [0, 7, -1, 0, -1]  # of begins -1, 7, 0, 0, -1, in the order of the ends


def test_inner_messages_count_for_the_outermost_operation(rng):
    timing = OperationTiming()
    calls = int(rng.integers(1, 9))
    for _ in range(calls):
        outer = begin(timing, "ring_allreduce", 1000)
        for _ in range(3):
            timing.end(begin(timing, "sendrecv", 10, 40))
        timing.end(outer)
    assert set(timing.totals()) == {"ring_allreduce"}
    result = timing.totals()["ring_allreduce"]
    assert (result.calls, result.bytes) == (calls, calls * 4000)
    assert timing.sent_bytes == calls * 3 * 40


def test_time_is_measured_from_begin_to_end():
    timing = OperationTiming()
    before = time.perf_counter()
    token = begin(timing, "barrier")
    begun = time.perf_counter()
    time.sleep(0.02)
    ending = time.perf_counter()
    timing.end(token)
    after = time.perf_counter()
    assert ending - begun <= timing.totals()["barrier"].seconds <= after - before


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float64", 8), ("uint8", 1)])
def test_bytes_are_the_buffer_size(dtype, item, rng):
    timing = OperationTiming()
    count = int(rng.integers(1, 1000))
    timing.end(begin(timing, "allreduce", count, UNKNOWN_BYTES, dtype))  # unknown sent bytes
    assert timing.totals()["allreduce"].bytes == count * item
    assert (timing.sent_bytes, timing.unknown_calls) == (0, 1)


@pytest.mark.parametrize(("count", "dtype"), [(0, "uint8"), (5, "complex64")])
def test_unknown_bytes_are_nan(count, dtype):
    timing = OperationTiming()
    timing.end(begin(timing, "allgather_object", 8, 8))
    timing.end(begin(timing, "allgather_object", count, UNKNOWN_BYTES, dtype))
    result = timing.totals()["allgather_object"]
    assert result.calls == 2 and math.isnan(result.bytes)


def test_nonblocking_operation_lasts_until_completion():
    timing = OperationTiming()
    one, two = begin(timing, "isend", 1, 4), begin(timing, "irecv", 1)
    outer = begin(timing, "ring_allreduce", 7)  # while both are in flight: a separate call
    timing.end(begin(timing, "sendrecv", 3, 12))
    timing.end(outer)
    time.sleep(0.01)
    assert set(timing.totals()) == {"ring_allreduce"}
    timing.end(two)
    timing.end(one)
    result = timing.totals()
    assert {op: total.calls for op, total in result.items()} == {"ring_allreduce": 1, "isend": 1, "irecv": 1}
    assert min(result["isend"].seconds, result["irecv"].seconds) >= 0.01


@pytest.mark.parametrize("op", ["ring_iallreduce", "nccl"])
def test_operation_can_be_ended_by_another_thread(op):
    timing = OperationTiming()
    token = begin(timing, op, 5)
    outer = begin(timing, "barrier")
    thread = threading.Thread(target=timing.end, args=(token,))
    thread.start()
    thread.join()
    timing.end(outer)
    assert {op: (total.calls, total.bytes) for op, total in timing.totals().items()} == {
        op: (1, 20),
        "barrier": (1, 0),
    }


def test_concurrent_threads_are_counted_completely(rng):
    timing, ready = OperationTiming(), threading.Barrier(4)
    calls = int(rng.integers(200, 2000))

    def work():
        ready.wait()
        for _ in range(calls):
            outer = begin(timing, "ring_allreduce", 2)
            timing.end(begin(timing, "send", 1, 4))
            timing.end(outer)
            timing.end(begin(timing, "send", 1, 4))
            if timing.totals():  # read while others write
                assert timing.sent_bytes > 0

    results = [threading.Thread(target=work) for _ in range(4)]
    for thread in results:
        thread.start()
    for thread in results:
        thread.join()
    totals = timing.totals()
    assert (totals["ring_allreduce"].calls, totals["ring_allreduce"].bytes) == (4 * calls, 4 * calls * 8)
    assert (totals["send"].calls, timing.sent_bytes) == (4 * calls, 4 * calls * 8)


@pytest.mark.parametrize("algorithm", [name for name in ALLREDUCE if name != "node_shared"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_allreduce_is_one_call_for_every_algorithm(algorithm, ranks, rng):
    values = rng.standard_normal(1000).astype(np.float32)

    def work(comm):
        for _ in range(3):
            collectives.allreduce(comm, values.copy(), algorithm)

    for timing in totals_of_ranks(ranks, work):
        result = timing.totals()
        assert (result[f"{algorithm}_allreduce"].calls, result[f"{algorithm}_allreduce"].bytes) == (3, 3 * 4000)
        assert result[f"{algorithm}_allreduce"].seconds > 0
        assert not {"send", "recv", "sendrecv", "isend", "irecv", "allreduce"} & set(result)


def test_native_operations_are_listed_by_name(rng):
    values = rng.standard_normal(64)

    def work(comm):
        comm.allreduce(values.copy())
        comm.reduce_scatter(values.copy(), split(64, comm.size, 8))
        comm.barrier()
        comm.allgather_object("x")

    for timing in totals_of_ranks(2, work):
        result = timing.totals()
        assert {op: total.calls for op, total in result.items()} == dict.fromkeys(
            ("allreduce", "reduce_scatter", "barrier", "allgather_object"), 1
        )
        assert result["allreduce"].bytes == 512 and result["barrier"].bytes == 0
        assert math.isnan(result["allgather_object"].bytes)
        assert timing.unknown_calls == 3


@pytest.mark.parametrize("kind", ["thread", "poll"])
def test_nonblocking_allreduce_is_counted(kind, rng):
    values = rng.standard_normal(100)

    def work(comm):
        with nonblocking.begin(comm, kind) as progress:
            handles = [progress.iallreduce(values.copy(), "ring") for _ in range(2)]
            comm.barrier()
            for handle in handles:
                handle.wait()

    for timing in totals_of_ranks(2, work):
        result = timing.totals()
        assert (result["ring_iallreduce"].calls, result["ring_iallreduce"].bytes) == (2, 1600)
        assert result["barrier"].calls == 1


def test_rejected_call_is_ended(rng):
    comm = solo()
    comm.events = timing = OperationTiming()
    with pytest.raises(UsageError):
        comm.allreduce(np.ones(3), "median")
    comm.barrier()
    assert timing.totals()["barrier"].calls == 1


def test_sent_bytes_equal_message_traffic(rng):
    values = rng.standard_normal(501)

    def work(comm):
        comm.events = traffic = MessageTraffic(comm.events)
        collectives.allreduce(comm, values.copy(), "recursive_doubling")
        comm.allreduce(values.copy())
        sent.append((traffic.sent_bytes, traffic.unknown.total()))

    sent = []
    result = totals_of_ranks(3, work)
    assert sorted(sent) == sorted((timing.sent_bytes, timing.unknown_calls) for timing in result)


@cases(
    "algorithm, moved",
    ("ring", BytesMoved(4000, 0.0, 0.0)),
    ("node_shared", BytesMoved(0, 4000.0, 0.0)),
    ("native", BytesMoved(0, 0.0, 4000.0)),
)
def test_moved_bytes_are_split_by_path(algorithm, moved, rng):
    """Each of two ranks sends a buffer in messages, reads the peer's buffer in memory, or passes it to the library."""
    values = rng.standard_normal(1000).astype(np.float32)

    def work(comm):
        collectives.allreduce(comm, values.copy(), algorithm)  # the first call creates the shared memory
        before = comm.events.moved()
        collectives.allreduce(comm, values.copy(), algorithm)
        comm.barrier()
        comm.allgather_object("no array, so that nobody knows its size")
        results.append(comm.events.moved().since(before))

    results = []
    totals_of_ranks(2, work)
    assert results == [moved] * 2


def test_received_bytes_are_not_counted_again():
    timing = OperationTiming()
    timing.end(begin(timing, "recv", 10))
    timing.end(begin(timing, "irecv", 10))
    timing.end(begin(timing, "load", 10))
    timing.end(begin(timing, "nccl_allreduce", 7))
    timing.end(begin(timing, "put", 10, 40))
    assert timing.moved() == BytesMoved(messages=40, shared=40.0, unknown=28.0)


def test_timing_without_operations_is_empty():
    timing = OperationTiming()
    assert timing.totals() == {} and timing.sent_bytes == timing.unknown_calls == 0
    begin(timing, "barrier")  # not ended
    assert timing.totals() == {}
