"""Event files are what TensorBoard reads: checksums, tags, times, and no step twice after a resume."""

import struct
import sys

import numpy as np
import pytest

from harness import jobs
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.sinks import tensorboard
from hpcdist.telemetry.sinks.stream import RunInfo
from hpcdist.telemetry.sinks.tensorboard import DIRECTORY, TensorBoard, tag

pytest.importorskip("tensorboardX")

from stubs import event_files

ON = TelemetryConfig(tensorboard=True)
SECOND = 1_000_000_000


def run_in(folder, resumed_step=None, started_s=1_770_000_000):
    return RunInfo("a-run", folder, "42", 2, 1, "allreduce", resumed_step, started_s * SECOND)


def step(number, loss=1.0, at_s=0.0):
    return RunEvent("step", number, {"training_loss_nats": loss, "steps_total": number}, time_ns=int(at_s * SECOND))


def scalars(folder):
    return event_files.scalars(folder / DIRECTORY)


def test_figures_are_read_back_with_their_tags_steps_and_times(tmp_path, rng):
    losses = rng.random(20)
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([step(number, loss, 1_770_000_000.5 + number) for number, loss in enumerate(losses[:12], 1)])
    sink.write([step(number, loss, 1_770_000_000.5 + number) for number, loss in enumerate(losses[12:], 13)])
    sink.write([RunEvent("memory", 20, {"memory_bytes[activations]": 2.0**40, "power_watts[gpu]": 300})])
    sink.close(True)
    found = scalars(tmp_path)
    assert set(found) == {"loss/training", "job/steps", "memory/now/activations", "energy/power/gpu"}
    assert found["loss/training"] == [
        (number, float(np.float32(loss)), 1_770_000_000.5 + number) for number, loss in enumerate(losses, 1)
    ]
    assert found["memory/now/activations"][0][:2] == (20, 2.0**40)


def test_what_is_not_known_has_no_point(tmp_path):
    values = {"training_loss_nats": float("nan"), "learning_rate": 0.5, "validation_loss_nats": float("inf")}
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, values), RunEvent("step", 2, {"training_loss_nats": np.float64("nan")})])
    found = scalars(tmp_path)
    assert [(name, rows[0][:2]) for name, rows in found.items()] == [
        ("optimizer/learning_rate", (1, 0.5)),
        ("loss/validation", (1, float("inf"))),
    ]


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    first = TensorBoard(run_in(tmp_path), ON)
    first.write([step(number, 10 + number) for number in range(1, 8)])
    first.close(False)
    second = TensorBoard(run_in(tmp_path, 4), ON)  # in the same second as the first one
    second.write([step(number, 20 + number) for number in range(5, 9)])
    second.close(True)
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 2
    assert [row[:2] for row in scalars(tmp_path)["loss/training"]] == [
        (1, 11), (2, 12), (3, 13), (4, 14), (5, 25), (6, 26), (7, 27), (8, 28),
    ]  # fmt: skip


def test_a_start_after_a_kill_does_not_touch_the_file_that_was_cut_off(tmp_path):
    TensorBoard(run_in(tmp_path), ON).write([step(1), step(2)])
    (path,) = (tmp_path / DIRECTORY).iterdir()
    cut = path.read_bytes()[:-5]
    path.write_bytes(cut)
    TensorBoard(run_in(tmp_path, 1, started_s=1_770_000_005), ON).write([step(2, 3.0)])
    assert path.read_bytes() == cut
    assert [row[:2] for row in scalars(tmp_path)["loss/training"]] == [(1, 1.0), (2, 3.0)]
    (new,) = set((tmp_path / DIRECTORY).iterdir()) - {path}
    assert new.name > path.name
    assert [value.simple_value for event in event_files.events(new) for value in event.summary.value][-2:] == [3.0, 2.0]


def test_the_recipe_and_notes_are_texts(tmp_path):
    recipe = '[run]\nsteps = 3\n\n[model]\nkind = "gpt"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([RunEvent("anomaly", 9, {"anomalies_total[loss spike]": 1, "text": "step 9: loss 5.2"})])
    found = event_files.texts(tmp_path / DIRECTORY)
    assert found["anomaly/text"] == "step 9: loss 5.2"
    assert "".join(row.removeprefix("    ") + "\n" for row in found["recipe"].splitlines()) == recipe
    assert scalars(tmp_path)["anomalies/loss spike"][0][:2] == (9, 1)


def test_every_figure_of_the_catalogue_has_a_tag_of_its_own():
    keys = [quantities.key(name, "x" if quantity.label else "") for name, quantity in quantities.QUANTITIES.items()]
    tags = [tag(key) for key in keys]
    assert len(set(tags)) == len(tags)
    assert all("/" in shown for shown in tags)  # so that TensorBoard groups them


def test_our_checksums_are_those_of_tensorboardx(rng):
    from tensorboardX.record_writer import masked_crc32c

    assert tensorboard.crc32c([b"123456789"]).tolist() == [0xE3069283]  # the check value of CRC-32C
    data = [rng.bytes(int(size)) for size in [0, 1, 8, *rng.integers(0, 900, 40)]]
    assert tensorboard.masked(tensorboard.crc32c(data)).tolist() == [masked_crc32c(record) for record in data]
    assert tensorboard.crc32c([]).tolist() == []


def test_the_reader_of_these_tests_sees_damage(tmp_path):
    TensorBoard(run_in(tmp_path), ON).write([step(1)])
    (path,) = (tmp_path / DIRECTORY).iterdir()
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    data[16 + length + 14] ^= 1  # in the second record
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="damaged"):
        scalars(tmp_path)


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[tensorboard\].*telemetry.tensorboard = false"):
        TensorBoard(run_in(tmp_path), ON)


def test_the_sink_does_not_load_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.sinks.stream import RunInfo
from hpcdist.telemetry.sinks.tensorboard import TensorBoard
assert "tensorboardX" not in sys.modules
TensorBoard(RunInfo("a", Path({str(tmp_path)!r}), "", 1, 1, ""), TelemetryConfig(tensorboard=True)).close(True)
print("torch" in sys.modules)
"""
    done = jobs.python(code)
    assert done.stdout == "False\n", done.stderr


def test_a_disk_without_room_is_told_of_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / DIRECTORY).mkdir()
    name = "events.out.tfevents.1770000000.0000.hpcdist"
    (tmp_path / DIRECTORY / name).symlink_to("/dev/full")
    monkeypatch.setattr("hpcdist.telemetry.sinks.tensorboard._new_file", lambda run: tmp_path / DIRECTORY / name)
    with pytest.raises(StorageError, match=r"No space left on device; free space, or set telemetry.tensorboard"):
        TensorBoard(run_in(tmp_path), ON)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / DIRECTORY).write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        TensorBoard(run_in(tmp_path), ON)
