"""Event files as TensorBoard reads them: checksums, tags, times, and no repeated step after a resume."""

import struct
import sys

import numpy as np
import pytest

from harness import jobs
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.telemetry import tensorboard
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.observations import RunEvent
from hpcdist.telemetry.tensorboard import DIRECTORY, TensorBoard, tag

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


def test_figures_are_read_back_with_tags_steps_and_times(tmp_path, rng):
    losses = rng.random(20)
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([step(number, loss, 1_770_000_000.5 + number) for number, loss in enumerate(losses[:12], 1)])
    sink.write([step(number, loss, 1_770_000_000.5 + number) for number, loss in enumerate(losses[12:], 13)])
    sink.write([RunEvent("memory", 20, {"memory_bytes[activations]": 2.0**40, "power_watts[gpu]": 300})])
    sink.close(True)
    result = scalars(tmp_path)
    assert set(result) == {"loss/training", "job/steps", "memory/now/activations", "energy/power/gpu"}
    assert result["loss/training"] == [
        (number, float(np.float32(loss)), 1_770_000_000.5 + number) for number, loss in enumerate(losses, 1)
    ]
    assert result["memory/now/activations"][0][:2] == (20, 2.0**40)


def test_missing_values_have_no_point(tmp_path):
    values = {"training_loss_nats": float("nan"), "learning_rate": 0.5, "validation_loss_nats": float("inf")}
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([RunEvent("step", 1, values), RunEvent("step", 2, {"training_loss_nats": np.float64("nan")})])
    result = scalars(tmp_path)
    assert [(name, rows[0][:2]) for name, rows in result.items()] == [
        ("optimizer/learning_rate", (1, 0.5)),
        ("loss/validation", (1, float("inf"))),
    ]


def test_resumed_run_shows_each_step_once(tmp_path):
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


def test_restart_does_not_change_a_truncated_file(tmp_path):
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


def test_recipe_and_notes_are_stored_as_texts(tmp_path):
    recipe = '[run]\nsteps = 3\n\n[model]\nkind = "gpt"\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    sink = TensorBoard(run_in(tmp_path), ON)
    sink.write([RunEvent("anomaly", 9, {"anomalies_total[loss spike]": 1, "text": "step 9: loss 5.2"})])
    result = event_files.texts(tmp_path / DIRECTORY)
    assert result["anomaly/text"] == "step 9: loss 5.2"
    assert "".join(row.removeprefix("    ") + "\n" for row in result["recipe"].splitlines()) == recipe
    assert scalars(tmp_path)["anomalies/loss spike"][0][:2] == (9, 1)


def test_every_figure_of_the_catalogue_has_a_unique_tag():
    keys = [quantities.key(name, "x" if quantity.label else "") for name, quantity in quantities.QUANTITIES.items()]
    tags = [tag(key) for key in keys]
    assert len(set(tags)) == len(tags)
    assert all("/" in shown for shown in tags)  # so that TensorBoard groups them


def test_checksums_match_tensorboardx(rng):
    from tensorboardX.record_writer import masked_crc32c

    assert tensorboard.crc32c([b"123456789"]).tolist() == [0xE3069283]  # the check value of CRC-32C
    data = [rng.bytes(int(size)) for size in [0, 1, 8, *rng.integers(0, 900, 40)]]
    assert tensorboard.masked(tensorboard.crc32c(data)).tolist() == [masked_crc32c(record) for record in data]
    assert tensorboard.crc32c([]).tolist() == []


def test_test_reader_detects_damage(tmp_path):
    TensorBoard(run_in(tmp_path), ON).write([step(1)])
    (path,) = (tmp_path / DIRECTORY).iterdir()
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    data[16 + length + 14] ^= 1  # in the second record
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="damaged"):
        scalars(tmp_path)


def test_missing_package_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingCapabilityError, match=r"hpcdist\[tensorboard\].*telemetry.tensorboard = false"):
        TensorBoard(run_in(tmp_path), ON)


def test_sink_does_not_import_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import RunInfo
from hpcdist.telemetry.tensorboard import TensorBoard
assert "tensorboardX" not in sys.modules
TensorBoard(RunInfo("a", Path({str(tmp_path)!r}), "", 1, 1, ""), TelemetryConfig(tensorboard=True)).close(True)
print("torch" in sys.modules)
"""
    done = jobs.python(code)
    assert done.stdout == "False\n", done.stderr


def test_full_disk_is_reported_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / DIRECTORY).mkdir()
    name = "events.out.tfevents.1770000000.0000.hpcdist"
    (tmp_path / DIRECTORY / name).symlink_to("/dev/full")
    monkeypatch.setattr("hpcdist.telemetry.tensorboard._new_file", lambda run: tmp_path / DIRECTORY / name)
    with pytest.raises(StorageError, match=r"No space left on device; free space, or set telemetry.tensorboard"):
        TensorBoard(run_in(tmp_path), ON)


def test_unwritable_directory_is_rejected(tmp_path):
    (tmp_path / DIRECTORY).write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        TensorBoard(run_in(tmp_path), ON)
