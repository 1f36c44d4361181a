"""Metrics: rows of steps and ranks that survive resumes, a killed writer and a full disk."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from hpcdist.cli.main import main
from hpcdist.errors import StorageError
from hpcdist.hdf5 import overlay
from hpcdist.hdf5.overlay import Overlay
from hpcdist.reporting.regular import DamagedFileError
from hpcdist.telemetry.metrics import side_tables, step_metrics
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter, read, summarise
from hpcdist.telemetry.page import document


def row(rng, step, world):
    wide = {name: rng.random(world) for name in PER_RANK}
    return {"step": step, "loss": float(rng.random()), "learning_rate": 0.1, "tokens": 100} | wide


def write(path, rng, steps, world, resume_step=None, **options):
    rows = [row(rng, step, world) for step in steps]
    with MetricsWriter(path, world, resume_step, **options) as writer:
        for one in rows:
            writer.append(**one)
    return rows


@pytest.mark.full
def test_written_rows_are_read_back(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(step_metrics, "FLUSH_ROWS", 10)
    path = tmp_path / "metrics.h5"
    rows = write(path, rng, range(1, 400), 3, attributes={"bigram_nats": 2.48, "commit": "abc"})
    metrics = read(path)
    assert metrics.attributes["bigram_nats"] == 2.48 and metrics.attributes["commit"] == "abc"
    for name in rows[0]:
        assert (metrics.steps[name] == np.array([one[name] for one in rows])).all(), name
    assert path.stat().st_size < 250_000


def test_plain_h5py_sees_scales_and_units(tmp_path, rng):
    path = tmp_path / "metrics.h5"
    write(path, rng, range(1, 4), 2)
    with h5py.File(path) as file:
        compute = file["steps/compute_s"]
        assert compute.shape == (3, 2) and compute.attrs["units"] == "s"
        assert [list(dim.keys()) for dim in compute.dims] == [["step"], ["rank"]]
        assert file["steps/rank"][...].tolist() == [0, 1]
        assert file[file.attrs["default"]].attrs["signal"] == "loss"
        assert all(file[name] == column for name, column in file["steps"].items()), "the same datasets at the root"


def test_xarray_opens_metrics_of_a_changed_world(tmp_path, rng):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed: pip install 'hpcdist[analysis]'")
    pytest.importorskip("h5netcdf")
    path = tmp_path / "metrics.h5"
    rows = write(path, rng, range(1, 4), 2)
    write(path, rng, (4,), 3, 3)
    with xarray.open_dataset(path, engine="h5netcdf") as data:
        assert dict(data.sizes) == {"step": 4, "rank": 3}
        assert data.loss.values[:3].tolist() == [one["loss"] for one in rows]


def test_resume_drops_later_rows_and_accepts_another_world(tmp_path, rng):
    path = tmp_path / "metrics.h5"
    first = write(path, rng, range(1, 11), 2)
    with MetricsWriter(path, 4, 6) as writer:
        writer.describe(strategy="allreduce")
        second = [row(rng, step, 4) for step in (7, 8)]
        for one in second:
            writer.append(**one)
        writer.evaluation(8, 1.5)
    third = write(path, rng, (9,), 1, 8)
    metrics = read(path)
    assert metrics.steps["step"].tolist() == list(range(1, 10))
    assert metrics.steps["session"].tolist() == [0] * 6 + [1, 1, 2]
    assert metrics.attributes["strategy"] == "allreduce" and metrics.attributes["sessions"] == 3
    assert metrics.steps["world"].tolist() == [2] * 6 + [4, 4, 1]
    compute = metrics.steps["compute_s"]
    assert compute.shape == (9, 4)
    assert np.isnan(compute[:6, 2:]).all() and np.isnan(compute[8, 1:]).all()
    for result, one in zip(compute, [one["compute_s"] for one in first[:6] + second + third], strict=True):
        assert (result[: one.size] == one).all()
    write(path, rng, (), 1, 7)
    assert read(path).evaluations["step"].size == 0


def test_other_run_is_rejected_and_unreadable_file_set_aside(tmp_path, rng, capfd):
    path = tmp_path / "metrics.h5"
    write(path, rng, (1,), 1)
    with pytest.raises(StorageError, match="another run"):
        MetricsWriter(path, 1)
    path.write_bytes(b"something else")
    with pytest.raises(StorageError, match="cannot be read as HDF5"):
        read(path)
    write(path, rng, (2,), 1, 1)
    assert capfd.readouterr().err.count("metrics.h5.damaged-1, and a new one begins here") == 1
    assert (tmp_path / "metrics.h5.damaged-1").read_bytes() == b"something else"
    assert read(path).steps["step"].tolist() == [2] and read(path).attributes["sessions"] == 1


def damage_file(path, how):
    """Damage the metrics file ``path`` in the way ``how``."""
    with h5py.File(path, "r+") as file:
        steps = file["steps"]
        if how == "a loop of links":
            del file["evaluations"]
            file["evaluations"] = h5py.SoftLink("/evaluations")
        elif how == "no space":
            del steps["loss"]
            steps["loss"] = h5py.Empty("f8")
        elif how == "too many rows":
            for name in ("step", "session", "world", "loss", "learning_rate", "tokens"):
                steps[name].resize((1 << 36,))
        elif how == "columns that are numbers":
            steps.attrs["columns"] = np.arange(3)
        elif how == "a column of ours that is not there":
            steps.attrs["columns"] = ["step", "nothing"]
        elif how == "a column of others":
            steps["other"] = steps["step"][...]
            steps.attrs["columns"] = [*steps.attrs["columns"], "other"]
        elif how == "a schema of another type":
            file.attrs["schema"] = np.arange(4)
        elif how == "an invalid version":
            file.attrs["schema_version"] = "new"
        elif how == "no sessions":
            file.attrs["sessions"] = h5py.Empty("f8")
        elif how == "texts for numbers":
            file.attrs.update(
                sessions="many", peak_bytes_total="much", lock_step=np.zeros(5), hosts=7, unigram_nats="x"
            )


FORGED = (
    "a loop of links",
    "no space",
    "too many rows",
    "columns that are numbers",
    "a column of ours that is not there",
    "a column of others",
    "a schema of another type",
    "an invalid version",
    "no sessions",
    "texts for numbers",
)


def code_of(*arguments):
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    return left.value.code


@pytest.mark.parametrize("how", FORGED)
@pytest.mark.full_except("columns that are numbers")
def test_damaged_file_causes_no_traceback(tmp_path, rng, capfd, how):
    path = tmp_path / "metrics.h5"
    write(path, rng, (1, 2), 1)
    damage_file(path, how)
    for command in (("report",), ("report", "--json"), ("energy", "report"), ("trace",)):
        assert code_of(*command, tmp_path) in ((2,) if command == ("trace",) else (0, 74)), command
    assert code_of("report", "--html", tmp_path / "page.html", tmp_path) in (0, 74)
    capfd.readouterr()
    write(path, rng, (3,), 1, 2)
    assert "metrics.h5.damaged-1" in capfd.readouterr().err
    assert read(path).steps["step"].tolist() == [3]


def test_file_damaged_during_a_run_is_set_aside(tmp_path, rng, capfd):
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 1, attributes={"strategy": "zero1"}) as writer:
        writer.append(**row(rng, 1, 1))
        writer.flush()
        path.write_bytes(b"\0" * 5000)
        writer.append(**row(rng, 2, 1))
    assert "metrics.h5.damaged-1" in capfd.readouterr().err
    assert read(path).steps["step"].tolist() == [2] and read(path).attributes["strategy"] == "zero1"


def fail_from(monkeypatch, number, code):
    """Let reads of pages fail from the ``number``-th on. Return the counted reads."""
    real, reads = overlay.pread_all, []

    def read_page(*arguments):
        reads.append(None)
        if len(reads) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(overlay, "pread_all", read_page)
    return reads


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.full
@pytest.mark.matrix_except("5")
def test_temporary_disk_error_keeps_the_file(tmp_path, rng, monkeypatch, code):
    path = tmp_path / "metrics.h5"
    write(path, rng, range(1, 5), 2)
    failures = []
    for number in range(1, 1000):
        with MetricsWriter(path, 2, 4) as writer, monkeypatch.context() as during:
            reads = fail_from(during, number, code)
            try:
                writer.append(**row(rng, 5, 2))
                writer.flush()
            except StorageError as error:
                failures.append(error)
        assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.h5"]
        assert read(path).steps["step"].tolist()[:4] == [1, 2, 3, 4]
        if len(reads) < number:
            break
    assert 5 < number < 999 and failures  # every read of the file has failed once
    assert not any(isinstance(error, DamagedFileError) or error.__cause__ is None for error in failures)


def test_errors_of_a_caller_keep_the_file(tmp_path, rng, monkeypatch):
    path = tmp_path / "metrics.h5"
    write(path, rng, (1, 2), 1)
    with MetricsWriter(path, 1, 2) as writer:
        with pytest.raises(KeyError, match="mistake"):
            writer.include(lambda file, session: {}["mistake"])
        assert read(path).steps["step"].tolist() == [1, 2]
    with pytest.raises(TypeError):
        write(path, rng, (3,), 1, 2, attributes={"x": object()})
    path.write_bytes(b"something else")
    monkeypatch.setattr(Overlay, "commit", lambda self: os.stat(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="cannot be written"):
        MetricsWriter(path, 1, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.h5"] and path.read_bytes() == b"something else"


def test_damaged_table_of_a_caller_sets_the_file_aside(tmp_path, rng):
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 1) as writer:
        writer.put(side_tables.SHARES, first_step=1, samples=[[2, 3]])
    with h5py.File(path, "r+") as file:
        del file["shares/samples"]
    with MetricsWriter(path, 1, 0) as writer:
        writer.put(side_tables.SHARES, first_step=1, samples=[[2, 3]])
    assert (tmp_path / "metrics.h5.damaged-1").is_file()
    with h5py.File(path) as file:
        assert file["shares/samples"][...].tolist() == [[2.0, 3.0]]


def test_error_in_a_chart_does_not_set_the_file_aside(tmp_path, rng, monkeypatch):
    write(tmp_path / "metrics.h5", rng, (1, 2), 1)
    monkeypatch.setattr(document, "make_page", lambda data: {}["mistake"])
    with pytest.raises(KeyError, match="mistake"):
        document.write_page(tmp_path, tmp_path / "page.html")


def test_resume_without_a_file_creates_one(tmp_path, rng):
    write(tmp_path / "metrics.h5", rng, (6,), 1, 5)
    assert read(tmp_path / "metrics.h5").steps["step"].tolist() == [6]


def append_until_full(writer, rng):
    """Append rows until the disk is full. Return the last step that was flushed before."""
    for step in range(1, 100_000):
        writer.append(**row(rng, step, 64))
        writer.flush()
    raise AssertionError("the disk never filled up")


def full_disk(path, rng):
    writer = MetricsWriter(path, 64)
    with pytest.raises(StorageError, match="cannot be written") as caught:
        append_until_full(writer, rng)
    assert caught.value.exit_code == 74
    metrics = read(path)
    written = len(metrics.steps["step"])
    assert written > 3 and metrics.steps["step"].tolist() == list(range(1, written + 1))
    assert np.isfinite(metrics.steps["compute_s"]).all()
    writer.close()  # nothing left to lose, nothing raised
    return written


@pytest.mark.full
def test_full_disk_keeps_the_rows(tmp_path, rng):
    path = tmp_path / "metrics.h5"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, limits[1]))
    try:
        written = full_disk(path, rng)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(path, rng, (written + 1,), 64, written)  # space again: the run goes on
    assert len(read(path).steps["step"]) == written + 1


def test_full_file_system_keeps_the_rows(tmp_path, rng):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root, where mounting is allowed, can make a small file system")
    try:
        full_disk(tmp_path / "metrics.h5", rng)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


WRITER = """
import sys, numpy as np
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
with MetricsWriter(sys.argv[1], 8) as writer:
    for step in range(1, 10**6):
        one = np.full(8, float(step))
        writer.append(step=step, loss=step, learning_rate=0, tokens=1, step_s=one, compute_s=one,
                      communication_s=one, update_s=one, sent_bytes=one)
        writer.flush()
        print(step, flush=True)
"""


@pytest.mark.full
def test_killed_writer_leaves_flushed_rows_for_readers(tmp_path, rng):
    for number in range(3):
        path = tmp_path / f"{number}.h5"
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            until = time.monotonic() + 0.2 + 0.2 * rng.random()
            while time.monotonic() < until:
                read(path)
            process.send_signal(signal.SIGKILL)
            flushed = 1 + len(process.stdout.readlines())
        steps = read(path).steps
        assert flushed - 1 <= len(steps["step"]) <= flushed + 1
        assert (steps["step"] == np.arange(1, len(steps["step"]) + 1)).all()
        write(path, rng, (len(steps["step"]) + 1,), 8, len(steps["step"]))


def test_summary_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(step_metrics, "LAST_LOSSES", 2)
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 2) as writer:
        for step, slow in enumerate([50.0, 1.0, 2.0, 3.0], start=1):
            writer.append(
                step=step,
                loss=10.0 - step,
                learning_rate=0.1,
                tokens=60,
                step_s=np.array([2 * slow, 1.5 * slow]),
                compute_s=np.array([slow, 2 * slow]),
                communication_s=np.array([slow, 0.0]),
                update_s=np.zeros(2),
                sent_bytes=np.array([np.nan, 8.0 * step]),
            )
        writer.evaluation(4, 1.25)
    result = summarise(read(path))
    assert result["steps"] == 4 and result["world"] == 2
    assert result["train_loss"] == 6.0 and result["train_loss_mean"] == 6.5 and result["val_loss"] == 1.25
    assert result["step_s_median"] == 4.0  # 2, 4, 6: the first step is left out
    assert result["tokens_per_s"] == 180 / 12
    assert result["comm_fraction"] == pytest.approx(1 / 3.5) and result["compute_fraction"] == pytest.approx(3 / 3.5)
    assert result["bytes_sent_per_step"] == 20.0
    assert result["slowest_rank"] == 1 and result["imbalance"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("lock_step", [1, 0])
def test_summary_excludes_the_waiting_of_servers(tmp_path, lock_step):
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 3, attributes={"lock_step": lock_step}) as writer:
        for step, slow in enumerate([50.0, 1.0, 3.0], start=1):
            other = abs(4.0 - slow)
            writer.append(
                step=step,
                loss=1.0,
                learning_rate=0.1,
                tokens=60,
                step_s=np.array([slow, other, 9.0]),
                compute_s=np.array([slow / 2, other / 2, 0.0]),
                communication_s=np.array([slow / 2, other / 2, 9.0]),
                update_s=np.zeros(3),
                sent_bytes=np.zeros(3),
            )
    result = summarise(read(path))
    assert result["comm_fraction"] == result["compute_fraction"] == 0.5, "the server's waiting is left out"
    assert result["tokens_per_s"] == 120 / (6.0 if lock_step else 4.0)
    assert result["slowest_rank"] in (0, 1)


def test_summary_without_measurements_is_none(tmp_path):
    with MetricsWriter(tmp_path / "metrics.h5", 2):
        pass
    empty = summarise(read(tmp_path / "metrics.h5"))
    assert empty.pop("steps") == 0 and empty.pop("world") == 0 and set(empty.values()) == {None}
    nothing = np.full(2, np.nan)
    with MetricsWriter(tmp_path / "metrics.h5", 2, 0) as writer:
        for step in (1, 2):
            writer.append(
                step=step,
                loss=float("nan"),
                learning_rate=0.0,
                tokens=1,
                step_s=nothing,
                compute_s=nothing,
                communication_s=nothing,
                update_s=nothing,
                sent_bytes=nothing,
            )
    unknown = summarise(read(tmp_path / "metrics.h5"))
    assert unknown.pop("steps") == 2 and unknown.pop("world") == 2 and set(unknown.values()) == {None}
