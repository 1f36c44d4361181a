"""Lines of JSON: readable at any moment, whole after a kill, and without what a resumed run makes again."""

import errno
import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest

from hpcdist.errors import StorageError
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.metrics.observations import KINDS, RunEvent
from hpcdist.telemetry.sinks import jsonl, stream
from hpcdist.telemetry.sinks.jsonl import FILE, JsonLines
from hpcdist.telemetry.sinks.stream import RunInfo

ON = TelemetryConfig(jsonl=True)


def run_in(folder, resumed_step=None):
    return RunInfo("a-run", folder, "42", 2, 1, "allreduce", resumed_step)


def rows(folder):
    return [json.loads(row) for row in (folder / FILE).read_text().splitlines()]


def step(number, **values):
    return RunEvent("step", number, {"training_loss_nats": 1.0 / number, **values})


def test_an_event_is_read_back(tmp_path, rng):
    loss, seconds = float(rng.standard_normal()), rng.random(2)
    at = 1_770_091_506_789_012_345
    values = {
        "training_loss_nats": loss,
        "steps_total": np.int64(7),
        "memory_bytes[activations]": 3.0,
        "why": 'a "x"\n',
    }
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 7, values, {"compute_seconds": seconds}, at)])
    sink.close(True)
    (found,) = rows(tmp_path)
    assert found["values"] == {**values, "steps_total": 7}
    assert found["ranks"] == {"compute_seconds": pytest.approx(seconds.tolist(), rel=1e-8)}
    assert (found["kind"], found["step"], found["time_ns"]) == ("step", 7, at)
    assert found["time"] == "2026-02-03T04:05:06.789012Z"
    parsed = datetime.fromisoformat(found["time"])
    assert parsed.tzinfo == UTC and parsed.timestamp() == pytest.approx(at / 1e9, abs=1e-5)


def test_what_is_no_number_is_null(tmp_path):
    values = {"gradient_norm": float("nan"), "loss_scale": float("inf"), "learning_rate": np.float64("nan")}
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, values, {"compute_seconds": np.array([np.nan, 2.0]), "x": np.array([-np.inf, 1])})])
    (found,) = rows(tmp_path)
    assert found["values"] == {"gradient_norm": None, "loss_scale": None, "learning_rate": None}
    assert found["ranks"] == {"compute_seconds": [None, 2.0], "x": [None, 1.0]}
    assert b"NaN" not in (tmp_path / FILE).read_bytes()


@pytest.mark.parametrize("value", [0.0, -1e-300, 1e300, 123456789.0, -7, 2.0**62])
def test_figures_of_ranks_are_json_of_any_size(tmp_path, value):
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, {}, {"a": np.array([value, 1.5]), 'odd "key"': np.array([value, np.nan])})])
    (found,) = rows(tmp_path)
    assert found["ranks"] == {
        "a": [pytest.approx(value, rel=1e-8), 1.5],
        'odd "key"': [pytest.approx(value, rel=1e-8), None],
    }


def test_of_many_ranks_lines_stay_short(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    world = jsonl.MOST_RANKS
    sink.write([RunEvent("step", 1, {}, {"a": np.ones(world)}), RunEvent("step", 2, {}, {"a": np.ones(world + 1)})])
    first, second = rows(tmp_path)
    assert len(first["ranks"]["a"]) == world
    assert "ranks" not in second


def test_the_lines_of_a_publish_are_one_write(tmp_path, monkeypatch):
    sink = JsonLines(run_in(tmp_path), ON)
    writes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or write(descriptor, data))
    sink.write([step(number) for number in range(1, 50)])
    assert len(writes) == 1
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 50)]


def test_a_reader_follows_while_the_run_goes_on(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    with (tmp_path / FILE).open() as reader:
        assert reader.read() == ""
        for number in (1, 2, 3):
            sink.write([step(number)])
            assert json.loads(reader.readline())["step"] == number
            assert reader.readline() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_a_resume_up_to_its_step(tmp_path, kind):
    first = JsonLines(run_in(tmp_path), ON)
    first.write([RunEvent(kind, 3), RunEvent(kind, 4), RunEvent(kind, 5)])
    first.close(False)
    JsonLines(run_in(tmp_path, 4), ON).write([RunEvent(kind, 5)])
    assert [row["step"] for row in rows(tmp_path)] == [3, 4, 5]


def test_what_was_written_late_about_an_early_step_stays(tmp_path):
    """A checkpoint that is written beside the steps is complete some steps later."""
    JsonLines(run_in(tmp_path), ON).write([step(1), step(2), step(3), RunEvent("checkpoint", 2), step(4)])
    JsonLines(run_in(tmp_path, 2), ON)
    assert [(row["kind"], row["step"]) for row in rows(tmp_path)] == [("step", 1), ("step", 2), ("checkpoint", 2)]


def test_a_run_that_begins_again_drops_all_steps(tmp_path):
    JsonLines(run_in(tmp_path), ON).write([RunEvent("begin", 0), step(1)])
    JsonLines(run_in(tmp_path), ON)
    assert [row["kind"] for row in rows(tmp_path)] == ["begin"]


@pytest.mark.parametrize("cut", [1, 2, 30, 70])
def test_a_last_line_that_was_cut_off_goes(tmp_path, cut):
    JsonLines(run_in(tmp_path), ON).write([step(1), step(2)])
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    JsonLines(run_in(tmp_path, 2), ON).write([step(3)])
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_a_file_that_was_cut_anywhere_goes_on(tmp_path, rng):
    """Whatever was left of it: lines up to the step of the checkpoint, in order, and then those that are made again."""
    for number in range(40):
        folder = tmp_path / str(number)
        sink = JsonLines(run_in(folder), ON)
        events = [step(int(number), note="x" * int(rng.integers(40))) for number in range(1, 20)]
        sink.write(events)
        path = folder / FILE
        whole = path.read_bytes()
        path.write_bytes(whole[: rng.integers(len(whole) + 1)])
        left, resumed = path.read_bytes().count(b"\n"), int(rng.integers(0, 20))
        JsonLines(run_in(folder, resumed), ON).write(events[resumed:])
        assert [row["step"] for row in rows(folder)] == [*range(1, min(left, resumed) + 1), *range(resumed + 1, 20)]


def test_a_file_with_nothing_to_drop_is_left_alone(tmp_path):
    """Whoever follows it goes on to do so."""
    JsonLines(run_in(tmp_path), ON).write([step(1)])
    before = (tmp_path / FILE).stat().st_ino
    JsonLines(run_in(tmp_path, 1), ON).write([step(2)])
    assert (tmp_path / FILE).stat().st_ino == before
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_kill_loses_no_more_than_the_last_line(tmp_path):
    """A process is killed while it writes as fast as it can: all lines but the last one are whole."""
    code = f"""
from pathlib import Path
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.sinks.jsonl import JsonLines
from hpcdist.telemetry.sinks.stream import RunEvent, RunInfo
sink = JsonLines(RunInfo("a", Path({str(tmp_path)!r}), "", 1, 1, ""), TelemetryConfig(jsonl=True))
step = 0
while True:
    sink.write([RunEvent("step", step := step + 1, {{"training_loss_nats": 1.5}}) for _ in range(20)])
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    path = tmp_path / FILE
    try:
        while not path.exists() or path.stat().st_size < 200_000:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    *whole, _ = path.read_bytes().split(b"\n")
    assert len(whole) > 100
    for row in whole:
        json.loads(row)
    JsonLines(run_in(tmp_path, 10**9), ON)
    assert path.read_bytes().endswith(b"}\n")
    assert len(rows(tmp_path)) == len(whole)


def test_a_directory_that_cannot_be_written_is_refused_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"events.jsonl cannot be written: .*telemetry.jsonl = false"):
        JsonLines(run_in(tmp_path / "file"), ON)


def test_a_full_disk_is_told_of_before_the_first_step(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"No space left on device; free space"):
        JsonLines(run_in(tmp_path), ON)


def full_disk(monkeypatch, room):
    """Let writes of more than ``room`` bytes stop there, as a disk that becomes full does."""
    write = os.write

    def short(descriptor, data):
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:room])

    monkeypatch.setattr(stream.os, "write", short)


@pytest.mark.parametrize("room", [0, 17])
def test_a_disk_that_fills_up_leaves_whole_lines_and_loses_none(tmp_path, monkeypatch, room):
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([step(1)])
    with monkeypatch.context() as patched:
        full_disk(patched, room)
        for number in (2, 3):
            with pytest.raises(StorageError, match="No space left"):
                sink.write([step(number)])
            assert [row["step"] for row in rows(tmp_path)] == [1]
    sink.write([step(4)])
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_what_waits_for_the_disk_is_bounded(tmp_path, monkeypatch):
    sink = JsonLines(run_in(tmp_path), ON)
    monkeypatch.setattr(stream, "PENDING_BYTES", 1000)
    with monkeypatch.context() as patched:
        full_disk(patched, 0)
        for number in range(1, 101):
            with pytest.raises(StorageError):
                sink.write([step(number)])
    sink.write([step(101)])
    found = [row["step"] for row in rows(tmp_path)]
    assert found == [*range(found[0], 102)] and 1 < len(found) < 20  # the last ones, without a gap


def test_a_file_that_somebody_removes_begins_again(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([step(1)])
    (tmp_path / FILE).unlink()
    sink.write([step(2)])
    assert [row["step"] for row in rows(tmp_path)] == [2]
