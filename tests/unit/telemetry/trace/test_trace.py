"""Traces of simulated runs with a known truth: drifting clocks hours apart, truncated files, missing ranks."""

import gzip
import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.cli.runs.inspect import trace as command
from hpcdist.comm.record import flight_recorder, spans
from hpcdist.comm.record.clock_offsets import ClockReading
from hpcdist.errors import StorageError, UsageError
from hpcdist.telemetry.trace import critical_path, output, summary, timeline
from hpcdist.telemetry.trace.clock_correction import HostClock
from hpcdist.telemetry.trace.rank_log import NO_STEP, ranks_text
from stubs.recorded import Host, Rank, invent, write_clocks

HOUR_NS = 3_600_000_000_000
FIRST = Host("alpha", offset_ns=15 * HOUR_NS)
# Its clock is hours late and gains 50 us per second; its wall clock is also wrong by hours.
SECOND = Host("beta", offset_ns=3 * HOUR_NS, drift_ppm=50.0, wall_ns=FIRST.wall_ns + 3 * HOUR_NS)
THIRD = Host("gamma", offset_ns=99 * HOUR_NS, drift_ppm=-37.0, wall_ns=FIRST.wall_ns - HOUR_NS)
RTT_NS = 10_000


def write_run(tmp_path, rng, *, hosts=(FIRST, SECOND), per_host=2, steps=24, clocks=True, finished=True, **about):
    """Write a run, and clock measurements at its start and end with errors below half of RTT_NS."""
    made = invent(rng, hosts, per_host, steps, **about)
    for rank in made.ranks:
        rank.write(tmp_path / "recorder", finished=finished)
    if clocks:
        times = [-1_000_000, made.ends[steps // 2], made.ends[steps] + 1_000_000]
        write_clocks(tmp_path, made.ranks, times, lambda: int(rng.integers(-RTT_NS // 2, RTT_NS // 2 + 1)), RTT_NS)
    return made


def true_ns(reference_ns):
    """Return the true time of a reading of the first host's clock, which does not drift."""
    return reference_ns - FIRST.offset_ns


def check_within(result, made, bound_ns):
    """Check that every start and end is within ``bound_ns`` of the truth, and that their order is correct."""
    moments = []
    for rank in made.ranks:
        line = result.timeline.lines[rank.rank]
        by_key = {(name, step): span for span in rank.spans for _, name, step, *_ in [span]}
        for span in line.spans:
            _, _, _, begin, end = by_key[span.name, span.step]
            moments += [(begin, true_ns(span.begin_ns)), (end, true_ns(span.end_ns))]
    assert len(moments) > 100
    assert all(abs(a - b) <= bound_ns for a, b in moments)
    moments.sort()
    latest = -(10**30)
    for _, seen in moments:  # what happened later by twice the bound is seen later
        assert seen >= latest - 2 * bound_ns
        latest = max(latest, seen)


@pytest.mark.parametrize("hosts", [(FIRST, SECOND), (FIRST, SECOND, THIRD)])
def test_drifting_clocks_with_offsets_of_hours_are_aligned(tmp_path, rng, hosts):
    made = write_run(tmp_path, rng, hosts=hosts)
    summaries = summary.collect(tmp_path)
    bound = RTT_NS // 2 + 2  # rounding
    check_within(summaries, made, bound)
    assert summaries.timeline.steps == tuple(range(5, 25)), "the last twenty"
    figures = summary.figures(summaries)
    clocks = {one["host"]: one for one in figures["clocks"]}
    assert clocks["alpha"]["reference"] and clocks["alpha"]["offset_s"] == 0.0 and clocks["alpha"]["bound_s"] == 0.0
    assert clocks["beta"]["source"] == "measured" and clocks["beta"]["readings"] == 3
    assert clocks["beta"]["bound_s"] <= RTT_NS / 2 / 1e9 + 1e-9
    assert clocks["beta"]["offset_s"] == pytest.approx(-12 * 3600, abs=1e-3)
    span_s = (made.ends[24] + 2_000_000) / 1e9
    assert clocks["beta"]["drift_ppm"] == pytest.approx(50.0, abs=RTT_NS / 1e3 / span_s + 0.01)
    # Messages take longer than the clocks are wrong, or are found to be wrong by less than that.
    assert figures["order"]["beyond_bound"] == 0 and figures["notes"] == [
        note for note in figures["notes"] if note.startswith("clocks: ")
    ]
    assert figures["messages"] == len(made.ranks) * 20 and figures["collectives"] == 20
    assert figures["messages_without_counterpart"] == 0


def test_every_send_is_matched_to_its_receive(tmp_path, rng):
    made = write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path, range(1, 25))
    seen = {
        (one.send.rank, one.receive.rank, true_ns(one.send.begin_ns) // 1000)
        for one in summaries.timeline.matches.messages
    }
    exact = {one for one in made.messages if made.ranks[one[0]].host is FIRST}
    assert exact and all((a, b, sent // 1000) in seen for a, b, sent, _ in exact)
    for one in summaries.timeline.matches.messages:
        received = [r for a, b, _, r in made.messages if (a, b) == (one.send.rank, one.receive.rank)]
        assert min(abs(true_ns(one.receive.end_ns) - r) for r in received) <= RTT_NS // 2 + 2
        assert abs((one.receive.end_ns - one.send.begin_ns) - _latency(made, one)) <= RTT_NS + 4


def test_messages_are_counted_by_pair_of_ranks(tmp_path, rng):
    """Receives of these ranks overlap no computation. A rank that computes meanwhile hides its receives."""
    write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path)
    paths = summary.figures(summaries)["message_paths"]
    assert [(row["from"], row["to"]) for row in paths] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert all(row["messages"] == 20 and row["sent_bytes"] == 20 * 4096 and row["comm"] == "world" for row in paths)
    assert all(row["hidden_share"] == 0.0 for row in paths)
    computing = {rank: [replace(piece, phase="compute") for piece in row] for rank, row in summaries.pieces.items()}
    paths = summary.figures(replace(summaries, pieces=computing))["message_paths"]
    assert all(row["hidden_share"] == pytest.approx(1.0) for row in paths)
    assert "rank 0 to rank 1 on world: 20 messages" in summary.format_text(summary.figures(summaries))


def _latency(made, message):
    """Return the true transfer time of the message of this step and pair of ranks."""
    of_way = [m for m in made.messages if (m[0], m[1]) == (message.send.rank, message.receive.rank)]
    _, _, sent, received = of_way[message.send.step - 1]
    return received - sent


def test_collectives_end_after_the_last_rank_arrives(tmp_path, rng):
    made = write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path)
    bound = RTT_NS + 4
    for meeting in summaries.timeline.matches.meetings:
        truth = made.begins[meeting.calls[0].step]
        last = meeting.released_by()
        assert truth[last.rank] >= max(truth) - 2 * bound
        assert all(call.end_ns >= last.begin_ns for call in meeting.calls)
        assert all(abs(true_ns(call.begin_ns) - truth[call.rank]) <= bound for call in meeting.calls)


def test_critical_path_matches_the_truth(tmp_path, rng):
    """In each step the path leads from the computation of the last rank to the end of the step."""
    made = write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path)
    for path in summaries.paths:
        links = path.links
        assert all(one.end_ns == other.begin_ns for one, other in zip(links, links[1:], strict=False))
        ends = [line.steps[path.step][1] for line in summaries.timeline.lines.values()]
        assert links[-1].end_ns == max(ends)
        slowest = max(range(len(made.ranks)), key=lambda rank: made.begins[path.step][rank])
        margin = sorted(made.begins[path.step])[-1] - sorted(made.begins[path.step])[-2]
        if margin > 2 * RTT_NS:
            assert {link.rank for link in [link for link in links if link.name == "BACKWARD"]} == {slowest}
    waited = summaries.waits
    assert waited and all(rank != by for rank, by in waited)


def test_pieces_have_no_gaps(tmp_path, rng):
    write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path)
    for rank, row in summaries.pieces.items():
        steps = summaries.timeline.lines[rank].steps
        assert row[0].begin_ns == min(b for b, _ in steps.values())
        assert row[-1].end_ns == max(e for _, e in steps.values())
        assert all(one.end_ns == other.begin_ns for one, other in zip(row, row[1:], strict=False))
        assert all(piece.end_ns > piece.begin_ns for piece in row)


# -- without measured clocks


def test_clocks_without_a_table_are_aligned_by_collectives(tmp_path, rng):
    """Wall clocks are hours apart. Only the ends of collectives are known, which is enough for their bound."""
    made = write_run(tmp_path, rng, clocks=False)
    summaries = summary.collect(tmp_path)
    clock = {one["host"]: one for one in summary.figures(summaries)["clocks"]}["beta"]
    assert clock["source"] == "messages" and clock["readings"] >= 10
    assert any("the metrics have no readings" in note for note in summaries.notes)
    assert 0 < round(clock["bound_s"] * 1e9) < 20_000_000
    worst = 0
    for rank in made.ranks:
        for step, (_, end) in summaries.timeline.lines[rank.rank].steps.items():
            worst = max(worst, abs(true_ns(end) - (made.ends[step] + 17 * rank.rank)))
    assert worst <= 100_000, "members leave within less than that of each other, in truth"
    assert summary.figures(summaries)["order"]["wrong"] == 0


def test_wall_clocks_are_used_without_table_and_messages(tmp_path, rng):
    made = write_run(tmp_path, rng, clocks=False)
    for path in (tmp_path / "recorder").glob("*.rec"):
        path.unlink()
    summaries = summary.collect(tmp_path)
    clock = {one["host"]: one for one in summary.figures(summaries)["clocks"]}["beta"]
    assert clock["source"] == "wall clocks" and clock["bound_s"] is None
    # Its wall clock is three hours ahead, so all it did seems to be so much later.
    assert true_ns(summaries.timeline.lines[2].steps[24][1]) - (made.ends[24] + 34) == pytest.approx(
        3 * HOUR_NS, abs=1e6
    )
    assert any("from unverified wall clocks" in note for note in summaries.notes)
    assert "not known" in summary.format_text(summary.figures(summaries))


def test_clock_table_of_another_boot_is_ignored(tmp_path, rng):
    """The host was rebooted: its clock started again, so earlier measurements do not apply."""
    for rank in write_run(tmp_path, rng).ranks[2:]:
        again = Rank(rank.rank, Host("beta2", offset_ns=HOUR_NS), rank.world, rank.spans, rank.calls)
        again.write(tmp_path / "recorder")
    clock = {one["host"]: one for one in summary.figures(summary.collect(tmp_path))["clocks"]}["beta2"]
    assert clock["source"] == "messages"


def test_wrong_clock_table_is_detected(tmp_path, rng):
    """Readings are wrong by a millisecond but claim microseconds: causes are too late by more than the bound."""
    made = write_run(tmp_path, rng, clocks=False)
    write_clocks(tmp_path, made.ranks, [0, made.ends[24]], lambda: 1_000_000, RTT_NS)
    summaries = summary.collect(tmp_path)
    order = summary.figures(summaries)["order"]
    assert order["wrong"] and order["beyond_bound"] and order["most_s"] > 0.5e-3
    assert any("by more than the bound" in note for note in summaries.notes)


def test_order_errors_within_the_bound_are_noted(tmp_path, rng):
    made = write_run(tmp_path, rng, clocks=False)
    write_clocks(tmp_path, made.ranks, [0, made.ends[24]], lambda: 300_000, 700_000)
    summaries = summary.collect(tmp_path)
    assert summaries.timeline.order.wrong and summaries.timeline.order.beyond == 0
    assert any("within the bound" in note for note in summaries.notes)


# -- files


def test_trace_file_is_complete_and_consistent(tmp_path, rng):
    """Spans nest on each thread, all spans exist, arrows go from causes to effects, and metadata is present."""
    made = write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path, range(3, 8))
    written = output.write(summaries, tmp_path / "trace.json", {"hpcdist": "1.2.3"})
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    assert len(events) == written
    check_file(document)
    bars = [event for event in events if event["ph"] == "X"]
    names = [event["name"] for event in bars]
    assert {f"step {step}" for step in range(3, 8)} <= set(names)
    assert names.count("FORWARD") == names.count("allreduce") == 5 * len(made.ranks)
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {
        f"rank {rank} {what}" for rank in range(4) for what in ("computes", "communicates", "has in flight")
    } == threads
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "node alpha", 2: "node beta"}
    assert {event["pid"] for event in bars} == {1, 2}
    about = document["otherData"]
    assert about["hpcdist"] == "1.2.3" and about["steps"] == [3, 4, 5, 6, 7] and len(about["clocks"]) == 2
    colours = {(event["cat"], event["cname"]) for event in bars}
    assert len(colours) == len({category for category, _ in colours})
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(counters) >= 4096 and min(counters) == 0
    output.write(summaries, tmp_path / "trace.json.gz", {"hpcdist": "1.2.3"})
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == document
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.h5", "recorder", "trace.json", "trace.json.gz"]


def check_file(output):
    """Check the properties of every trace file: spans nest, and arrows connect spans."""
    bars = {}
    for event in output["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            bars.setdefault(event["tid"], []).append((begin, begin + round(event["dur"] * 1000)))
            assert event["ts"] >= 0 and event["dur"] >= 0
    for rows in bars.values():
        stack = []
        for begin, end in rows:  # in the order of begins
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
    arrows = {}
    for event in output["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
            ns = round(event["ts"] * 1000)
            assert any(begin <= ns <= end for begin, end in bars[event["tid"]])
    assert all(set(pair) == {"s", "f"} and pair["f"]["bp"] == "e" for pair in arrows.values())
    return bars, arrows


def test_overlapping_calls_get_separate_lanes():
    assert output.lanes([(0, 10), (1, 5), (2, 12), (3, 4), (5, 7), (10, 11), (10, 30)]) == [0, 0, 1, 0, 0, 0, 2]
    assert output.lanes([(0, 0), (0, 0)]) == [0, 0]


def test_ranks_and_steps_can_be_selected(tmp_path):
    write_run(tmp_path, np.random.default_rng(0))  # in a few runs, no rank waits for ranks 0 and 2
    summaries = summary.collect(tmp_path, range(4, 6), [1, 3])
    assert sorted(summaries.timeline.lines) == [1, 3] and summaries.timeline.steps == (4, 5)
    assert {call.rank for line in summaries.timeline.lines.values() for call in line.calls} == {1, 3}
    assert any(by in (0, 2) for _, by in summaries.waits), "also who is not shown was waited for"
    assert all(wait.rank in (1, 3) and doing != "unknown" for wait, doing in summaries.longest_waits)
    assert {event["tid"] // 1000 - 1 for event in list(output.events(summaries.timeline)) if event["ph"] == "X"} == {
        1,
        3,
    }
    assert len(summary.collect(tmp_path, range(20, 90)).timeline.steps) == 5
    with pytest.raises(UsageError, match="steps 70 to 80 are not recorded on all ranks"):
        summary.collect(tmp_path, range(70, 81))
    with pytest.raises(UsageError, match="there is no record of rank 9; choose from the recorded ranks 0-3"):
        summary.collect(tmp_path, None, [0, 9])


def test_trace_size_is_limited_for_viewers(tmp_path, rng):
    write_run(tmp_path, rng)
    summaries = summary.collect(tmp_path, max_intervals=200)
    assert 0 < len(summaries.timeline.steps) < 20 and summaries.timeline.steps[-1] == 24
    assert any("too many for a viewer" in note for note in summaries.notes)
    assert sum(len(line.spans) + len(line.calls) for line in summaries.timeline.lines.values()) <= 220
    few = summary.collect(tmp_path, max_intervals=10)
    assert few.timeline.steps == (24,) and sorted(few.timeline.lines) == [0]
    assert any("only rank 0" in note for note in few.notes)


def test_overwritten_ring_shows_only_complete_steps(tmp_path, rng):
    """The messages of early steps are overwritten: only complete steps are shown, and messages still match."""
    for rank in invent(rng, (FIRST, SECOND), 2, 30).ranks:
        rank.write(tmp_path / "recorder", capacity=50)  # 16 steps of calls, 12 of spans
    summaries = summary.collect(tmp_path)
    assert summaries.timeline.steps[-1] == 30 and 5 <= len(summaries.timeline.steps) <= 12
    assert len(summaries.timeline.matches.messages) == 4 * len(summaries.timeline.steps)
    for one in summaries.timeline.matches.messages:
        assert one.send.step == one.receive.step


def test_spans_of_an_earlier_start_are_ignored(tmp_path, rng):
    """The run was resumed with telemetry.trace = false: the recorder is new, the spans are old."""
    for rank in invent(rng, (FIRST,), 2, 4).ranks:
        rank.write(tmp_path / "recorder")
        later = Host("alpha", offset_ns=16 * HOUR_NS, wall_ns=FIRST.wall_ns + HOUR_NS)
        Rank(rank.rank, later, 2, rank.spans, rank.calls).write(tmp_path / "later")
        (tmp_path / "later" / f"rank-{rank.rank:05d}.rec").rename(tmp_path / "recorder" / f"rank-{rank.rank:05d}.rec")
    summaries = summary.collect(tmp_path)
    assert all(not line.spans and line.calls for line in summaries.timeline.lines.values())
    assert summaries.timeline.steps == () and len(summaries.timeline.matches.messages) == 8


def test_trace_of_a_killed_run(tmp_path, rng):
    """Its last step has no end, a rank is in a receive that never completed, one file is missing, one is truncated."""
    made = invent(rng, (FIRST,), 4, 6)
    last = made.ends[6] + 100
    made.ranks[0].span("compute", "FORWARD", 7, last, last + 500)
    made.ranks[0].call("world", "recv", last + 500, None, peer=3, tag=7)
    for rank in made.ranks[:3]:
        rank.write(tmp_path / "recorder", finished=False)
    path = tmp_path / "recorder" / "rank-00002.spans"
    path.write_bytes(path.read_bytes()[:5000])
    summaries = summary.collect(tmp_path)
    assert summaries.timeline.steps == tuple(range(1, 7)) and summaries.world == 4
    unfinished = [call for call in summaries.timeline.lines[0].calls if call.is_open]
    assert len(unfinished) == 1 and unfinished[0].op == "recv" and unfinished[0].step == NO_STEP
    assert [span.step for span in summaries.timeline.lines[0].spans][-1] == 7
    text = "\n".join(summaries.notes)
    assert "no record of rank 3" in text and "no spans of rank 2" in text and "rank-00002.spans" in text
    assert "the run did not end" in text
    output.write(summaries, tmp_path / "t.json", {})
    document = json.loads((tmp_path / "t.json").read_text())
    check_file(document)
    assert [
        event["args"]["unfinished"] for event in document["traceEvents"] if "unfinished" in event.get("args", {})
    ] == [True]


def test_trace_of_a_run_killed_in_its_first_step(tmp_path):
    rank = Rank(0, FIRST, 1)
    rank.span("compute", "FORWARD", 1, 0, 10)
    rank.call("world", "allreduce", 20, None)
    rank.write(tmp_path, finished=False)
    summaries = summary.collect(tmp_path)
    assert summaries.timeline.steps == () and summaries.paths == ()
    assert len(summaries.timeline.lines[0].spans) == len(summaries.timeline.lines[0].calls) == 1
    assert "no whole step" in summary.format_text(summary.figures(summaries))
    with pytest.raises(UsageError, match="the records contain no steps"):
        summary.collect(tmp_path, range(1, 3))


def test_trace_without_spans_shows_messages(tmp_path, rng):
    made = write_run(tmp_path, rng, hosts=(FIRST,), per_host=3, steps=5)
    for path in (tmp_path / "recorder").glob("*.spans"):
        path.unlink()
    summaries = summary.collect(tmp_path)
    assert any("telemetry.trace = false" in note for note in summaries.notes)
    assert len(summaries.timeline.matches.messages) == len(made.messages)
    assert summaries.timeline.order.wrong == 0


def test_directories_without_records_are_rejected(tmp_path):
    with pytest.raises(UsageError, match="has no record files"):
        summary.collect(tmp_path)
    (tmp_path / "rank-00000.rec").write_bytes(b"nothing of ours")
    with pytest.raises(StorageError, match="none of its 1 record files"):
        summary.collect(tmp_path)


def test_truncated_and_random_files_raise_only_known_errors(tmp_path, rng):
    """Files damaged by a full disk or a broken copy give a trace, or an error of hpcdist."""
    write_run(tmp_path / "good", rng, steps=4)
    for number in range(25):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        for path in sorted((folder / "recorder").iterdir()):
            data = bytearray(path.read_bytes())
            if rng.integers(0, 2):
                layout = spans if path.suffix == ".spans" else flight_recorder
                for start in (12, layout.TEXTS, layout.RING):  # not the signature: that is refused as a whole
                    for place in rng.integers(start, min(start + 1000, len(data)), int(rng.integers(0, 12))).tolist():
                        data[place] = int(rng.integers(0, 256))
                path.write_bytes(data)
            elif rng.integers(0, 3) == 0:
                path.write_bytes(data[: int(rng.integers(0, len(data)))])
        try:
            summaries = summary.collect(folder)
        except (UsageError, StorageError):
            continue
        summary.format_text(summary.figures(summaries))
        output.write(summaries, folder / "t.json", {})
        document = json.loads((folder / "t.json").read_text())
        if (
            max((event["ts"] + event.get("dur", 0) for event in document["traceEvents"] if "ts" in event), default=0)
            < 2**43
        ):
            check_file(document)  # beyond, a time that nobody wrote has more digits than a number in JSON


# -- clocks


def test_clock_interpolation_and_extrapolation():
    day = 24 * HOUR_NS
    # 10 ppm in the first day, 20 in the second.
    clock = HostClock([ClockReading(1, 0, 1000, 40), ClockReading(1, day, 1000 + day // 10**5, 20),
                       ClockReading(1, 2 * day, 1000 + 3 * (day // 10**5), 60)])  # fmt: skip
    for t, offset in (
        (0, 1000), (day // 2, 1000 + day // 10**5 // 2), (day, 1000 + day // 10**5),
        (3 * day // 2, 1000 + 2 * (day // 10**5)), (3 * day, 1000 + 5 * (day // 10**5)),
        (-day, 1000 - day // 10**5),
    ):  # fmt: skip
        assert abs(clock.reference_ns(t + offset) - t) <= 2, t
    assert clock.bound_ns(1000 + day // 4) == 20 and clock.bound_ns(2 * day) == 30
    assert clock.bound_ns(4 * day) > 30
    assert clock.drift_ppm == pytest.approx(15.0)


def test_clock_with_one_or_no_reading():
    one = HostClock([ClockReading(1, 500, -300, 8)])
    assert one.reference_ns(200) == 500 and one.reference_ns(10**9) == 10**9 + 300 and one.drift_ppm is None
    assert one.bound_ns(200) == 4 and one.bound_ns(200 + 10**9) == 4 + 50_000
    local_data = HostClock()
    assert local_data.reference_ns(7) == 7 and local_data.bound_ns(7) == 0


def test_clock_mapping_is_monotonic_for_any_readings(rng):
    """Later times on a host stay later in the common time, even for contradictory readings."""
    for _ in range(50):
        times = sorted(rng.integers(0, 10**9, 6).tolist())
        clock = HostClock(
            [ClockReading(1, t, int(rng.integers(-(10**6), 10**6)), int(rng.integers(0, 10**5))) for t in times]
        )
        local_values = sorted(rng.integers(-(10**9), 3 * 10**9, 300).tolist())
        seen = [clock.reference_ns(ns) for ns in local_values]
        assert seen == sorted(seen)


# -- the command


def test_trace_command_prints_a_summary(tmp_path, rng):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'hpcdist[analysis]'")
    write_run(tmp_path / "run", rng)
    out, plot = tmp_path / "t.json", tmp_path / "t.png"
    done = CliRunner().invoke(command, [str(tmp_path / "run"), "-o", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    for words in (
        "critical path",
        "waited for",
        "longest waits",
        "beta (ranks 2-3): 4.32e+04 s behind",
        "by round trips",
        str(out),
    ):
        assert words in done.output
    assert plot.read_bytes()[:4] == b"\x89PNG"
    line = [str(tmp_path / "run"), "--json", "--steps", "7", "--ranks", "0,2-3", "-o", str(out)]
    document = json.loads(CliRunner().invoke(command, line).output)
    assert document["steps"] == [7] and document["ranks"] == [0, 2, 3] and document["events"] > 10
    assert json.loads(out.read_text())["otherData"]["hpcdist"]


@pytest.mark.parametrize(
    "wrong", [("--steps", "9:3"), ("--steps", "x"), ("--ranks", "3-1"), ("--ranks", "a"), ("--ranks", "")]
)
def test_wrong_trace_options_are_rejected(tmp_path, wrong):
    done = CliRunner().invoke(command, [str(tmp_path), *wrong])
    assert done.exit_code == 2 and "give" in done.output


def test_unwritable_trace_file_raises_storage_error(tmp_path, rng):
    write_run(tmp_path / "run", rng, steps=3)
    line = [str(tmp_path / "run"), "-o", str(tmp_path / "missing" / "t.json")]
    assert isinstance(CliRunner().invoke(command, line).exception, StorageError)
    summaries = summary.collect(tmp_path / "run")
    (tmp_path / "t.json").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        output.write(summaries, tmp_path / "t.json", {})
    assert not (tmp_path / ".t.json.part").exists()


def test_plot_errors_come_before_the_analysis(tmp_path, rng, monkeypatch):
    write_run(tmp_path / "run", rng, steps=3)
    bad = CliRunner().invoke(command, [str(tmp_path / "run"), "--plot", str(tmp_path / "t.xyz")])
    assert isinstance(bad.exception, UsageError)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bad = CliRunner().invoke(command, [str(tmp_path / "run"), "--plot", str(tmp_path / "t.png")])
    assert "hpcdist[analysis]" in str(bad.exception)


def test_rank_ranges_are_abbreviated():
    assert ranks_text([3]) == "rank 3" and ranks_text([0, 1, 2, 7]) == "ranks 0-2, 7"


def test_selected_ranks_keep_their_shared_events(tmp_path, rng):
    write_run(tmp_path, rng)
    whole = summary.collect(tmp_path)
    part = timeline.select(whole.timeline, [0, 1])
    assert {call.rank for meeting in part.matches.meetings for call in meeting.calls} == {0, 1}
    assert all({one.send.rank, one.receive.rank} <= {0, 1} for one in part.matches.messages)
    assert critical_path.waited_for({0: whole.pieces[0]})
