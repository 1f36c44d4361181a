"""`hpcdist schedule`: its output, plots and errors, without starting a rank."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.bench import schedules
from hpcdist.bench.schedules import ScheduleRequest
from hpcdist.cli.plan.schedule import command
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.strategies.schedule.operation_list import generated
from hpcdist.strategies.schedule.verify import proof


def run(*arguments):
    done = CliRunner().invoke(command, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def schedule_json(*arguments):
    return json.loads(run(*arguments, "--json"))


def error_text(error, *arguments):
    done = CliRunner().invoke(command, [str(one) for one in arguments])
    assert isinstance(done.exception, error), done.exception
    return str(done.exception)


def test_table_has_bubble_closed_form_and_memory():
    lines = run("1f1b", "zb-h1", "--stages", 4, "--microbatches", 8).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["1f1b", "1", "27.27%", "27.27%", "33", "s", "27.27%", "4", "3", "2", "1", "0", "0", "0", "0", "33", "s"],
        ["zb-h1", "1", "11.11%", "11.11%", "27", "s", "11.11%", "4", "3", "2", "1", "1", "2", "3", "4", "27", "s"],
    ]


def test_json_figures_of_a_schedule():
    result = schedule_json("interleaved", "--stages", 2, "--microbatches", 4, "--chunks", 3, "--costs", "3,2,1")
    (row,) = result["schedules"]
    assert (row["chunks"], row["verified"], row["makespan_s"]) == (3, "operations", 26.0)
    assert row["bubble"] == pytest.approx(row["closed_form"]) == pytest.approx(1 / 13)
    assert row["critical_path"]["computes_s"] == pytest.approx(26.0) and row["critical_path"]["hops"] > 0
    assert [rank["busy_s"] for rank in row["ranks"]] == pytest.approx([24.0, 24.0])


def test_uneven_stages_and_messages_have_no_closed_form():
    uneven = schedule_json("1f1b", "--stages", 2, "--costs", "1,1,1", "--costs", "2,2,2")["schedules"][0]
    assert uneven["closed_form"] is None and uneven["makespan_s"] == 1 + 8 * 6 + 2
    far = schedule_json("1f1b", "--stages", 2, "--microbatches", 1, "--message-s", 0.5)["schedules"][0]
    assert far["closed_form"] is None and far["makespan_s"] == 7.0 and far["critical_path"]["messages_s"] == 1.0
    again = schedule_json("gpipe", "--stages", 1, "--microbatches", 3, "--recompute")["schedules"][0]
    assert again["closed_form"] is None and again["makespan_s"] == 9.0 + 3.0


def test_dumped_schedule_is_read_back(tmp_path):
    file = tmp_path / "mine.txt"
    written = schedule_json("zb-v", "--stages", 3, "--microbatches", 5, "--dump", file)["schedules"][0]
    read = schedule_json("--file", file, "--stages", 3, "--microbatches", 5)["schedules"][0]
    assert (read.pop("schedule"), written.pop("schedule")) == ("mine.txt", "zb-v")
    assert (read.pop("closed_form"), written.pop("closed_form")) == (None, 0.0)
    assert read == written


def test_invalid_schedules_are_rejected(tmp_path):
    file = tmp_path / "circle.txt"
    file.write_text("F0 B0 F1 B1\nF1 B1 F0 B0\n")
    output = error_text(ConfigurationError, "--file", file, "--stages", 2, "--microbatches", 2)
    assert str(file) in output and "cyclic wait" in output
    assert "needs at least 4 micro-batches" in error_text(ConfigurationError, "interleaved", "--microbatches", 2)
    assert "choose from gpipe, 1f1b" in error_text(UsageError, "1f2b")
    assert "choose from gpipe, 1f1b" in error_text(UsageError, "sequential")
    assert "no schedule is given" in error_text(UsageError)
    assert "once per stage (4 times)" in error_text(UsageError, "1f1b", "--costs", "1,1,1", "--costs", "2,1,1")
    assert "finite" in error_text(UsageError, "1f1b", "--costs", "1,1,inf")
    assert "give each stage a cost above 0" in error_text(UsageError, "1f1b", "--costs", "0,0,0")
    assert "--message-s inf" in error_text(UsageError, "1f1b", "--message-s", "inf")
    assert "--recompute does not work with zb-h1" in error_text(UsageError, "zb-h1", "--recompute")
    assert "2 are given" in error_text(UsageError, "1f1b", "gpipe", "--dump", tmp_path / "x")
    for option in ("--dump", "--trace", "--plot"):
        end = ".png" if option == "--plot" else ""
        assert "cannot be written" in error_text(StorageError, "1f1b", option, tmp_path / "no" / f"x{end}")
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read" in error_text(StorageError, "--file", file)


def test_operation_lists_of_small_schedules_are_verified(monkeypatch):
    """The verifier of the executor checks these lists. Above some size only the passes are verified."""
    seen = []

    def count_lists(lists, **about):
        seen.append(len(lists))
        return proof.verify(lists, **about)

    monkeypatch.setattr(schedules, "verify", count_lists)
    for name in ("1f1b", "zb-h1", "zb-v"):
        result = schedules.simulate_schedule(name, generated(name, 3, 4), ScheduleRequest(3, 4))
        assert result.operations
    assert seen == [3, 3, 3]
    large = schedules.simulate_schedule("1f1b", generated("1f1b", 8, 1300), ScheduleRequest(8, 1300))
    assert not large.operations and large.timeline.bubble == pytest.approx(large.closed) and seen == [3, 3, 3]


def test_trace_has_every_pass_of_every_rank(tmp_path):
    file = tmp_path / "t.json"
    run("zb-h1", "interleaved", "--stages", 2, "--microbatches", 3, "--trace", file)
    result = json.loads(file.read_text())["traceEvents"]
    passes = [event for event in result if event["ph"] == "X"]
    assert len(passes) == 2 * 3 * 3 + 2 * 3 * 2 * 2
    assert {event["name"] for event in passes if event["pid"] == 0} >= {"F0.0", "I2.0", "W2.0"}
    first = min((event for event in passes if event["pid"] == 0 and event["tid"] == 1), key=lambda event: event["ts"])
    assert (first["name"], first["ts"], first["dur"]) == ("F0.0", 1e6, 1e6)
    names = [event["args"]["name"] for event in result if event["name"] == "process_name"]
    assert [name.split(",")[0] for name in names] == ["zb-h1", "interleaved"]


@pytest.mark.parametrize("end", ["png", "svg"])
@pytest.mark.full_except("svg")
def test_timeline_plot_is_written(end, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"a.{end}"
    run("1f1b", "interleaved", "--stages", 2, "--microbatches", 3, "--recompute", "--plot", file)
    assert file.stat().st_size > 5000


def test_colours_differ_in_brightness():
    def brightness(colour):
        red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    results = sorted(brightness(colour) for _, _, colour in schedules.STYLES.values())
    assert np.diff(results).min() > 0.02


def test_critical_path_follows_the_computing_ranks():
    result = schedules.simulate_schedule("1f1b", generated("1f1b", 2, 2), ScheduleRequest(2, 2))
    panel = schedules.panel("two", result.timeline)
    assert panel.path[0] == (0.0, 0) and panel.path[-1] == (result.timeline.makespan_s, 0)
    assert {rank for _, rank in panel.path} == {0, 1}
