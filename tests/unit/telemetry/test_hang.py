"""Who left the common path first: on records made here, in which the truth is known."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.marks import cases
from hpcdist.cli.runs.hang import command
from hpcdist.comm.record.flight_recorder import RankNote, RankRecord, RecordedEvent, Recorder
from hpcdist.errors import StorageError, UsageError
from hpcdist.telemetry.hang import Finding, analyse, load

NS = 1_000_000_000
ELSEWHERE = "a host that is not this one"


@dataclass
class Story:
    """The record of one rank, written as a story; the clock is in seconds."""

    rank: int
    world: int = 3
    pid: int = 0  # 0: a process of another host, of which only the record speaks
    beat_s: float = 0.0
    next_beat_s: float = 0.0
    notes: dict[str, RankNote] = field(default_factory=dict)
    events: list[RecordedEvent] = field(default_factory=list)

    def does(self, op, start_s, end_s=None, line=1, count=4, peer=-1, comm="world"):
        kind = RecordedEvent(comm, op, "float32", count, 0, peer, 0, 0, "", 0, 0, None).collective
        sequence = 1 + sum(event.comm == comm and event.collective == kind for event in self.events)
        self.events.append(
            RecordedEvent(
                comm, op, "float32", count, 0, peer, 0, sequence, f"train.py:{line} (step)", len(self.events) + 1,
                int(start_s * NS), None if end_s is None else int(end_s * NS),
            )
        )  # fmt: skip
        return self

    def notes_(self, kind, at_s, text=""):
        self.notes[kind] = RankNote(int(at_s * NS), text)
        return self

    def beats(self, at_s, next_s=1.0):
        self.beat_s, self.next_beat_s = at_s, next_s
        return self

    def record(self):
        host = os.uname().nodename if self.pid else ELSEWHERE
        ticks = 1 if self.pid else 0
        return RankRecord(
            Path(f"rank-{self.rank:05d}.rec"), self.rank, self.world, self.pid, host, ticks, 64, 0,
            int(self.beat_s * NS), int(self.next_beat_s * NS), self.notes, tuple(self.events),
        )  # fmt: skip


def told(*stories, now_s=1000.0):
    return analyse([story.record() for story in stories], now_ns=int(now_s * NS))


def first(report):
    finding = report.findings[0]
    print(report)
    return finding.kind, finding.ranks, finding.event.site if finding.event is not None else ""


def test_all_finished():
    stories = [Story(rank).does("barrier", 1, 2).notes_("finished", 3) for rank in range(3)]
    assert told(*stories).findings == ()


def test_a_healthy_run_that_goes_on():
    # Rank 1 computes; the others have waited for a moment only.
    waiting = [Story(rank).does("allreduce", 1, 2).does("allreduce", 3).beats(4) for rank in (0, 2)]
    report = told(*waiting, Story(1).does("allreduce", 1, 2).beats(4), now_s=5)
    assert report.findings == () and {rank.state for rank in report.ranks} == {"running"}
    later = [story.beats(29) for story in waiting]
    assert first(told(*later, Story(1).does("allreduce", 1, 2).beats(29), now_s=30))[:2] == ("absent", (1,))


def test_skipped_collective_is_a_different_operation():
    stories = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5) for rank in (0, 2)]
    skipper = Story(1).does("barrier", 1, 2).does("barrier", 3, line=6)
    assert first(told(*stories, skipper)) == ("skipped", (1,), "train.py:5 (step)")


@pytest.mark.parametrize("skipper", [0, 1])
def test_of_two_ranks_the_one_further_down_skipped(skipper):
    a = Story(skipper, world=2).does("barrier", 1, line=9)
    b = Story(1 - skipper, world=2).does("allreduce", 1, line=5)
    assert first(told(a, b)) == ("skipped", (skipper,), "train.py:5 (step)")


@pytest.mark.parametrize("skipper", [0, 1])
def test_of_two_ranks_the_one_that_broke_the_habit(skipper):
    # A loop over lines 20 (called function) and 5: rank `skipper` leaves out 20, so that line numbers say nothing.
    stories = [Story(rank, world=2) for rank in range(2)]
    for story in stories:
        for step in range(3):
            story.does("allreduce", 2 * step, 2 * step + 1, line=5).does("barrier", 2 * step + 1, 2 * step + 2, line=20)
        story.does("allreduce", 10, 11, line=5)
    stories[skipper].does("allreduce", 12, line=5)
    stories[1 - skipper].does("barrier", 12, line=20)
    assert first(told(*stories))[:2] == ("skipped", (skipper,))


def test_skipped_last_collective_and_finished():
    waiting = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5).notes_("deadline", 60) for rank in (0, 2)]
    skipper = Story(1).does("barrier", 1, 2).notes_("finished", 3, "end of the program")
    report = told(*waiting, skipper)
    assert first(report) == ("skipped", (1,), "train.py:5 (step)")
    assert "finished without it (end of the program)" in report.findings[0].text


@cases(
    "op, other, wrong",
    ("allreduce", dict(count=5), True),
    ("allreduce", dict(line=2), False),  # both branches of an if may call
    ("broadcast", dict(peer=2), True),
    ("all_to_all", dict(count=5), False),
    ("shared", dict(count=5), False),
    ("ring_allreduce", dict(count=5), True),
    ("allgather_object", dict(line=7), False),
)
def test_mismatched_arguments(op, other, wrong):
    stories = [Story(rank).does(op, 1, 2, **({} if rank != 2 else other)).notes_("finished", 3) for rank in range(3)]
    report = told(*stories)
    assert bool(report.findings) == wrong
    if wrong:
        assert first(report)[:2] == ("mismatch", (2,))


def test_the_first_mismatch_in_time_over_all_communicators():
    stories = [Story(rank).does("barrier", 1, 2, comm="a").does("allreduce", 5, comm="b") for rank in range(3)]
    stories[2] = Story(2).does("allreduce", 4, comm="a").does("barrier", 5, comm="b")
    assert told(*stories).findings[0].event == stories[0].events[0]


def test_raised_comes_before_its_echo():
    origin = Story(1).does("barrier", 1, 2).notes_("raised", 3.5, "ValueError: bad at train.py:7 (step)")
    echo = Story(0).does("barrier", 1, 2).does("allreduce", 3).notes_("raised", 3.0, "CommunicationError: peer is gone")
    killed = Story(2).does("barrier", 1, 2).does("allreduce", 3).beats(3.4)
    report = told(origin, echo, killed)
    assert first(report)[:2] == ("raised", (1,)) and "ValueError: bad" in report.findings[0].text
    assert report.findings[-1].ranks == (0,)
    assert {rank.rank: rank.state for rank in report.ranks} == {0: "raised", 1: "raised", 2: "ended"}


def test_killed_is_the_one_the_others_wait_for():
    waiting = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5).beats(4) for rank in (0, 2)]
    report = told(*waiting, Story(1).does("barrier", 1, 2).beats(3.9))
    assert first(report) == ("killed", (1,), "train.py:5 (step)")
    assert len(report.findings) == 1


def test_killed_all_together():
    report = told(*(Story(rank).does("allreduce", 1, 2).beats(4) for rank in range(3)))
    assert first(report)[:2] == ("killed", (0, 1, 2)) and len(report.findings) == 1


def test_stopped_fell_silent_long_before_the_others():
    waiting = [Story(rank).does("allreduce", 3, line=5).beats(303).notes_("deadline", 303, "waited") for rank in (0, 2)]
    assert first(told(*waiting, Story(1).beats(3))) == ("stopped", (1,), "train.py:5 (step)")
    # The same when the end of the job woke it up again, so that it ran on for a moment.
    woken = Story(1).does("allreduce", 304, 305, line=5).does("barrier", 305, line=6).beats(306)
    woken.notes_("frozen", 303.5, "was stopped for 300.5 s")
    assert first(told(*waiting, woken)) == ("stopped", (1,), "train.py:5 (step)")


def test_absent_was_alive_when_the_deadline_passed():
    waiting = [Story(rank).does("allreduce", 3, line=5).beats(303).notes_("deadline", 303) for rank in (0, 2)]
    report = told(*waiting, Story(1).does("send", 1, 2, line=3, peer=0).beats(303.2))
    assert first(report) == ("absent", (1,), "train.py:5 (step)")
    assert "after send #1 on world" in report.findings[0].text and "rank-00001.stacks" in report.findings[0].text


def test_the_chain_of_waits_is_followed_to_its_end():
    # 0 waits for 1 in a collective, 1 waits for a message of 2, 2 computes for ever.
    stories = [
        Story(0).does("barrier", 1, line=5).notes_("deadline", 300),
        Story(1).does("recv", 1, line=7, peer=2).beats(300),
        Story(2).does("send", 0, 1, line=8, peer=0).beats(300),
    ]
    assert first(told(*stories))[1:] == ((2,), "train.py:7 (step)")


def test_deadlock_of_messages():
    stories = [Story(rank).does("recv", 1, line=rank, peer=(rank + 1) % 3).notes_("deadline", 300) for rank in range(3)]
    report = told(*stories)
    assert first(report)[:2] == ("deadlock", (0, 1, 2))
    assert "rank 2 waits in recv #1 on world, 4 x float32, peer 0, at train.py:2 (step)" in report.findings[0].text


@pytest.mark.parametrize("state", ["stopped", "silent", "killed"])
def test_a_rank_that_was_stopped_within_an_exchange_is_no_deadlock(state, monkeypatch):
    stories = [Story(rank, 2, pid=1).does("recv", 1, line=rank, peer=1 - rank).beats(90) for rank in range(2)]
    letters = {0: "S", 1: {"stopped": "T", "silent": None, "killed": ""}[state]}
    if state == "silent":
        stories[1].beats(3)
    monkeypatch.setattr(RankRecord, "process_state", lambda self: letters[self.rank])
    report = told(*stories, now_s=91)
    assert [finding.kind for finding in report.findings] == ["killed" if state == "killed" else "stopped"], report
    assert report.findings[0].ranks == (1,)


def test_a_deadlock_whose_ranks_were_all_killed_is_still_one():
    stories = [Story(rank, 2).does("recv", 1, line=rank, peer=1 - rank).beats(90) for rank in range(2)]
    assert "deadlock" in [finding.kind for finding in told(*stories).findings]


def test_peers_of_an_axis_are_its_members_in_order():
    # On axis "tp" ranks 1 and 2 are members 0 and 1.
    stories = [
        Story(0).notes_("finished", 5),
        Story(1).does("barrier", 1, 2, comm="tp").does("recv", 3, line=4, peer=1, comm="tp").notes_("deadline", 300),
        Story(2).does("barrier", 1, 2, comm="tp").beats(300),
    ]
    assert first(told(*stories)) == ("absent", (2,), "train.py:4 (step)")


def test_what_the_ring_has_lost_accuses_nobody():
    busy = Story(1).beats(300)
    for number in range(64):
        busy.does("send", 1 + number / 100, 2 + number / 100, peer=0)
    stories = [
        Story(0).does("barrier", 1, line=5).notes_("deadline", 300),
        busy,
        Story(2).does("barrier", 1).beats(300),
    ]
    assert all(finding.ranks != (1,) for finding in told(*stories).findings)


def test_missing_record():
    stories = [Story(rank).does("barrier", 1).notes_("deadline", 300) for rank in (0, 2)]
    assert first(told(*stories))[:2] == ("missing", (1,))


def test_process_that_is_gone_while_the_others_run(monkeypatch):
    monkeypatch.setattr(RankRecord, "process_state", lambda self: {0: "S", 1: "", 2: "T"}[self.rank])
    stories = [Story(rank, pid=1).does("barrier", 1, 2).does("allreduce", 3, line=5).beats(90) for rank in (0,)]
    stories += [Story(rank, pid=1).does("barrier", 1, 2).beats(4) for rank in (1, 2)]
    report = told(*stories, now_s=91)
    assert [(f.kind, f.ranks) for f in report.findings] == [("killed", (1,)), ("stopped", (2,))]
    assert {rank.rank: rank.state for rank in report.ranks} == {0: "running", 1: "killed", 2: "stopped"}


# --- files and the command ------------------------------------------------------------------------------------------


def write(folder, rank, world=2):
    folder.mkdir(exist_ok=True)
    return Recorder(folder / f"rank-{rank:05d}.rec", rank, world)


@pytest.fixture
def hung(tmp_path):
    """A run in which rank 1 makes a barrier where rank 0 makes an allreduce."""
    recorders = [write(tmp_path / "recorder", rank) for rank in range(2)]
    recorders[0].begin("world", "allreduce", "float32", 10, -1, -1, 0)
    recorders[1].begin("world", "barrier", "uint8", 0, 0, -1, 0)
    for recorder in recorders:
        recorder.close()
    return tmp_path


def test_command_names_the_rank_and_exits_with_1(hung):
    result = CliRunner().invoke(command, [str(hung)])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("SKIPPED: rank 1 made barrier #1 on world, at ")
    assert "test_hang.py:" in result.output and "where rank 0 made allreduce #1 on world, 10 x float32" in result.output


def test_command_as_json(hung):
    result = CliRunner().invoke(command, [str(hung / "recorder"), "--json"])
    value = json.loads(result.output)
    assert result.exit_code == 1 and value["wrong"] is True and value["world"] == 2
    assert value["findings"][0]["kind"] == "skipped" and value["findings"][0]["ranks"] == [1]
    assert value["findings"][0]["event"]["op"] == "allreduce"


def test_command_when_nothing_is_wrong(tmp_path):
    recorder = write(tmp_path / "recorder", 0, 1)
    recorder.end(recorder.begin("world", "barrier", "uint8", 0, 0, -1, 0))
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 0 and "nothing is wrong" in result.output and "after barrier #1" in result.output
    recorder.close()


def test_records_of_an_earlier_larger_run_are_ignored(tmp_path):
    for rank, world in ((0, 3), (1, 3), (2, 3), (0, 2), (1, 2)):
        write(tmp_path, rank, world).close()
    assert [record.rank for record in load(tmp_path)] == [0, 1]


def test_bad_directories(tmp_path):
    with pytest.raises(UsageError, match="holds no records"):
        load(tmp_path)
    (tmp_path / "rank-00000.rec").write_text("something else")
    with pytest.raises(StorageError, match="not a file of the flight recorder"):
        load(tmp_path)
    assert CliRunner().invoke(command, [str(tmp_path / "absent")]).exit_code == 2
    with pytest.raises(StorageError, match="not a file of the flight recorder"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)


def test_a_truncated_file_hides_no_other_rank(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, 3).close()
    path = tmp_path / "rank-00001.rec"
    path.write_bytes(path.read_bytes()[:5000])
    result = CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 1 and f"DAMAGED: rank 1 is not known: {path} is not a" in result.output
    assert "missing" not in result.output.lower() and "nothing is wrong" not in result.output
    assert [line.split()[0] for line in result.output.splitlines()[-2:]] == ["0", "2"]


def test_ranks_that_passed_the_deadline_in_the_same_collective_are_waiting():
    stories = [Story(rank, 2).does("allreduce", 1).notes_("deadline", 20, "19 s in allreduce") for rank in (0, 1)]
    report = analyse([story.record() for story in stories], now_ns=30 * NS)
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("waiting", (0,)), ("waiting", (1,))]
    assert "passed its deadline: 19 s in allreduce" in report.findings[0].text
    assert report.findings[0].event.op == "allreduce"


def test_live_ranks_that_stay_in_the_same_collective_are_waiting():
    stories = [Story(rank, 2).does("barrier", 1).beats(99) for rank in (0, 1)]
    report = analyse([story.record() for story in stories], now_ns=100 * NS)
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("waiting", (0,)), ("waiting", (1,))]
    assert analyse([story.record() for story in stories], patience_s=1000, now_ns=100 * NS).findings == ()


def test_finding_without_an_operation_is_a_finding():
    assert Finding("missing", (1,), "no record").event is None
