"""Watchdog deadlines: expiry, relaxation, tolerance after a process stop, and the stack files of other ranks."""

import math
import os
import threading
import time

import pytest

from harness.jobs import LIMIT_S
from hpcdist.comm.failure.watchdog import MARKER, Watchdog
from hpcdist.comm.record import flight_recorder
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.errors import ConfigurationError


class Rank:
    """A recorder and its watchdog, which sets an event instead of exiting."""

    def __init__(self, folder, rank, deadline_s, factor=4.0):
        self.recorder = Recorder(folder / f"rank-{rank:05d}.rec", rank, 2)
        self.left = threading.Event()
        self.codes = []
        self.watchdog = Watchdog(self.recorder, deadline_s, factor, self._leave)

    def _leave(self, code):
        self.codes.append(code)
        self.left.set()

    def begin(self):
        return self.recorder.begin("world", "allreduce", "float32", 3, -1, -1, 0)


@pytest.fixture
def make_rank(tmp_path):
    ranks = []

    def start_rank(rank, deadline_s, factor=4.0):
        ranks.append(Rank(tmp_path, rank, deadline_s, factor))
        return ranks[-1]

    yield start_rank
    for rank in ranks:
        rank.watchdog.stop()
        rank.recorder.close()


def test_expired_operation_ends_the_process(make_rank, tmp_path, capfd):
    rank = make_rank(0, 0.3)
    rank.begin()
    rank.watchdog.start()
    assert rank.left.wait(LIMIT_S) and rank.codes == [1]
    note = flight_recorder.read(rank.recorder.path).notes["deadline"].text
    assert "allreduce #1 on world, 3 x float32, at " in note and "the deadline is 0.3 s" in note
    stacks = (tmp_path / "rank-00000.stacks").read_text()
    assert "test_expired_operation_ends_the_process" in stacks and note in stacks
    stderr = capfd.readouterr().err
    assert "rank 0 waited past its deadline" in stderr and note in stderr
    assert f"hpcdist hang {tmp_path.parent}" in stderr and "Current thread" in stderr


def test_other_ranks_write_stacks_after_an_expired_deadline(make_rank, tmp_path):
    absent, waiting = make_rank(1, 0.5), make_rank(0, 0.5)
    absent.watchdog.start()
    waiting.begin()
    waiting.watchdog.start()
    assert waiting.left.wait(LIMIT_S)
    stacks = (tmp_path / "rank-00001.stacks").read_text()
    assert "the deadline of another rank has passed: rank 0: allreduce #1" in stacks
    assert "Current thread" in stacks and not absent.left.is_set()
    assert stacks.count("the deadline of another rank") == 1


def test_two_expired_ranks_print_one_report(make_rank, capfd):
    ranks = [make_rank(0, 0.3), make_rank(1, 0.3)]
    for rank in ranks:
        rank.begin()
        rank.watchdog.start()
    assert all(rank.left.wait(LIMIT_S) for rank in ranks)
    assert capfd.readouterr().err.count("waited past its deadline") == 1
    assert all("deadline" in flight_recorder.read(rank.recorder.path).notes for rank in ranks)


def test_marker_of_an_earlier_run_is_ignored(make_rank, tmp_path):
    (tmp_path / MARKER).write_text("long ago")
    rank = make_rank(0, 0.3)
    rank.watchdog.start()
    time.sleep(0.5)
    assert not (tmp_path / "rank-00000.stacks").exists()
    rank.begin()
    assert rank.left.wait(LIMIT_S)
    assert (tmp_path / MARKER).read_text().startswith("rank 0: allreduce")


def test_communicator_limit_expires_before_the_general_deadline(make_rank):
    rank = make_rank(0, 6.0)
    rank.begin()
    rank.recorder.begin("world/torch10", "allreduce", "float32", 3, -1, -1, 0)
    rank.recorder.begin("world/torch1/messages", "recv", "float32", 3, -1, -1, 0)
    rank.watchdog.limit("world/torch1", 0.3)
    rank.watchdog.start()
    assert rank.left.wait(LIMIT_S) and rank.codes == [1]
    note = flight_recorder.read(rank.recorder.path).notes["deadline"].text
    assert "recv #1 on world/torch1/messages" in note and "the deadline is 0.3 s" in note


def test_ended_operations_have_no_deadline(make_rank):
    rank = make_rank(0, 0.2)
    rank.watchdog.start()
    for _ in range(40):
        rank.recorder.end(rank.begin())
        time.sleep(0.02)
    assert not rank.left.is_set()


@pytest.mark.full
def test_relaxed_deadline_applies_until_tightened(make_rank):
    rank = make_rank(0, 0.2, 1e6)
    rank.watchdog.relax()
    rank.watchdog.start()
    rank.begin()
    time.sleep(1)
    assert not rank.left.is_set()
    rank.watchdog.tighten()
    assert rank.left.wait(LIMIT_S)


def test_stopped_process_does_not_expire_when_continued(make_rank):
    # A continued process sees its clock jump past the deadline between two checks.
    rank = make_rank(0, 10)
    hour = 3600 * 1_000_000_000
    now = time.monotonic_ns()
    assert rank.watchdog._late(now + hour, now, 0, token=0)
    assert not rank.watchdog._late(now + hour, now, now + hour, token=0)


def test_heartbeat_is_written_until_stop(make_rank):
    rank = make_rank(0, 0.5)
    rank.watchdog.start()
    first = flight_recorder.read(rank.recorder.path)
    assert first.next_beat_ns == 50_000_000
    deadline = time.monotonic() + LIMIT_S
    while flight_recorder.read(rank.recorder.path).beat_ns <= first.beat_ns:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rank.watchdog.stop()
    assert flight_recorder.read(rank.recorder.path).next_beat_ns == 0


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.nan])
def test_deadline_must_be_positive(make_rank, deadline_s):
    with pytest.raises(ConfigurationError, match="deadline_s"):
        make_rank(0, deadline_s)


def test_infinite_deadline_never_expires(make_rank):
    rank = make_rank(0, math.inf)
    rank.begin()
    rank.watchdog.start()
    assert not rank.left.wait(0.2)
    assert os.getpid() == flight_recorder.read(rank.recorder.path).pid
