"""Traces of real jobs: spans nest, causes precede effects, steps match the metrics, and the delaying rank is named."""

import json

import pytest

from harness import jobs
from harness.jobs import hpcdist
from harness.trainings import recipe_keys
from hpcdist.telemetry.metrics import side_tables, step_metrics
from hpcdist.telemetry.trace import summary

SMALL = recipe_keys("layers=2 hidden=16 heads=2 data.context=8 global_batch=8 steps=12")
JOBS = {
    "ring": (2, {"communication.algorithm": "ring"}),
    "thread": (2, {"communication.algorithm": "ring", "communication.overlap": "thread"}),
    "tensor": (4, {"parallel.tensor": 2, "communication.algorithm": "recursive_doubling"}),
    "context": (2, {"parallel.context": 2, "parallel.context_method": "ring", "communication.algorithm": "ring"}),
    "pipeline": (4, {"parallel.pipeline": 2, "parallel.microbatches": 2, "communication.algorithm": "ring"}),
}

pytestmark = pytest.mark.usefixtures("mpi")


def train(ranks, out, text, settings):
    results = {**SMALL, "data.path": text, **settings}
    return hpcdist("run", "-n", ranks, "train", "--out", out, *jobs.settings(results))


def check_nests(events):
    """Check that two bars of one thread are nested or disjoint."""
    stacks = {}
    for event in events:
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            stack = stacks.setdefault(event["tid"], [])
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], event
            stack.append(end)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.full
@pytest.mark.matrix_except("thread", "context", "pipeline")
def test_trace_of_a_job_is_consistent(name, tmp_path, text):
    ranks, settings = JOBS[name]
    out, file = tmp_path / "run", tmp_path / "trace.json"
    done = train(ranks, out, text, settings)
    assert done.returncode == 0, done.stderr
    shown = hpcdist("trace", out, "-o", file, "--json")
    assert shown.returncode == 0, shown.stderr
    figures, output = json.loads(shown.stdout), json.loads(file.read_text())
    assert figures["ranks"] == list(range(ranks)) and figures["steps"] == list(range(1, 13))
    assert figures["notes"] == [] and figures["events"] == len(output["traceEvents"])
    # One host has one clock: nothing ends before what it waited for, and every message meets its own.
    assert figures["order"]["pairs"] > 12 * ranks and figures["order"]["wrong"] == 0
    assert figures["messages"] > 0 and figures["messages_without_counterpart"] == 0
    check_nests(output["traceEvents"])
    summaries = summary.collect(out)
    if name == "context":
        check_passes(summaries, figures)
    check_meetings(summaries)
    check_messages(summaries)
    check_steps(summaries, step_metrics.read(out / "metrics.h5"))
    check_path(summaries)
    measured = side_tables.read_clocks(out / "metrics.h5")
    assert [session.hosts.of_rank for session in measured] == [(0,) * ranks]
    assert {(one.offset_ns, one.rtt_ns) for one in measured[0].readings} == {(0, 0)}


def check_passes(result, figures):
    """Check every pass of the ring and its bytes, and that its waits lie within computations."""
    # In a step of 8 samples, on either way and in each of 2 layers: keys twice and gradients once, of 4 tokens, 2 x 16.
    ways = [row for row in figures["message_paths"] if "/context" in row["comm"]]
    assert {(row["from"], row["to"]) for row in ways} == {(0, 1), (1, 0)}
    for row in ways:
        assert row["messages"] >= 12 * 2 * 3 and row["sent_bytes"] >= 12 * 2 * 3 * 8 * 4 * 32 * 4
        assert 0 <= row["hidden_share"] <= 1
    for line in result.timeline.lines.values():
        around = [span for span in line.spans if span.name in ("FORWARD", "BACKWARD") or span.phase == "validation"]
        for wait in (span for span in line.spans if span.name in ("WAIT keys", "WAIT gradients")):
            assert any(op.begin_ns <= wait.begin_ns and wait.end_ns <= op.end_ns for op in around)


def check_meetings(result):
    meetings = result.timeline.matches.meetings
    assert meetings
    for meeting in meetings:
        last = meeting.released_by()
        assert last is not None
        assert all(call.end_ns >= last.begin_ns for call in meeting.calls if meeting.root is None)


def check_messages(result):
    for message in result.timeline.matches.messages:
        send, receive = message.send, message.receive
        assert (send.comm, send.tag, send.dtype) == (receive.comm, receive.tag, receive.dtype)
        assert send.begin_ns < receive.end_ns and send.step == receive.step
        if send.op != "sendrecv":
            assert send.count == receive.count


def check_steps(result, kept):
    """Check that the operations of a step lie within it and take the time that the metrics record for each phase."""
    assert kept.steps["step"].tolist() == list(result.timeline.steps)
    for rank, line in result.timeline.lines.items():
        for row, step in enumerate(result.timeline.steps):
            begin, end = line.steps[step]
            inside = [
                span for span in line.spans if span.step == step and begin <= span.begin_ns and span.end_ns <= end
            ]
            spent = dict.fromkeys(("compute", "communication", "update"), 0)
            for span in inside:
                if span.phase in spent:
                    spent[span.phase] += span.end_ns - span.begin_ns
            booked = [float(kept.steps[f"{phase}_s"][row, rank]) for phase in spent]
            # What a collective within a computation takes is booked as communication, and the norm as update.
            assert sum(spent.values()) / 1e9 == pytest.approx(sum(booked), rel=1e-9, abs=1e-9)
            assert end - begin >= sum(spent.values())
        boundaries = [line.steps[step] for step in result.timeline.steps]
        assert all(before[1] <= after[0] for before, after in zip(boundaries, boundaries[1:], strict=False))


def check_path(result):
    assert [path.step for path in result.paths] == list(result.timeline.steps)
    for path in result.paths:
        links = path.links
        assert all(one.end_ns == other.begin_ns for one, other in zip(links, links[1:], strict=False))
        assert links[-1].end_ns == max(line.steps[path.step][1] for line in result.timeline.lines.values())
        assert "FORWARD" in {link.name for link in links} or path.step > 1


@pytest.mark.full
def test_rank_that_delays_the_others_is_named(tmp_path, text):
    out = tmp_path / "run"
    done = train(3, out, text, {"chaos.stall": "['1@6:3']"})
    assert done.returncode == 0, done.stderr
    figures = json.loads(hpcdist("trace", out, "--json", "--steps", "6").stdout)
    longest = figures["longest_waits"][:2]
    assert {one["rank"] for one in longest} == {0, 2} and {one["for"] for one in longest} == {1}
    assert min(one["seconds"] for one in longest) > 1.0, "three seconds were slept, in which both waited"
    assert next(iter(figures["waited_for_s"])) == "1"
    assert next(iter(figures["critical_path_by_rank"])) == "1"


@pytest.mark.full
def test_trace_of_a_killed_job_can_be_shown(tmp_path, text):
    out, file = tmp_path / "run", tmp_path / "trace.json"
    done = train(2, out, text, {"chaos.kill": "['1@7']"})
    assert done.returncode not in (0, 75), done.stderr
    shown = hpcdist("trace", out, "-o", file, "--json")
    assert shown.returncode == 0, shown.stderr
    figures, output = json.loads(shown.stdout), json.loads(file.read_text())
    assert figures["steps"] == list(range(1, 7)) and any("did not end" in note for note in figures["notes"])
    check_nests(output["traceEvents"])
    check_path(summary.collect(out))
