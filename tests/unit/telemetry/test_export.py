"""Export of runs as CSV, to Weights & Biases and MLflow. A new figure is one entry of the catalogue."""

import csv
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from harness import jobs
from hpcdist.errors import MissingCapabilityError, UsageError
from hpcdist.telemetry import export, report
from hpcdist.telemetry.metrics import observations, run_figures
from hpcdist.telemetry.metrics.quantities import QUANTITIES, split
from hpcdist.telemetry.metrics.run_figures import RunFigure
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.telemetry.page import document

STEPS = 6


def make_run(folder, steps=STEPS):
    folder.mkdir()
    with MetricsWriter(folder / "metrics.h5", 2) as writer:
        for step in range(1, steps + 1):
            wide = {name: np.full(2, 0.25) for name in PER_RANK}
            writer.append(step=step, loss=5.0 / step, learning_rate=0.1, tokens=100, **wide)
        writer.evaluation(4, 2.5)
        values = {"memory_bytes[gradients]": 64.0, "text": "words"}
        event = SimpleNamespace(kind="memory", step=3, time_ns=10**9, values=values)
        writer.include(lambda file, session: observations.append(file, session, [event]))
    return folder


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "mine")


def test_csv_has_one_row_per_step_with_the_names_of_the_quantities(run_dir, capsys, tmp_path):
    code, out, _ = jobs.call_command(capsys, "report", run_dir, "--to", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [row["step"] for row in rows] == [str(step) for step in range(1, STEPS + 1)]
    assert {split(name)[0] for name in rows[0]} - {"step"} <= set(QUANTITIES)
    assert float(rows[1]["training_loss_nats"]) == 2.5 and float(rows[5]["tokens_per_second"]) == 400.0
    assert [row["validation_loss_nats"] for row in rows] == ["", "", "", "2.5", "", ""]
    assert rows[2]["memory_bytes[gradients]"] == "64.0" and float(rows[2]["tokens_total"]) == 300
    assert float(rows[2]["sent_bytes_total"]) == 3 * 2 * 0.25 and float(rows[2]["world_ranks"]) == 2
    code, message, _ = jobs.call_command(capsys, "report", run_dir, "--to", "csv", "--output", tmp_path / "a.csv")
    assert code == 0 and "a.csv" in message and (tmp_path / "a.csv").read_text() == out


def test_csv_counts_the_steps_that_a_row_stands_for(tmp_path, capsys):
    with MetricsWriter(tmp_path / "metrics.h5", 2) as writer:
        for step in (4, 5, 15, 25, 28):  # mean values of the steps since the row before
            wide = {name: np.full(2, 0.25) for name in PER_RANK}
            writer.append(step=step, loss=1.0, learning_rate=0.1, tokens=100, **wide)
    code, out, _ = jobs.call_command(capsys, "report", tmp_path, "--to", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [float(row["tokens_total"]) for row in rows] == [100, 200, 1200, 2200, 2500]
    assert [float(row["sent_bytes_total"]) for row in rows] == [0.5, 1.0, 6.0, 11.0, 12.5]


def test_csv_of_several_runs_has_one_row_per_run(run_dir, capsys, tmp_path):
    make_run(tmp_path / "other", 3)
    code, out, _ = jobs.call_command(capsys, "report", run_dir, tmp_path / "other", "--to", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [(row["run"], row["steps"]) for row in rows] == [("mine", "6"), ("other", "3")]
    assert rows[0]["energy_j"] == rows[0]["energy_label"] == "" and rows[0]["val_loss"] == "2.5"


def test_declared_energy_and_run_without_steps_are_labelled(run_dir, capsys, tmp_path):
    joules = {"by_kind": {"cpu": 25.5}, "phases": {}, "reason": None, "label": "declared model, not measured"}
    (run_dir / "usage.json").write_text(json.dumps({"since_step": 0, "joules": joules}))
    runs = [report.report(folder) for folder in (run_dir, make_run(tmp_path / "empty", 0))]
    assert "25.5 J (declared model, not measured)" in report.comparison_text(*runs, {})
    assert "| energy | 25.5 J (declared model, not measured) |" in report.comparison_text(*runs, {}, as_markdown=True)
    assert ",25.5," in (output := report.catalogue(runs).csv(runs)) and ',"declared model, not measured"' in output
    notes = report.runs_text(runs).splitlines()[4:]
    assert "of empty: no step was completed yet" in notes[0] and "no loss was finite" not in str(notes)


def test_new_figure_is_one_entry_of_the_catalogue(run_dir, tmp_path, monkeypatch):
    figure = RunFigure("answer", lambda run: 42, title="the answer", note=lambda run: "of everything")
    figures = (*run_figures.FIGURES, figure)
    for module in (run_figures, report):
        monkeypatch.setattr(module, "FIGURES", figures)
    runs = [report.report(folder) for folder in (run_dir, make_run(tmp_path / "other"))]
    assert "the answer       42  (of everything)" in report.text(runs[0])
    assert "the answer" in report.runs_text(runs).splitlines()[0]
    assert ["the", "answer", "42", "42", "1.000"] in [
        line.split() for line in report.comparison_text(*runs, {}).splitlines()
    ]
    assert report.catalogue(runs).csv(runs).splitlines()[0].endswith(",answer")
    pytest.importorskip("matplotlib")
    assert "The answer</dt>" in document.make_page(runs[0])


class FakeLog:
    def __init__(self, folder):
        self.dir, self.rows, self.summary, self.is_finished = f"{folder}/offline-run/files", {}, {}, False

    def log(self, row, step):
        self.rows[step] = row

    def finish(self):
        self.is_finished = True


def test_wandb_gets_steps_and_summary(run_dir, tmp_path, monkeypatch):
    logs = []

    def init(**options):
        assert options["mode"] == "offline" and options["name"] == "mine"
        logs.append(FakeLog(options["dir"]))
        return logs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    directory = export.to_wandb(report.report(run_dir), tmp_path / "out")
    assert directory == tmp_path / "out/offline-run" and logs[0].is_finished
    assert list(logs[0].rows) == list(range(1, STEPS + 1)) and logs[0].rows[3]["memory_bytes/gradients"] == 64
    assert logs[0].summary["val_loss"] == 2.5 and "energy_j" not in logs[0].summary


def test_mlflow_gets_steps_and_summary(run_dir, tmp_path, monkeypatch):
    written = []

    class Client:
        def __init__(self, tracking_uri):
            assert tracking_uri.startswith("file://")

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="7")

        def create_run(self, experiment_id, run_name):
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run_id, metrics):
            written.extend(metrics)

        def set_terminated(self, run_id):
            written.append(None)

    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client, entities=entities))
    assert export.to_mlflow(report.report(run_dir), tmp_path / "out") == tmp_path / "out/7/r"
    assert ("memory_bytes/gradients", 64.0, 0, 3) in written and ("run/val_loss", 2.5, 0, STEPS) in written
    assert written[-1] is None, "the run is closed"


def test_real_wandb_writes_an_offline_run(run_dir, tmp_path):
    pytest.importorskip("wandb")
    directory = export.to_wandb(report.report(run_dir), tmp_path / "out")
    assert list(directory.glob("run-*.wandb"))


def test_real_mlflow_writes_its_file_store(run_dir, tmp_path):
    pytest.importorskip("mlflow")
    directory = export.to_mlflow(report.report(run_dir), tmp_path / "out")
    losses = (directory / "metrics/training_loss_nats").read_text().splitlines()
    assert [line.split()[2] for line in losses] == [str(step) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("target", ["wandb", "mlflow"])
def test_missing_package_error_names_the_pip_command(run_dir, tmp_path, monkeypatch, target):
    monkeypatch.setitem(sys.modules, target, None)
    write = {"wandb": export.to_wandb, "mlflow": export.to_mlflow}[target]
    with pytest.raises(MissingCapabilityError, match=rf"pip install 'hpcdist\[{target}\]'"):
        write(report.report(run_dir), tmp_path / "out")


def test_run_without_steps_and_conflicting_options_are_rejected(tmp_path, capsys):
    folder = make_run(tmp_path / "empty", 0)
    with pytest.raises(UsageError, match="nothing to export"):
        export.csv(report.report(folder))
    for words, message in (
        (("--output", "x.csv"), "--output needs --to"),
        (("--to", "csv", "--json"), "--to excludes"),
    ):
        code, _, error = jobs.call_command(capsys, "report", folder, *words)
        assert code == 2 and message in error


def test_table_of_several_runs_becomes_a_page(run_dir, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    other, file = make_run(tmp_path / "other"), tmp_path / "runs.html"
    code, out, _ = jobs.call_command(capsys, "report", run_dir, other, "--html", file)
    page = file.read_text()
    assert code == 0 and "runs.html" in out and page.count("<svg") == 1 and ">mine</td>" in page
    assert "no energy: " in page
