"""Reports: text, JSON and a picture of a run directory."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from harness.marks import cases
from hpcdist.cli.runs.report import report as command
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.jsonable import jsonable
from hpcdist.telemetry import report
from hpcdist.telemetry.metrics import observations, side_tables
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
from hpcdist.telemetry.provenance import git_commit, provenance


@pytest.fixture
def run_dir(tmp_path, rng):
    attributes = {"unigram_nats": 3.1, "bigram_nats": 2.48, "trigram_nats": 1.92, "strategy": "allreduce"}
    with MetricsWriter(tmp_path / "metrics.h5", 2, attributes=attributes) as writer:
        for step in range(1, 61):
            times = rng.random((3, 2)) + 0.1
            writer.append(
                step=step,
                loss=5.0 / step**0.5,
                learning_rate=0.01,
                tokens=512,
                step_s=times.sum(axis=0),
                compute_s=times[0],
                communication_s=times[1],
                update_s=times[2],
                sent_bytes=np.full(2, 4096.0 if step > 1 else np.nan),
            )
        writer.evaluation(30, 2.5)
        writer.evaluation(60, 1.5)
    return tmp_path


def test_text_report_has_all_figures(run_dir):
    output = CliRunner().invoke(command, [str(run_dir)], catch_exceptions=False).output
    assert "shared memory" not in output
    for expected in (
        "60 on 2 ranks",
        "validation loss  1.5000 nats",
        "trigram 1.920",
        "moved a step     4.0 KiB  (in messages",
        "communication",
        "none             skipped steps, anomalies",
    ):
        assert expected in output
    rows = output.splitlines()[output.splitlines().index("    step     loss  learning rate") + 1 :]
    assert len(rows) == report.CURVE_ROWS and rows[-1].split()[0] == "60"
    bars = [row.count("█") for row in rows]
    assert bars[0] == report.BAR_WIDTH and bars[-1] == 0 and bars == sorted(bars, reverse=True)
    mean = np.mean([5.0 / step**0.5 for step in range(56, 61)])
    assert float(rows[-1].split()[1]) == pytest.approx(mean, abs=1e-4)


def test_shared_memory_bytes_are_reported_separately(run_dir):
    with MetricsWriter(run_dir / "metrics.h5", 2, resume_step=60) as writer:
        writer.describe(bytes_loaded_per_step=8192)
    output = CliRunner().invoke(command, [str(run_dir)], catch_exceptions=False).output
    assert "moved a step     12.0 KiB  (a rank: 4.0 KiB in messages, 8.0 KiB through shared memory)" in output


@cases(
    "world, sent, output",
    (2, 0.0, "no overlap, moved a step, peak memory: not stored by the run: it is running"),
    (2, 4096.0, "moved a step   4.0 KiB  (in messages, of the rank that sends most; other ways: not stored by the run"),
    (2, np.nan, "no overlap, moved a step, peak memory: not stored by the run: it is running"),
    (1, 0.0, "moved a step   0 bytes  (one rank: there is no other rank to send to)"),
)
def test_report_of_a_running_job_names_unknown_values(world, sent, output, tmp_path):
    with MetricsWriter(tmp_path / "metrics.h5", world) as writer:
        seconds = dict.fromkeys(("step_s", "compute_s", "communication_s", "update_s"), np.ones(world))
        sent_bytes = np.full(world, sent)
        writer.append(step=1, loss=5.0, learning_rate=0.1, tokens=512, sent_bytes=sent_bytes, **seconds)
    text = report.text(report.report(tmp_path))
    assert f"\n{output}" in text and "not measured" not in text
    assert "no validation loss: no validation was made yet" in text and "only first steps of a start" in text


def test_energy_of_a_running_job_is_shown_by_phase(run_dir):
    kept = {
        "by_kind": {"gpu": 100.0, "cpu": 25.5},
        "phases": {"training": {"joules": 120.0, "seconds": 9.0}, "checkpoint": {"joules": 5.5, "seconds": 1.0}},
        "reason": None,
    }
    parts = {"compute": {"joules": 90.0, "seconds": 7.0}, "idle": {"joules": 30.0, "seconds": 2.0}}
    (run_dir / "usage.json").write_text(json.dumps({"since_step": 0, "joules": kept, "activities": parts}))
    output = CliRunner().invoke(command, [str(run_dir)], catch_exceptions=False).output
    assert "energy           125.5 J  (gpu 100 J, cpu 25.5 J; compute 90 J, idle 30 J, checkpoint 5.5 J)" in output
    assert "(training only; 2 J a step)" in output
    figures = json.loads(CliRunner().invoke(command, [str(run_dir), "--json"], catch_exceptions=False).output)
    assert figures["energy_j"] == 125.5 and figures["energy_j_by_phase"] == {"training": 120.0, "checkpoint": 5.5}


def test_anomalies_are_reported(run_dir):
    attributes = {"communication_hidden_share": 0.83, "peak_bytes_total": 3 << 20}
    with MetricsWriter(run_dir / "metrics.h5", 2, resume_step=60, attributes=attributes) as writer:
        writer.put(side_tables.LOSS_SCALE, step=7, scale=65536.0, skipped=True)
        event = SimpleNamespace(kind="anomaly", step=9, time_ns=5, values={"text": "step 9: loss 12"})
        writer.include(lambda file, session: observations.append(file, session, [event]))
    output = CliRunner().invoke(command, [str(run_dir)], catch_exceptions=False).output
    for title, value in (("overlap", "83%"), ("peak memory", "3.0 MiB"), ("skipped steps", "1"), ("anomalies", "1")):
        assert f"{title:17}{value}  (" in output
    assert re.search(r"straggler score  1\.\d\d  \(rank \d over the median rank", output)


def test_sampled_part_of_a_large_run_is_reported(run_dir, monkeypatch):
    monkeypatch.setattr(side_tables.read, "__defaults__", (10 * 2 * 8,))
    monkeypatch.setattr(side_tables, "spread_blocks", lambda rows, chunk, most: [(0, 5), (55, 60)])
    output = CliRunner().invoke(command, [str(run_dir)], catch_exceptions=False).output
    assert "times and bytes are from 10 of 60 steps, spread evenly" in output and "steps            60 on" in output


def test_json_report(run_dir):
    output = CliRunner().invoke(command, [str(run_dir), "--json"], catch_exceptions=False).output
    figures = json.loads(output)
    assert figures["steps"] == 60 and figures["val_loss"] == 1.5 and figures["strategy"] == "allreduce"
    assert figures["bytes_sent_per_step"] == 4096 and figures["run_dir"] == str(run_dir)


@pytest.mark.parametrize("ending", ("png", "pdf", "svg"))
@pytest.mark.full_except("png")
def test_plot_is_written(run_dir, ending):
    pytest.importorskip("matplotlib")
    picture = run_dir / f"loss.{ending}"
    CliRunner().invoke(command, [str(run_dir), "--plot", str(picture)], catch_exceptions=False)
    assert picture.stat().st_size > 5000
    if ending == "svg":
        assert "trigram entropy 1.92" in picture.read_text()


def test_plot_errors_are_clear(run_dir, monkeypatch):
    result = report.report(run_dir)
    with pytest.raises(UsageError, match="not supported"):
        report.plot(result, run_dir / "loss.nonsense")
    with pytest.raises(StorageError, match="cannot be written"):
        report.plot(result, run_dir / "missing/loss.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingCapabilityError, match="analysis"):
        report.plot(result, run_dir / "loss.png")


def test_report_without_metrics_or_steps(tmp_path):
    with pytest.raises(StorageError, match="holds no metrics"):
        report.report(tmp_path)
    with MetricsWriter(tmp_path / "metrics.h5", 2):
        pass
    result = report.report(tmp_path)
    assert "no step was completed" in report.text(result)
    assert json.dumps(jsonable(result.figures), allow_nan=False)
    with pytest.raises(UsageError, match="nothing to plot"):
        report.plot(result, tmp_path / "loss.png")


def test_help_imports_no_heavy_modules():
    code = "import sys, hpcdist.cli.runs.report; assert not {'h5py', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_provenance_is_recorded(tmp_path):
    result = provenance(mpi_library="Open MPI 5", hosts=["a", "b"], environment={"SLURM_JOB_ID": "7"})
    assert result["hosts"] == "a,b" and result["slurm_job_id"] == "7" and result["mpi_library"] == "Open MPI 5"
    assert all(isinstance(value, str) and value for value in result.values())
    assert "hosts" not in provenance(hosts=["a"], anonymous=True)


def test_commit_is_only_recorded_for_a_clone(tmp_path):
    package = tmp_path / "hpcdist"
    package.mkdir()
    assert git_commit(package).startswith("unknown")
    (package / "file").write_text("a")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run(git + arguments, check=True)
    commit = git_commit(package)
    assert len(commit) == 40
    (package / "file").write_text("b")
    assert git_commit(package) == commit + "+changes"
    inner = package / "site-packages/hpcdist"
    inner.mkdir(parents=True)
    assert git_commit(inner) == "unknown: installed, not a clone"
