"""Comparison of runs: `hpcdist runs`, `report` and `compare` on directories of trainings."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from harness import jobs
from hpcdist.reporting import plotting
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.recipe import recipe as recipes


def make_run(folder, rng, strategy, steps=12, end="finished", began=None, keys=(), **attributes):
    """Write the run directory of a training on two ranks."""
    folder.mkdir(parents=True)
    recipe = recipes.load(None, [f"parallel.strategy={strategy}", "run.steps=20", *keys], {}).recipe
    (folder / "recipe.toml").write_text(recipes.dump(recipe))
    now = time.time() if began is None else began
    (folder / "starts.json").write_text(json.dumps([{"began": now, "seen": now + 5, "end": end}]))
    moved = {"bytes_messages_per_step": 1000, "bytes_shared_per_step": 24, "bytes_unknown_per_step": 0} | attributes
    with MetricsWriter(folder / "metrics.h5", 2, None, attributes=moved) as writer:
        for step in range(1, steps + 1):
            wide = {name: np.full(2, 0.5) for name in PER_RANK}
            writer.append(step=step, loss=5.0 - 0.1 * step, learning_rate=0.1, tokens=100, **wide)
    return folder


@pytest.fixture
def runs(tmp_path, rng):
    return [make_run(tmp_path / "runs" / name, rng, name) for name in ("allreduce", "zero1")]


def test_runs_are_listed_with_their_states(tmp_path, rng, runs, capsys):
    make_run(tmp_path / "runs" / "broken", rng, "zero2", steps=3, end="")
    (tmp_path / "runs" / "other").mkdir()
    code, out, _ = jobs.call_command(capsys, "runs", tmp_path / "runs")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert set(rows) == {"allreduce", "zero1", "broken"}
    assert "finished" in rows["zero1"] and "12 of 20" in rows["zero1"]
    assert "failed" in rows["broken"] and "3 of 20" in rows["broken"]
    (tmp_path / "runs" / "broken" / "lock").write_text("{}")
    code, out, _ = jobs.call_command(capsys, "runs", tmp_path / "runs", "--json")
    states = {row["run"]: row["state"] for row in json.loads(out)}
    assert states == {"allreduce": "finished", "zero1": "finished", "broken": "running"}


def test_rejected_start_is_listed_as_failed(tmp_path, rng, capsys):
    """The lock of the rejected start is recent, but its process is dead."""
    refused = make_run(tmp_path / "refused", rng, "zero1")
    for name in ("starts.json", "metrics.h5"):
        (refused / name).unlink()
    take = "import sys, pathlib; from hpcdist.checkpoint.lock import RunLock; RunLock().take(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", take, refused], check=True)
    assert (refused / "lock").exists()
    code, out, _ = jobs.call_command(capsys, "runs", tmp_path, "--json")
    assert code == 0 and [row["state"] for row in json.loads(out)] == ["failed"]


def test_missing_or_empty_runs_folder_is_reported(tmp_path, capsys):
    code, _, error = jobs.call_command(capsys, "runs", tmp_path / "none")
    assert code == 74 and " does not exist" in error
    code, out, _ = jobs.call_command(capsys, "runs", tmp_path)
    assert code == 0 and "contains no runs" in out


def test_report_of_several_runs_is_a_table_and_a_plot(tmp_path, runs, capsys):
    code, out, _ = jobs.call_command(capsys, "report", *runs)
    head, *lines = out.partition("\n\n")[0].splitlines()
    assert code == 0 and len(lines) == 2 and head.split()[:4] == ["run", "strategy", "ranks", "steps"]
    assert lines[0].startswith("allreduce  allreduce") and lines[1].startswith("zero1")
    assert "1.0 KiB" in lines[0], "expected the sum of all transports"
    code, out, _ = jobs.call_command(capsys, "report", *runs, "--json")
    assert [figures["steps"] for figures in json.loads(out)] == [12, 12]
    plotting.require_matplotlib()
    picture = tmp_path / "both.png"
    code, _, _ = jobs.call_command(capsys, "report", *runs, "--plot", picture)
    assert code == 0 and picture.stat().st_size > 10_000


def test_incomparable_runs_are_rejected(tmp_path, runs, capsys):
    for words, output in (
        ((*runs, "--markdown"), "--markdown works for a sweep only"),
        ((runs[0], runs[0]), "a run is given twice"),
        ((runs[0], tmp_path / "none"), "does not exist"),
    ):
        code, _, error = jobs.call_command(capsys, "report", *words)
        assert code in (2, 74) and output in error


def test_two_runs_are_compared_with_their_recipes(runs, capsys):
    code, out, _ = jobs.call_command(capsys, "compare", *runs)
    assert code == 0
    assert any(line.split() == ["parallel.strategy", "'allreduce'", "'zero1'"] for line in out.splitlines())
    assert any(
        line.split() == ["training", "loss", "4.3500", "nats", "4.3500", "nats", "1.000"] for line in out.splitlines()
    )
    _, out, _ = jobs.call_command(capsys, "compare", *runs, "--markdown")
    assert "| parallel.strategy | 'allreduce' | 'zero1' |" in out.splitlines()
    code, out, _ = jobs.call_command(capsys, "compare", *runs, "--json")
    compared = json.loads(out)
    assert compared["recipe"] == {"parallel.strategy": ["'allreduce'", "'zero1'"]}
    assert {row["figure"]: row["ratio"] for row in compared["figures"]}["train_loss_mean"] == 1.0


def test_imported_model_is_shown_with_its_units_and_keys(tmp_path, rng, capsys):
    keys = ("model.kind=import", "model.factory=model.py:build")
    unit, peak = {"speed_unit": "samples", "loss_unit": ""}, {"peak_bytes_total": 3 * 2**20}
    local_data = make_run(tmp_path / "runs" / "own", rng, "zero1", keys=keys, **unit, **peak)
    built = make_run(tmp_path / "runs" / "built", rng, "zero1", keys=("model.hidden=64", "model.heads=2"), **peak)
    code, out, _ = jobs.call_command(capsys, "runs", tmp_path / "runs")
    speeds = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and " samples/s" in speeds["own"] and " tokens/s" in speeds["built"]
    _, out, _ = jobs.call_command(capsys, "compare", built, local_data)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["model.hidden"] == ["64", "-"] and rows["model.factory"][0] == "-"
    _, out, _ = jobs.call_command(capsys, "report", local_data, built)
    memory = {line.split()[0]: line for line in out.splitlines() if line}
    assert "3.0 MiB + activations" in memory["own"] and "activations" not in memory["built"]
