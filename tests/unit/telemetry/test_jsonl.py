"""JSON lines: readable at any moment, complete after a kill, and without repeated steps after a resume."""

import errno
import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pytest

from hpcdist.errors import StorageError
from hpcdist.telemetry import event_stream, jsonl
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.jsonl import FILE, JsonLines
from hpcdist.telemetry.metrics.observations import KINDS, RunEvent

ON = TelemetryConfig(jsonl=True)


def run_in(folder, resumed_step=None):
    return RunInfo("a-run", folder, "42", 2, 1, "allreduce", resumed_step)


def rows(folder):
    return [json.loads(row) for row in (folder / FILE).read_text().splitlines()]


def step(number, **values):
    return RunEvent("step", number, {"training_loss_nats": 1.0 / number, **values})


def test_event_is_read_back(tmp_path, rng):
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
    (result,) = rows(tmp_path)
    assert result["values"] == {**values, "steps_total": 7}
    assert result["ranks"] == {"compute_seconds": pytest.approx(seconds.tolist(), rel=1e-8)}
    assert (result["kind"], result["step"], result["time_ns"]) == ("step", 7, at)
    assert result["time"] == "2026-02-03T04:05:06.789012Z"
    parsed = datetime.fromisoformat(result["time"])
    assert parsed.tzinfo == UTC and parsed.timestamp() == pytest.approx(at / 1e9, abs=1e-5)


def test_non_finite_values_are_null(tmp_path):
    values = {"gradient_norm": float("nan"), "loss_scale": float("inf"), "learning_rate": np.float64("nan")}
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, values, {"compute_seconds": np.array([np.nan, 2.0]), "x": np.array([-np.inf, 1])})])
    (result,) = rows(tmp_path)
    assert result["values"] == {"gradient_norm": None, "loss_scale": None, "learning_rate": None}
    assert result["ranks"] == {"compute_seconds": [None, 2.0], "x": [None, 1.0]}
    assert b"NaN" not in (tmp_path / FILE).read_bytes()


@pytest.mark.parametrize("value", [0.0, -1e-300, 1e300, 123456789.0, -7, 2.0**62])
def test_figures_of_ranks_are_valid_json(tmp_path, value):
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, {}, {"a": np.array([value, 1.5]), 'odd "key"': np.array([value, np.nan])})])
    (result,) = rows(tmp_path)
    assert result["ranks"] == {
        "a": [pytest.approx(value, rel=1e-8), 1.5],
        'odd "key"': [pytest.approx(value, rel=1e-8), None],
    }


def test_lines_of_many_ranks_stay_short(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    world = jsonl.MOST_RANKS
    sink.write([RunEvent("step", 1, {}, {"a": np.ones(world)}), RunEvent("step", 2, {}, {"a": np.ones(world + 1)})])
    first, second = rows(tmp_path)
    assert len(first["ranks"]["a"]) == world
    assert "ranks" not in second


def test_lines_of_a_publish_are_one_write(tmp_path, monkeypatch):
    sink = JsonLines(run_in(tmp_path), ON)
    writes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: writes.append(data) or write(descriptor, data))
    sink.write([step(number) for number in range(1, 50)])
    assert len(writes) == 1
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 50)]


def test_reader_can_follow_a_running_job(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    with (tmp_path / FILE).open() as reader:
        assert reader.read() == ""
        for number in (1, 2, 3):
            sink.write([step(number)])
            assert json.loads(reader.readline())["step"] == number
            assert reader.readline() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_resume_keeps_events_up_to_its_step(tmp_path, kind):
    first = JsonLines(run_in(tmp_path), ON)
    first.write([RunEvent(kind, 3), RunEvent(kind, 4), RunEvent(kind, 5)])
    first.close(False)
    JsonLines(run_in(tmp_path, 4), ON).write([RunEvent(kind, 5)])
    assert [row["step"] for row in rows(tmp_path)] == [3, 4, 5]


def test_late_event_of_an_early_step_is_kept(tmp_path):
    """An asynchronous checkpoint is complete some steps later."""
    JsonLines(run_in(tmp_path), ON).write([step(1), step(2), step(3), RunEvent("checkpoint", 2), step(4)])
    JsonLines(run_in(tmp_path, 2), ON)
    assert [(row["kind"], row["step"]) for row in rows(tmp_path)] == [("step", 1), ("step", 2), ("checkpoint", 2)]


def test_run_that_begins_again_drops_all_steps(tmp_path):
    JsonLines(run_in(tmp_path), ON).write([RunEvent("begin", 0), step(1)])
    JsonLines(run_in(tmp_path), ON)
    assert [row["kind"] for row in rows(tmp_path)] == ["begin"]


@pytest.mark.parametrize("cut", [1, 2, 30, 70])
def test_truncated_last_line_is_dropped(tmp_path, cut):
    JsonLines(run_in(tmp_path), ON).write([step(1), step(2)])
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    JsonLines(run_in(tmp_path, 2), ON).write([step(3)])
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]


def test_file_truncated_anywhere_can_be_resumed(tmp_path, rng):
    """The remaining lines up to the step of the checkpoint stay in order, followed by the repeated steps."""
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


def test_file_with_nothing_to_drop_is_not_replaced(tmp_path):
    """A reader can continue to follow the file."""
    JsonLines(run_in(tmp_path), ON).write([step(1)])
    before = (tmp_path / FILE).stat().st_ino
    JsonLines(run_in(tmp_path, 1), ON).write([step(2)])
    assert (tmp_path / FILE).stat().st_ino == before
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_kill_loses_at_most_the_last_line(tmp_path):
    """A process is killed while it writes as fast as possible: all lines except the last are complete."""
    code = f"""
from pathlib import Path
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.jsonl import JsonLines
from hpcdist.telemetry.event_stream import RunEvent, RunInfo
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


def test_unwritable_directory_is_rejected_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"events.jsonl cannot be written: .*telemetry.jsonl = false"):
        JsonLines(run_in(tmp_path / "file"), ON)


def test_full_disk_is_reported_before_the_first_step(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"No space left on device; free space"):
        JsonLines(run_in(tmp_path), ON)


def full_disk(monkeypatch, room):
    """Let writes of more than ``room`` bytes stop there, like a disk that becomes full."""
    write = os.write

    def short(descriptor, data):
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:room])

    monkeypatch.setattr(event_stream.os, "write", short)


@pytest.mark.parametrize("room", [0, 17])
def test_disk_that_fills_up_keeps_complete_lines(tmp_path, monkeypatch, room):
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


def test_number_of_pending_events_is_bounded(tmp_path, monkeypatch):
    sink = JsonLines(run_in(tmp_path), ON)
    monkeypatch.setattr(event_stream, "PENDING_BYTES", 1000)
    with monkeypatch.context() as patched:
        full_disk(patched, 0)
        for number in range(1, 101):
            with pytest.raises(StorageError):
                sink.write([step(number)])
    sink.write([step(101)])
    results = [row["step"] for row in rows(tmp_path)]
    assert results == [*range(results[0], 102)] and 1 < len(results) < 20  # the last ones, without a gap


def test_removed_file_is_created_again(tmp_path):
    sink = JsonLines(run_in(tmp_path), ON)
    sink.write([step(1)])
    (tmp_path / FILE).unlink()
    sink.write([step(2)])
    assert [row["step"] for row in rows(tmp_path)] == [2]
