"""Runs side by side: `hpcdist runs`, `report` and `compare` on directories as trainings write them."""

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
    """Write a run directory of two ranks, as a training leaves it."""
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
    code, out, _ = jobs.called(capsys, "runs", tmp_path / "runs")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert set(rows) == {"allreduce", "zero1", "broken"}
    assert "finished" in rows["zero1"] and "12 of 20" in rows["zero1"]
    assert "failed" in rows["broken"] and "3 of 20" in rows["broken"]
    (tmp_path / "runs" / "broken" / "lock").write_text("{}")
    code, out, _ = jobs.called(capsys, "runs", tmp_path / "runs", "--json")
    states = {row["run"]: row["state"] for row in json.loads(out)}
    assert states == {"allreduce": "finished", "zero1": "finished", "broken": "running"}


def test_a_start_that_was_refused_has_failed(tmp_path, rng, capsys):
    """Its lock is still young, and its holder is known to be dead."""
    refused = make_run(tmp_path / "refused", rng, "zero1")
    for name in ("starts.json", "metrics.h5"):
        (refused / name).unlink()
    take = "import sys, pathlib; from hpcdist.checkpoint.lock import RunLock; RunLock().take(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", take, refused], check=True)
    assert (refused / "lock").exists()
    code, out, _ = jobs.called(capsys, "runs", tmp_path, "--json")
    assert code == 0 and [row["state"] for row in json.loads(out)] == ["failed"]


def test_no_folder_of_runs_is_said(tmp_path, capsys):
    code, _, error = jobs.called(capsys, "runs", tmp_path / "none")
    assert code == 74 and "there is no such folder" in error
    code, out, _ = jobs.called(capsys, "runs", tmp_path)
    assert code == 0 and "holds no runs" in out


def test_several_runs_are_a_table_and_a_picture(tmp_path, runs, capsys):
    code, out, _ = jobs.called(capsys, "report", *runs)
    head, *lines = out.splitlines()
    assert code == 0 and len(lines) == 2 and head.split()[:4] == ["run", "strategy", "ranks", "steps"]
    assert lines[0].startswith("allreduce  allreduce") and lines[1].startswith("zero1")
    assert "1.0 KiB" in lines[0], "what was moved by all ways"
    code, out, _ = jobs.called(capsys, "report", *runs, "--json")
    assert [figures["steps"] for figures in json.loads(out)] == [12, 12]
    plotting.require_matplotlib()
    picture = tmp_path / "both.png"
    code, _, _ = jobs.called(capsys, "report", *runs, "--plot", picture)
    assert code == 0 and picture.stat().st_size > 10_000


def test_what_cannot_be_side_by_side_is_refused(tmp_path, runs, capsys):
    for words, said in (
        ((*runs, "--markdown"), "--html and --markdown show one place"),
        ((runs[0], runs[0]), "a run is given twice"),
        ((runs[0], tmp_path / "none"), "there is no such directory"),
    ):
        code, _, error = jobs.called(capsys, "report", *words)
        assert code in (2, 74) and said in error


def test_two_runs_are_compared_with_their_recipes(runs, capsys):
    code, out, _ = jobs.called(capsys, "compare", *runs)
    assert code == 0
    assert any(line.split() == ["parallel.strategy", "'allreduce'", "'zero1'"] for line in out.splitlines())
    assert any(line.split() == ["loss", "of", "last", "20", "4.3500", "4.3500", "1.000"] for line in out.splitlines())
    code, out, _ = jobs.called(capsys, "compare", *runs, "--json")
    compared = json.loads(out)
    assert compared["recipe"] == {"parallel.strategy": ["'allreduce'", "'zero1'"]}
    assert {row["figure"]: row["ratio"] for row in compared["figures"]}["loss of last 20"] == 1.0


def test_a_model_of_a_script_is_shown_in_its_units_and_with_its_keys(tmp_path, rng, capsys):
    keys = ("model.kind=import", "model.factory=model.py:build")
    unit, peak = {"speed_unit": "samples", "loss_unit": ""}, {"peak_bytes_total": 3 * 2**20}
    own = make_run(tmp_path / "runs" / "own", rng, "zero1", keys=keys, **unit, **peak)
    built = make_run(tmp_path / "runs" / "built", rng, "zero1", keys=("model.hidden=64", "model.heads=2"), **peak)
    code, out, _ = jobs.called(capsys, "runs", tmp_path / "runs")
    speeds = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and " samples/s" in speeds["own"] and " tokens/s" in speeds["built"]
    _, out, _ = jobs.called(capsys, "compare", built, own)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["model.hidden"] == ["64", "-"] and rows["model.factory"][0] == "-"
    _, out, _ = jobs.called(capsys, "report", own, built)
    memory = {line.split()[0]: line for line in out.splitlines()}
    assert "3.0 MiB + activations" in memory["own"] and "activations" not in memory["built"]
