"""The hang analysis names the rank that left the common path first, on made records with a known truth."""

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from harness.marks import cases
from hpcdist.cli.runs.inspect import hang as command
from hpcdist.comm.record.flight_recorder import RankNote, RankRecord, RecordedEvent, Recorder
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.comm.transport import members, note_members
from hpcdist.errors import StorageError, UsageError
from hpcdist.telemetry.hang import Finding, analyse, load
from hpcdist.telemetry.metrics.row_channel import RowChannel

NS = 1_000_000_000
ELSEWHERE = "a host that is not this one"


@dataclass
class Story:
    """The record of one rank, written as a story. Times are in seconds."""

    rank: int
    world: int = 3
    pid: int = 0  # 0: a process of another host, of which only the record speaks
    beat_s: float = 0.0
    next_beat_s: float = 0.0
    notes: dict[str, RankNote] = field(default_factory=dict)
    events: list[RecordedEvent] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

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
            int(self.beat_s * NS), int(self.next_beat_s * NS), self.notes, tuple(self.events), groups=self.groups,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def no_communicators():
    yield
    members.clear()


def analyse_stories(*stories, now_s=1000.0):
    return analyse([story.record() for story in stories], now_ns=int(now_s * NS))


def first_finding(report):
    finding = report.findings[0]
    print(report)
    return finding.kind, finding.ranks, finding.event.site if finding.event is not None else ""


def test_finished_ranks_have_no_findings():
    stories = [Story(rank).does("barrier", 1, 2).notes_("finished", 3) for rank in range(3)]
    assert analyse_stories(*stories).findings == ()


def test_running_ranks_have_no_findings():
    # Rank 1 computes; the others have waited for a moment only.
    waiting = [Story(rank).does("allreduce", 1, 2).does("allreduce", 3).beats(4) for rank in (0, 2)]
    report = analyse_stories(*waiting, Story(1).does("allreduce", 1, 2).beats(4), now_s=5)
    assert report.findings == () and {rank.state for rank in report.ranks} == {"running"}
    later = [story.beats(29) for story in waiting]
    assert first_finding(analyse_stories(*later, Story(1).does("allreduce", 1, 2).beats(29), now_s=30))[:2] == (
        "absent",
        (1,),
    )


def test_rank_with_a_different_operation_has_skipped():
    stories = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5) for rank in (0, 2)]
    skipper = Story(1).does("barrier", 1, 2).does("barrier", 3, line=6)
    assert first_finding(analyse_stories(*stories, skipper)) == ("skipped", (1,), "train.py:5 (step)")


@pytest.mark.parametrize("skipper", [0, 1])
def test_skipper_of_two_ranks_is_the_one_further_on(skipper):
    a = Story(skipper, world=2).does("barrier", 1, line=9)
    b = Story(1 - skipper, world=2).does("allreduce", 1, line=5)
    assert first_finding(analyse_stories(a, b)) == ("skipped", (skipper,), "train.py:5 (step)")


@pytest.mark.parametrize("skipper", [0, 1])
def test_skipper_of_two_ranks_is_the_one_that_broke_the_pattern(skipper):
    # A loop over lines 20 (called function) and 5: rank `skipper` leaves out 20, so that line numbers say nothing.
    stories = [Story(rank, world=2) for rank in range(2)]
    for story in stories:
        for step in range(3):
            story.does("allreduce", 2 * step, 2 * step + 1, line=5).does("barrier", 2 * step + 1, 2 * step + 2, line=20)
        story.does("allreduce", 10, 11, line=5)
    stories[skipper].does("allreduce", 12, line=5)
    stories[1 - skipper].does("barrier", 12, line=20)
    assert first_finding(analyse_stories(*stories))[:2] == ("skipped", (skipper,))


def test_rank_that_finished_without_the_last_collective_has_skipped():
    waiting = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5).notes_("deadline", 60) for rank in (0, 2)]
    skipper = Story(1).does("barrier", 1, 2).notes_("finished", 3, "end of the program")
    report = analyse_stories(*waiting, skipper)
    assert first_finding(report) == ("skipped", (1,), "train.py:5 (step)")
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
def test_mismatched_arguments_are_reported(op, other, wrong):
    stories = [Story(rank).does(op, 1, 2, **({} if rank != 2 else other)).notes_("finished", 3) for rank in range(3)]
    report = analyse_stories(*stories)
    assert bool(report.findings) == wrong
    if wrong:
        assert first_finding(report)[:2] == ("mismatch", (2,))


def test_earliest_mismatch_of_all_communicators_is_reported():
    stories = [Story(rank).does("barrier", 1, 2, comm="a").does("allreduce", 5, comm="b") for rank in range(3)]
    stories[2] = Story(2).does("allreduce", 4, comm="a").does("barrier", 5, comm="b")
    assert analyse_stories(*stories).findings[0].event == stories[0].events[0]


def test_exception_is_reported_before_its_consequences():
    origin = Story(1).does("barrier", 1, 2).notes_("raised", 3.5, "ValueError: bad at train.py:7 (step)")
    echo = Story(0).does("barrier", 1, 2).does("allreduce", 3).notes_("raised", 3.0, "CommunicationError: peer is gone")
    killed = Story(2).does("barrier", 1, 2).does("allreduce", 3).beats(3.4)
    report = analyse_stories(origin, echo, killed)
    assert first_finding(report)[:2] == ("raised", (1,)) and "ValueError: bad" in report.findings[0].text
    assert report.findings[-1].ranks == (0,)
    assert {rank.rank: rank.state for rank in report.ranks} == {0: "raised", 1: "raised", 2: "ended"}


def test_killed_rank_that_others_wait_for_is_reported():
    waiting = [Story(rank).does("barrier", 1, 2).does("allreduce", 3, line=5).beats(4) for rank in (0, 2)]
    report = analyse_stories(*waiting, Story(1).does("barrier", 1, 2).beats(3.9))
    assert first_finding(report) == ("killed", (1,), "train.py:5 (step)")
    assert len(report.findings) == 1


def test_ranks_killed_together_are_one_finding():
    report = analyse_stories(*(Story(rank).does("allreduce", 1, 2).beats(4) for rank in range(3)))
    assert first_finding(report)[:2] == ("killed", (0, 1, 2)) and len(report.findings) == 1


def test_rank_without_heartbeats_is_stopped():
    waiting = [Story(rank).does("allreduce", 3, line=5).beats(303).notes_("deadline", 303, "waited") for rank in (0, 2)]
    assert first_finding(analyse_stories(*waiting, Story(1).beats(3))) == ("stopped", (1,), "train.py:5 (step)")
    # The same when the end of the job woke it up again, so that it ran on for a moment.
    woken = Story(1).does("allreduce", 304, 305, line=5).does("barrier", 305, line=6).beats(306)
    woken.notes_("frozen", 303.5, "was stopped for 300.5 s")
    assert first_finding(analyse_stories(*waiting, woken)) == ("stopped", (1,), "train.py:5 (step)")


def test_living_rank_that_did_not_come_is_absent():
    waiting = [Story(rank).does("allreduce", 3, line=5).beats(303).notes_("deadline", 303) for rank in (0, 2)]
    report = analyse_stories(*waiting, Story(1).does("send", 1, 2, line=3, peer=0).beats(303.2))
    assert first_finding(report) == ("absent", (1,), "train.py:5 (step)")
    assert "after send #1 on world" in report.findings[0].text and "rank-00001.stacks" in report.findings[0].text


def test_chain_of_waits_is_followed_to_its_end():
    # 0 waits for 1 in a collective, 1 waits for a message of 2, 2 computes for ever.
    stories = [
        Story(0).does("barrier", 1, line=5).notes_("deadline", 300),
        Story(1).does("recv", 1, line=7, peer=2).beats(300),
        Story(2).does("send", 0, 1, line=8, peer=0).beats(300),
    ]
    assert first_finding(analyse_stories(*stories))[1:] == ((2,), "train.py:7 (step)")


def test_circular_wait_of_messages_is_a_deadlock():
    stories = [Story(rank).does("recv", 1, line=rank, peer=(rank + 1) % 3).notes_("deadline", 300) for rank in range(3)]
    report = analyse_stories(*stories)
    assert first_finding(report)[:2] == ("deadlock", (0, 1, 2))
    assert "rank 2 waits in recv #1 on world, 4 x float32, peer 0, at train.py:2 (step)" in report.findings[0].text


@pytest.mark.parametrize("state", ["stopped", "silent", "killed"])
def test_rank_stopped_within_an_exchange_is_no_deadlock(state, monkeypatch):
    stories = [Story(rank, 2, pid=1).does("recv", 1, line=rank, peer=1 - rank).beats(90) for rank in range(2)]
    letters = {0: "S", 1: {"stopped": "T", "silent": None, "killed": ""}[state]}
    if state == "silent":
        stories[1].beats(3)
    monkeypatch.setattr(RankRecord, "process_state", lambda self: letters[self.rank])
    report = analyse_stories(*stories, now_s=91)
    assert [finding.kind for finding in report.findings] == ["killed" if state == "killed" else "stopped"], report
    assert report.findings[0].ranks == (1,)


def test_deadlock_of_killed_ranks_is_reported():
    stories = [Story(rank, 2).does("recv", 1, line=rank, peer=1 - rank).beats(90) for rank in range(2)]
    assert "deadlock" in [finding.kind for finding in analyse_stories(*stories).findings]


def test_peers_of_an_axis_are_mapped_to_world_ranks():
    # On axis "tp" ranks 1 and 2 are members 0 and 1.
    stories = [
        Story(0).notes_("finished", 5),
        Story(1).does("barrier", 1, 2, comm="tp").does("recv", 3, line=4, peer=1, comm="tp").notes_("deadline", 300),
        Story(2).does("barrier", 1, 2, comm="tp").beats(300),
    ]
    assert first_finding(analyse_stories(*stories)) == ("absent", (2,), "train.py:4 (step)")


A, B, C = {"a": (0, 1)}, {"b": (0, 2)}, {"c": (1, 2)}


def test_member_that_never_used_its_group_is_absent():
    # Rank 1 waits for rank 0, which waits for rank 2. Rank 2 has no operation on the group.
    stories = [
        Story(0, groups=A | B).does("barrier", 1, 2).does("allreduce", 3, comm="b", line=7),
        Story(1, groups=A).does("barrier", 1, 2).does("allreduce", 3, comm="a", line=8),
        Story(2).does("barrier", 1, 2).beats(999),
    ]
    for story in stories[:2]:
        story.beats(999)
    report = analyse_stories(*stories)
    assert first_finding(report) == ("absent", (2,), "train.py:7 (step)")
    assert report.findings[0].group == (0, 2) and len(report.findings) == 1


def test_ranks_that_wait_in_different_groups_are_a_deadlock():
    waits = [("b", A | B), ("a", A | C), ("c", B | C)]
    stories = [Story(rank, groups=groups).does("allreduce", 1, comm=name) for rank, (name, groups) in enumerate(waits)]
    report = analyse_stories(*[story.beats(999) for story in stories])
    assert first_finding(report)[:2] == ("deadlock", (0, 2, 1))
    assert (
        "rank 2 waits in allreduce #1 on c, 4 x float32, at train.py:1 (step) (ranks 1, 2)" in report.findings[0].text
    )


def test_the_smallest_group_that_a_rank_missed_is_reported():
    others = [Story(rank, world=4).does("barrier", 1).beats(999) for rank in (0, 1)]
    waits = Story(2, world=4, groups={"pair": (2, 3)}).does("allreduce", 1, comm="pair", line=9)
    report = analyse_stories(*others, waits.beats(999), Story(3, world=4).beats(999))
    assert first_finding(report) == ("absent", (3,), "train.py:9 (step)")


def test_peer_is_a_rank_in_the_order_of_its_communicator():
    group = {"g": (2, 0)}
    receiver = Story(0, groups=group).does("recv", 1, peer=0, comm="g").beats(999)
    report = analyse_stories(receiver, Story(1).beats(999), Story(2, groups=group).beats(999))
    assert first_finding(report)[:2] == ("absent", (2,))


def test_run_on_a_part_of_the_job_names_ranks_of_the_job(tmp_path):
    for rank in range(2):
        recorder = write(tmp_path, rank)
        note_members("world", "3,5")
        note_members("world/pair", "5,3")
        recorder.end(recorder.begin("world", "barrier", "uint8", 0, 0, -1, 0))
        if rank == 0:
            recorder.begin("world/pair", "allreduce", "float32", 4, 0, -1, 0)
        recorder.close()
    assert load(tmp_path)[0].groups == {"world": (3, 5), "world/pair": (5, 3)}
    result = CliRunner().invoke(command, [str(tmp_path), "--patience", "0"])
    assert "ABSENT: rank 1 (rank 5 of the job) did not reach" in result.output, result.output
    assert "this run is on ranks 3, 5 of the job, in this order" in result.output


def test_overwritten_events_accuse_no_rank():
    busy = Story(1).beats(300)
    for number in range(64):
        busy.does("send", 1 + number / 100, 2 + number / 100, peer=0)
    stories = [
        Story(0).does("barrier", 1, line=5).notes_("deadline", 300),
        busy,
        Story(2).does("barrier", 1).beats(300),
    ]
    assert all(finding.ranks != (1,) for finding in analyse_stories(*stories).findings)


def test_missing_record_is_reported():
    stories = [Story(rank).does("barrier", 1).notes_("deadline", 300) for rank in (0, 2)]
    assert first_finding(analyse_stories(*stories))[:2] == ("missing", (1,))


def test_dead_process_is_reported_while_others_run(monkeypatch):
    monkeypatch.setattr(RankRecord, "process_state", lambda self: {0: "S", 1: "", 2: "T"}[self.rank])
    stories = [Story(rank, pid=1).does("barrier", 1, 2).does("allreduce", 3, line=5).beats(90) for rank in (0,)]
    stories += [Story(rank, pid=1).does("barrier", 1, 2).beats(4) for rank in (1, 2)]
    report = analyse_stories(*stories, now_s=91)
    assert [(f.kind, f.ranks) for f in report.findings] == [("killed", (1,)), ("stopped", (2,))]
    assert {rank.rank: rank.state for rank in report.ranks} == {0: "running", 1: "killed", 2: "stopped"}


# --- files and the command ------------------------------------------------------------------------------------------


def write(folder, rank, world=2):
    folder.mkdir(exist_ok=True)
    return Recorder(folder / f"rank-{rank:05d}.rec", rank, world)


@pytest.fixture
def hung_run(tmp_path):
    """A run in which rank 1 calls a barrier and rank 0 an allreduce."""
    recorders = [write(tmp_path / "recorder", rank) for rank in range(2)]
    recorders[0].begin("world", "allreduce", "float32", 10, -1, -1, 0)
    recorders[1].begin("world", "barrier", "uint8", 0, 0, -1, 0)
    for recorder in recorders:
        recorder.close()
    return tmp_path


def test_command_names_the_rank_and_exits_with_1(hung_run):
    result = CliRunner().invoke(command, [str(hung_run)])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("SKIPPED: rank 1 made barrier #1 on world, at ")
    assert "test_hang.py:" in result.output and "where rank 0 made allreduce #1 on world, 10 x float32" in result.output


def test_rows_in_flight_are_no_wait(tmp_path):
    """Rank 1 has not completed its requests of sent rows, and rank 0 waits for rank 1 in a barrier."""
    is_analysed = threading.Event()

    def body(comm):
        recorder = comm.events = write(tmp_path, comm.rank)
        channel = RowChannel(comm)
        for number in range(3 * comm.rank):
            channel.send(np.full(100_000, number))
        comm.barrier()
        messages = []
        if comm.rank == 0:
            messages += channel.arrived()
            recorder.begin(comm.name, "barrier", "uint8", 0, 0, -1, 0)
            findings = analyse(load(tmp_path), now_ns=time.time_ns() + 60 * NS).findings
            is_analysed.set()
        assert is_analysed.wait(60)
        received = [rows[0] for _, rows in messages + channel.drain()]
        recorder.close()
        return received if comm.rank else (received, findings)

    (received, findings), others = run_threads(2, body)
    assert received == [0, 1, 2] and others == []
    assert [(finding.kind, finding.ranks) for finding in findings] == [("absent", (1,))]


def test_command_as_json(hung_run):
    result = CliRunner().invoke(command, [str(hung_run / "recorder"), "--json"])
    value = json.loads(result.output)
    assert result.exit_code == 1 and value["wrong"] is True and value["world"] == 2
    assert value["findings"][0]["kind"] == "skipped" and value["findings"][0]["ranks"] == [1]
    assert value["findings"][0]["event"]["op"] == "allreduce"


def test_command_without_findings(tmp_path):
    recorder = write(tmp_path / "recorder", 0, 1)
    recorder.end(recorder.begin("world", "barrier", "uint8", 0, 0, -1, 0))
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 0 and "no problem found" in result.output and "after barrier #1" in result.output
    recorder.close()


def test_records_of_an_earlier_larger_run_are_ignored(tmp_path):
    for rank, world in ((0, 3), (1, 3), (2, 3), (0, 2), (1, 2)):
        write(tmp_path, rank, world).close()
    assert [record.rank for record in load(tmp_path)] == [0, 1]


def test_bad_directories_are_rejected(tmp_path):
    with pytest.raises(UsageError, match="has no flight recorder files"):
        load(tmp_path)
    (tmp_path / "rank-00000.rec").write_text("something else")
    with pytest.raises(StorageError, match="not a file of the flight recorder"):
        load(tmp_path)
    assert CliRunner().invoke(command, [str(tmp_path / "absent")]).exit_code == 2
    with pytest.raises(StorageError, match="not a file of the flight recorder"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)


def test_truncated_file_hides_no_other_rank(tmp_path):
    for rank in range(3):
        write(tmp_path, rank, 3).close()
    path = tmp_path / "rank-00001.rec"
    path.write_bytes(path.read_bytes()[:5000])
    result = CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 1 and f"DAMAGED: rank 1 is not known: {path} is not a" in result.output
    assert "missing" not in result.output.lower() and "no problem found" not in result.output
    assert [line.split()[0] for line in result.output.splitlines()[-2:]] == ["0", "2"]


def test_ranks_past_the_deadline_in_one_collective_are_waiting():
    stories = [Story(rank, 2).does("allreduce", 1).notes_("deadline", 20, "19 s in allreduce") for rank in (0, 1)]
    report = analyse([story.record() for story in stories], now_ns=30 * NS)
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("waiting", (0,)), ("waiting", (1,))]
    assert "passed its deadline: 19 s in allreduce" in report.findings[0].text
    assert report.findings[0].event.op == "allreduce"


def test_living_ranks_that_stay_in_one_collective_are_waiting():
    stories = [Story(rank, 2).does("barrier", 1).beats(99) for rank in (0, 1)]
    report = analyse([story.record() for story in stories], now_ns=100 * NS)
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [("waiting", (0,)), ("waiting", (1,))]
    assert analyse([story.record() for story in stories], patience_s=1000, now_ns=100 * NS).findings == ()


def test_finding_may_have_no_operation():
    assert Finding("missing", (1,), "no record").event is None
