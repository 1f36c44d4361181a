"""Nonblocking collectives have the bits of the blocking ones, in any order of waits; failures are raised by waits."""

import contextlib
import gc
import threading

import ml_dtypes
import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import on_threads
from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import nonblocking
from hpcdist.collectives import progress as nonblocking_progress
from hpcdist.collectives.dispatch import AlgorithmTable
from hpcdist.collectives.nonblocking import PollEngine, _Operation
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import BufferHandoverError, CommunicationError, MissingCapabilityError, UsageError
from hpcdist.telemetry import hang

KINDS = sorted(nonblocking.KINDS)
SIZES = (1, 2, 3, 4)
PAIRS = [("poll", name) for name in sorted(nonblocking_progress.RESUMABLE[nonblocking_progress.ALLREDUCE])]
PAIRS += [("thread", name) for name in sorted(collectives.ALLREDUCE)]
HALVES = [("poll", name) for name in sorted(nonblocking_progress.RESUMABLE[nonblocking_progress.ALL_GATHER])]
HALVES += [("thread", name) for name in sorted(collectives.SHARDED)]


def progress_threads():
    """Return the progress threads of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("collectives of")]


def draw_inputs(rng, count, dtype=np.float32):
    return rng.standard_normal((max(SIZES), count)).astype(dtype)


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
@pytest.mark.parametrize("size", SIZES)
def test_nonblocking_allreduce_has_the_bits_of_the_blocking_one(kind, algorithm, size, rng):
    buffers = [draw_inputs(rng, count) for count in (0, 1, 5, 1000)]

    def body(comm):
        expected = [data[comm.rank].copy() for data in buffers]
        for data in expected:
            collectives.allreduce(comm, data, algorithm)
        results = [data[comm.rank].copy() for data in buffers]
        with nonblocking.begin(comm, kind) as progress:
            handles = [progress.iallreduce(data, algorithm) for data in results]
            for handle in reversed(handles):  # all in flight together, waited for in another order
                handle.wait()
                assert handle.test()
            handles[0].wait()
        assert [data.tobytes() for data in results] == [data.tobytes() for data in expected]

    run_threads(size, body, 2 if algorithm == "hierarchical" else None)


@pytest.mark.parametrize(("kind", "algorithm"), HALVES)
@pytest.mark.parametrize("size", range(1, 9))
def test_nonblocking_halves_have_the_bits_of_the_blocking_ones(kind, algorithm, size, monkeypatch):
    monkeypatch.setattr(nonblocking_progress, "SEGMENT_BYTES", 64)  # several lanes
    counts, sharding = (0, 1, 33, 1000), collectives.SHARDED[algorithm]
    draw = np.random.default_rng(size)
    buffers = [draw.standard_normal((size, count)).astype(np.float32) for count in counts]

    def body(comm):
        with nonblocking.begin(comm, kind) as progress:
            shares = [sharding.shares(comm, count, 4) for count in counts]
            expected, result = ([data[comm.rank].copy() for data in buffers] for _ in range(2))
            for data, parts in zip(expected, shares, strict=True):
                sharding.reduce_scatter(comm, data, parts)
            all_three = list(zip(result, shares, expected, strict=True))
            handles = [progress.ireduce_scatter(data, parts, algorithm) for data, parts, _ in all_three]
            for handle, (data, parts, right) in reversed(list(zip(handles, all_three, strict=True))):
                handle.wait()
                local_slice = parts[comm.rank].slice
                assert data[local_slice].tobytes() == right[local_slice].tobytes()
            for data, parts, right in all_three:
                sharding.all_gather(comm, right, parts)
                data[: parts[comm.rank].start] = data[parts[comm.rank].stop :] = 99
            handles = [progress.iall_gather(data, parts, algorithm) for data, parts, _ in all_three]
            beside = progress.iallreduce(np.ones(10), "ring")  # another operation in flight
            for handle, (data, _, right) in zip(handles, all_three, strict=True):
                handle.wait()
                assert handle.test() and data.tobytes() == right.tobytes()
            beside.wait()

    run_threads(size, body, 2 if algorithm == "hierarchical" else None)


@pytest.mark.parametrize("kind", KINDS)
@on_threads(3)
def test_nonblocking_halves_send_half_and_reject_bad_calls(comm, kind):
    data = np.ones(96 * comm.size, np.float32)
    shares = collectives.SHARDED["ring"].shares(comm, data.size, 4)
    with nonblocking.begin(comm, kind) as progress:
        for start in (progress.ireduce_scatter, progress.iall_gather):
            with count_traffic(comm) as traffic:
                start(data, shares, "ring").wait()
            assert traffic.sent_bytes == (comm.size - 1) * 96 * 4 and not traffic.unknown
        assert (data == comm.size).all()
        with pytest.raises(UsageError, match="needs one range of the buffer for each rank"):
            progress.iall_gather(data, shares[1:], "ring")
        with pytest.raises(UsageError, match=r"reduce_scatter algorithm 'rabenseifner' does not exist .*ring"):
            progress.ireduce_scatter(data, shares, "rabenseifner")
        short = (data / 3).astype(np.float16)
        if kind == "poll":
            with pytest.raises(MissingCapabilityError, match=r"float16 cannot be polled.*overlap = 'thread'"):
                progress.ireduce_scatter(short, shares, "ring")
        else:
            right = short.copy()
            collectives.SHARDED["ring"].reduce_scatter(comm, right, shares)
            progress.ireduce_scatter(short, shares, "ring").wait()
            local_slice = shares[comm.rank].slice
            assert (
                short[local_slice].tobytes() == right[local_slice].tobytes() and (short[local_slice] == comm.size).all()
            )
        halves = np.full(data.size, comm.rank, np.float16)
        progress.iall_gather(halves, shares, "ring").wait()
        assert [halves[part.start] for part in shares] == list(range(comm.size))


@pytest.mark.parametrize("kind", KINDS)
@on_threads(2, deadline_s=20)
def test_checked_halves_with_different_shares_fail_on_all_ranks(comm, kind):
    comm.checked = True
    data = np.ones(64, np.float32)
    shares = [Range(0, 32), Range(32, 64)] if comm.rank else [Range(0, 16), Range(16, 64)]
    progress = nonblocking.begin(comm, kind)
    with pytest.raises(CommunicationError, match="made different collective calls"):
        progress.iall_gather(data, shares, "ring").wait()
    with contextlib.suppress(CommunicationError):
        progress.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int64])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@on_threads(3)
def test_nonblocking_allreduce_supports_dtypes_and_reductions(comm, kind, dtype, op, rng):
    data = (3 * draw_inputs(rng, 77)).astype(dtype)
    expected, result = data[comm.rank].copy(), data[comm.rank].copy()
    collectives.allreduce(comm, expected, "ring", op)
    with nonblocking.begin(comm, kind) as progress:
        progress.iallreduce(result, "ring", op).wait()
    assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("segment_bytes", [4, 64, 1 << 20])
def test_ring_segments_change_neither_bits_nor_bytes(size, segment_bytes, rng, monkeypatch):
    monkeypatch.setattr(nonblocking_progress, "SEGMENT_BYTES", segment_bytes)
    data = draw_inputs(rng, 96 * size)
    lanes = min(nonblocking_progress.MOST_LANES, max(1, 96 * 4 // segment_bytes))

    def body(comm):
        expected, result = data[comm.rank].copy(), data[comm.rank].copy()
        collectives.allreduce(comm, expected, "ring")
        with nonblocking.begin(comm, "poll") as progress, count_traffic(comm) as traffic:
            progress.iallreduce(result, "ring").wait()
        assert result.tobytes() == expected.tobytes()
        assert traffic.sent_bytes == 2 * (size - 1) * result.nbytes // size and not traffic.unknown
        assert traffic.calls["isend"] == traffic.calls["irecv"] == 2 * (size - 1) * lanes
        assert traffic.calls["ring_iallreduce"] == 1

    run_threads(size, body)


def test_polling_progresses_only_in_tests_and_never_waits(rng):
    data = draw_inputs(rng, 1000)
    late, looked = threading.Event(), threading.Event()

    def body(comm):
        result = data[comm.rank].copy()
        with nonblocking.begin(comm, "poll") as progress:
            if comm.rank == 1:
                looked.wait(LIMIT_S)
            handle = progress.iallreduce(result, "ring")
            if comm.rank == 0:
                progress.progress()
                assert not handle.test()
                looked.set()
                late.wait(LIMIT_S)
            else:
                late.set()
            while not handle.test():
                pass
        np.testing.assert_allclose(result, data[:2].sum(axis=0), rtol=1e-5)

    run_threads(2, body)


@on_threads(2)
def test_thread_progresses_while_its_rank_is_busy(comm, rng):
    data = draw_inputs(rng, 1000)
    result = data[comm.rank].copy()
    with nonblocking.begin(comm, "thread") as progress:
        handle = progress.iallreduce(result, "ring")
        while not handle.test():  # the loop itself moves nothing
            pass
        assert progress.busy_s > 0
    np.testing.assert_allclose(result, data[:2].sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@on_threads(3)
def test_blocking_collectives_run_next_to_nonblocking_ones(comm, kind, rng):
    data = draw_inputs(rng, 500)
    first, between = data[comm.rank].copy(), data[comm.rank].copy()
    with nonblocking.begin(comm, kind) as progress, nonblocking.begin(comm, kind) as other:
        handles = [progress.iallreduce(first, "ring"), other.iallreduce(first.copy(), "ring")]
        collectives.allreduce(comm, between, "ring")
        for handle in handles:
            handle.wait()
    assert first.tobytes() == between.tobytes()


@on_threads(3)
@pytest.mark.full
def test_concurrent_polled_operations_share_no_memory(comm):
    with nonblocking.begin(comm, "poll") as one, nonblocking.begin(comm, "poll") as other:
        for _ in range(20):
            first, second = np.full(3000, 1, np.float16), np.full(3000, 100, np.float16)
            handles = [one.iallreduce(first, "ring"), other.iallreduce(second, "ring")]
            while not (handles[0].test() & handles[1].test()):  # moves both each time
                pass
            assert (first == comm.size).all() and (second == 100 * comm.size).all()


@pytest.mark.parametrize("kind", KINDS)
@on_threads(2)
def test_nonblocking_allreduce_accepts_algorithm_tables(comm, kind):
    with count_traffic(comm) as traffic, nonblocking.begin(comm, kind) as progress:
        for table in ("ring<=64,native", AlgorithmTable(("ring", "native"), (64,)), AlgorithmTable(("native",))):
            for count in (8, 9):
                data = np.ones(count)
                progress.iallreduce(data, table).wait()
                assert (data == 2).all()
        with pytest.raises(UsageError, match="'magic'.*unknown"):
            progress.iallreduce(data, "ring<=8,magic")
    assert (traffic.calls["ring_iallreduce"], traffic.calls["native_iallreduce"]) == (2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_checked_ranks_with_different_buffers_fail_before_sending(kind):
    def body(comm):
        comm.checked = True
        progress = nonblocking.begin(comm, kind)
        data = np.ones(1000 + 64 * comm.rank, np.float32)
        with pytest.raises(CommunicationError, match="made different collective calls") as caught:
            progress.iallreduce(data, "ring").wait()
        assert (data == 1).all()
        with contextlib.suppress(CommunicationError):
            progress.close()
        return str(caught.value)

    texts = run_threads(2, body, deadline_s=20)
    assert texts[0] == texts[1] and "of 1000 float32" in texts[0] and "of 1064 float32" in texts[0]


@pytest.mark.parametrize("kind", KINDS)
@on_threads(3, deadline_s=20)
def test_rejected_call_of_a_checked_rank_fails_on_all_ranks(comm, kind):
    comm.checked = True
    progress = nonblocking.begin(comm, kind)
    with pytest.raises(UsageError if comm.rank else CommunicationError, match="reduction 'mean' is unknown"):
        progress.iallreduce(np.ones(10), "ring", "mean" if comm.rank else "sum").wait()
    with contextlib.suppress(CommunicationError):
        progress.close()


@pytest.mark.parametrize("algorithm", ["ring", "native"])
@pytest.mark.parametrize("kind", KINDS)
@on_threads(3, deadline_s=20)
def test_checked_ranks_may_wait_before_the_next_call(comm, kind, algorithm):
    """Other ranks compare the next call, and move the operation that this rank waits for."""
    comm.checked = True
    first, second = np.ones(500), np.ones(70_000)
    with nonblocking.begin(comm, kind) as progress:
        handles = [progress.iallreduce(first, algorithm)]
        if comm.rank == 1:
            handles.pop().wait()
        handles.append(progress.iallreduce(second, algorithm))
        for handle in handles:
            handle.wait()
    assert (first == 3).all() and (second == 3).all()


@on_threads(2, ranks_per_node=1)
def test_event_of_a_call_rejected_by_the_thread_ends(comm, tmp_path):
    comm.events = recorder = Recorder(tmp_path / f"{comm.rank}.rec", comm.rank, comm.size)
    progress = nonblocking.begin(comm, "thread")
    with pytest.raises(UsageError, match="choose hierarchical"):
        progress.iallreduce(np.ones(10), "node_shared").wait()
    assert not recorder.running()
    with pytest.raises(UsageError, match="choose hierarchical"):
        progress.close()


@on_threads(2)
def test_event_of_a_rejected_start_ends(comm, gpu, tmp_path):
    comm.events = recorder = Recorder(tmp_path / f"{comm.rank}.rec", comm.rank, comm.size)
    buffer = backend.place(np.ones(10), "gpu")
    with (
        nonblocking.begin(comm, "thread") as progress,
        pytest.raises(BufferHandoverError, match="accepts only host buffers"),
    ):
        progress.iallreduce(buffer, "ring")
    assert not recorder.running()


class Late:
    """A request that is complete after ``times`` tests."""

    def __init__(self, times):
        self.left = times

    def wait(self):
        raise AssertionError

    def test(self):
        self.left -= 1
        return self.left <= 0


def test_poll_engine_waits_only_if_no_lane_can_progress(monkeypatch):
    """Another rank may wait for a later message of this lane before it sends the message that this rank waits for."""
    went_on = []

    def lane_waiting_for(request):
        yield [request]
        went_on.append(request)

    progress = PollEngine(solo())
    waited = []
    monkeypatch.setattr(progress.duplicate, "wait_any", waited.append)
    result, missing = Late(3), Late(float("inf"))  # complete at the look after the lanes were moved
    operation = _Operation(progress, 0, [lane_waiting_for(result), lane_waiting_for(missing)], lambda: None)
    progress._active.append(operation)
    operation.advance()
    progress.wait_a_little()
    assert not waited and not went_on
    progress.wait_a_little()
    assert waited == [[missing]] and went_on == [result]


@on_threads(2, deadline_s=20)
def test_wait_does_not_wait_for_later_operations(comm):
    """The other rank must move the later operation, and may do something else first."""
    with nonblocking.begin(comm, "poll") as progress:
        for _ in range(20):
            first, second, beside = np.ones(300), np.ones(300), np.ones(1)
            handles = [progress.iallreduce(data, "ring") for data in (first, second)]
            handles[0].wait()
            collectives.allreduce(comm, beside, "recursive_doubling")  # without a test of the second handle
            handles[1].wait()
            assert (first == 2).all() and (second == 2).all()


@pytest.mark.parametrize("kind", KINDS)
def test_failed_rank_releases_the_others(kind):
    def body(comm):
        with nonblocking.begin(comm, kind) as progress:
            if comm.rank == 1:
                raise ValueError("no gradient")
            handle = progress.iallreduce(np.zeros(10), "ring")
            with pytest.raises(CommunicationError, match="another rank failed"):
                handle.wait()
            raise CommunicationError("and the job ends")

    with pytest.raises(ValueError, match="no gradient"):
        run_threads(3, body)
    assert not progress_threads()


def start_in_different_order(comm, progress):
    """Start the same two calls in different orders on the ranks, which is an error."""
    sizes = (10, 20) if comm.rank == 0 else (20, 10)
    return [progress.iallreduce(np.zeros(size), "ring") for size in sizes]


def fail_in_step(comm, kind):
    """Return a progress engine with a failed operation, after its error was raised."""
    progress = nonblocking.begin(comm, kind)
    with pytest.raises(CommunicationError, match="arrived for a buffer of") as caught:
        [handle.wait() for handle in start_in_different_order(comm, progress)]
    assert "deliver" in [entry.name for entry in caught.traceback], "expected the traceback of the failing thread"
    return progress


@pytest.mark.parametrize("kind", KINDS)
def test_engine_rejects_operations_after_a_failure(kind):
    def body(comm):
        progress = fail_in_step(comm, kind)
        with pytest.raises(CommunicationError, match="failed before|not started"):
            progress.iallreduce(np.zeros(3), "ring").wait()
        with pytest.raises(CommunicationError):
            progress.close()

    run_threads(2, body, deadline_s=20)
    assert not progress_threads()


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_the_context_does_not_wait_for_other_ranks(kind):
    def body(comm):
        with nonblocking.begin(comm, kind) as progress:
            progress.iallreduce(np.zeros(3), "ring").wait()
            raise ValueError(f"rank {comm.rank} has an error of its own")

    with pytest.raises(ValueError, match="has an error of its own"):
        run_threads(2, body)
    assert not progress_threads()


@on_threads(2, deadline_s=20)
def test_close_raises_errors_of_unawaited_operations(comm):
    progress = nonblocking.begin(comm, "thread")
    first, second = start_in_different_order(comm, progress)
    with pytest.raises(CommunicationError, match="arrived for a buffer of"):
        progress.close()
    with pytest.raises(CommunicationError, match="arrived for a buffer of"):
        first.wait()
    with pytest.raises(CommunicationError, match="not started"):
        second.test()
    progress.close()


@pytest.mark.parametrize("kind", KINDS)
def test_recorder_detects_calls_in_different_order(kind, tmp_path):
    def body(comm):
        comm.events = recorder = Recorder(tmp_path / f"rank-{comm.rank:05d}.rec", comm.rank, comm.size)
        progress = fail_in_step(comm, kind)
        with pytest.raises(CommunicationError):
            progress.close()
        assert any("iallreduce" in recorder.describe(token) for _, token in recorder.running()), "the event has ended"

    run_threads(2, body, deadline_s=20)
    finding = hang.analyse(hang.load(tmp_path)).findings[0]
    assert finding.kind == "mismatch"
    assert "ring_iallreduce" in finding.text and "test_nonblocking.py" in finding.text


@pytest.mark.parametrize("kind", KINDS)
def test_start_after_close_is_rejected(kind):
    def body(comm):
        data = np.ones(100)
        progress = nonblocking.begin(comm, kind)
        handle = progress.iallreduce(data)
        progress.close()  # waits for operations in flight
        assert (data == comm.size).all() and handle.test()
        handle.wait()
        progress.close()
        with pytest.raises(UsageError, match="of the engine; call close"):
            progress.iallreduce(data)

    for size in (1, 3):
        run_threads(size, body)
    assert not progress_threads()


def test_thread_ends_with_the_last_reference_to_its_engine():
    progress = nonblocking.begin(solo(), "thread")
    (thread,) = progress_threads()
    assert thread.is_alive()
    del progress
    gc.collect()
    assert not thread.is_alive()


def test_process_exits_with_an_open_engine():
    code = (
        "import numpy as np\n"
        "from hpcdist.collectives import nonblocking\n"
        "from hpcdist.comm.threads.communicator import run_threads\n"
        "kept = run_threads(2, lambda comm: nonblocking.begin(comm, 'thread'))\n"
        "print('left')"
    )
    done = jobs.python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_scratch_buffer_is_reused_and_counted(kind):
    def body(comm):
        ledger = Ledger()
        collectives.account(ledger)
        try:
            with nonblocking.begin(comm, kind) as progress:
                for _ in range(3):
                    progress.iallreduce(np.ones(1024, np.float32), "ring").wait()
                during = ledger.current["communication"]
        finally:
            collectives.account(None)
        return during, ledger.peak["communication"]

    for during, peak in run_threads(2, body):
        assert during == peak == 512 * 4, "expected one chunk of the ring"


def test_unsupported_requests_are_rejected(gpu, monkeypatch):
    refusals = []
    comm = solo()
    poll, thread = nonblocking.begin(comm, "poll"), nonblocking.begin(comm, "thread")
    refusals += [
        (UsageError, "choose one of thread, poll", lambda: nonblocking.begin(comm, "magic")),
        (
            UsageError,
            "'rabenseifner' does not exist .* native, ring",
            lambda: poll.iallreduce(np.ones(3), "rabenseifner"),
        ),
        (UsageError, "reduction 'mean' is unknown", lambda: thread.iallreduce(np.ones(3), op="mean")),
        (BufferHandoverError, "1-D contiguous", lambda: poll.iallreduce(np.ones((3, 3)))),
        (BufferHandoverError, "read-only", lambda: thread.iallreduce(np.broadcast_to(np.ones(1), (1,)))),
    ]
    for kind, match, call in refusals:
        with pytest.raises(kind, match=match):
            call()
    thread.close()
    monkeypatch.setattr(comm, "supports", lambda feature: False)
    with pytest.raises(MissingCapabilityError, match=r"communication.overlap = 'poll'"):
        nonblocking.begin(comm, "thread")


@on_threads(2)
def test_thread_engine_rejects_device_memory(comm, gpu):
    buffer = backend.place(np.full(10, comm.rank + 1.0), "gpu")
    with (
        nonblocking.begin(comm, "thread") as progress,
        pytest.raises(BufferHandoverError, match="accepts only host buffers"),
    ):
        progress.iallreduce(buffer, "ring")
    with nonblocking.begin(comm, "poll") as progress:
        progress.iallreduce(buffer, "ring").wait()
    assert (backend.to_host(buffer) == 3).all()
