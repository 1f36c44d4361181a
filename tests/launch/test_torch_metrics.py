"""Metrics of PyTorch scripts: the rows of `hpcdist.torch.log` in the run directory, and their readers."""

import json
import os
import re

import numpy as np
import pytest

from harness import jobs
from hpcdist.telemetry import report
from hpcdist.telemetry.metrics import side_tables
from hpcdist.telemetry.page import document

torch = pytest.importorskip("torch")

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import hpcdist.torch

who, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("hpcdist")
rank, world = dist.get_rank(), dist.get_world_size()
gradient = torch.ones(1000)
for step in range(first, last + 1):
    with hpcdist.torch.phase("data"):
        time.sleep(0.005)
    dist.all_reduce(gradient, dist.ReduceOp.AVG)
    if who == "all" or rank == 0:
        loss, samples = torch.tensor(step + rank), 3 if rank == 0 else 1
        hpcdist.torch.log(step, loss=loss, samples=samples, learning_rate=1 / step, noise=10.0 * rank)
    if step % 10 == 0 and rank == 0:
        hpcdist.torch.log(step, validation_loss=100 - step, accuracy=step / 100)
held = {"a": torch.tensor(3.0, dtype=torch.float64), "b": 4.0}  # as values of a GPU are held until they are sent
row = hpcdist.torch.metrics.LoggedRow(1, 0, torch.tensor(2.0, dtype=torch.float64), 5.0, 0.1, 0.5, held)
[resolved] = hpcdist.torch.metrics._resolved([row])
assert resolved == row._replace(loss=2.0, figures={"a": 3.0, "b": 4.0}) and type(resolved.loss) is float
try:
    hpcdist.torch.log(1, loss="high")
    assert "HPCDIST_RUN_DIR" not in os.environ
except hpcdist.errors.UsageError as error:
    assert "log: loss is a str, not a number" in str(error)
dist.destroy_process_group()
"""


def run_script(tmp_path, *arguments, out="run", ranks=2, **variables):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ("--out", tmp_path / out) if out else ()
    done = jobs.hpcdist("run", "-n", ranks, *options, "--", "python", script, *arguments, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    return tmp_path / out if out else None


def test_logged_steps_are_averaged_over_ranks_and_shown_by_all_readers(tmp_path):
    variables = {f"HPCDIST_SET__TELEMETRY__{name}": "true" for name in ("JSONL", "TENSORBOARD")}
    folder = run_script(tmp_path, "all", "1", "20", **variables)
    run = side_tables.read(folder / "metrics.h5")
    steps = np.arange(1, 21)
    assert run.steps["step"].tolist() == steps.tolist()
    np.testing.assert_allclose(run.steps["loss"], (3 * steps + steps + 1) / 4)  # weighted by samples
    np.testing.assert_allclose(run.steps["learning_rate"], 1 / steps)
    assert set(run.steps["tokens"].tolist()) == {4}
    assert run.sample.evaluations["val_loss"].tolist() == [90.0, 80.0]
    noise, accuracy = (run.observed.series[f"logged_value[{name}]"] for name in ("noise", "accuracy"))
    assert noise.step.tolist() == steps.tolist()
    assert set(noise.value.tolist()) == {5.0}  # the mean over both ranks
    assert (accuracy.step.tolist(), accuracy.value.tolist()) == ([10, 20], [0.1, 0.2])
    measured = run.sample.steps
    attributes = run.sample.attributes
    moved = [attributes[f"bytes_{way}_per_step"] for way in ("messages", "shared", "unknown")]
    assert 4000 <= sum(moved) <= 9000
    assert (measured["compute_s"][1:] < measured["step_s"][1:] - 0.004).all(), "without the 5 ms of waiting for data"
    data = report.report(folder)
    text = report.text(data)
    for line in ("strategy +script", "validation loss +80", r"accuracy +0\.2 ", "samples/s"):
        assert re.search(line, text), text
    assert "accuracy" in document.make_page(data)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["values"] for event in events if "logged_value[accuracy]" in event["values"]][-1]
    assert list((folder / "tensorboard").glob("events*"))
    assert [start.end for start in data.state.starts] == ["finished"]


def test_logged_steps_of_a_resumed_script_replace_those_after_the_checkpoint(tmp_path):
    run_script(tmp_path, "rank 0", "1", "12")
    folder = run_script(tmp_path, "rank 0", "9", "15")
    steps = side_tables.read(folder / "metrics.h5").steps
    assert steps["step"].tolist() == [*range(1, 16)]
    assert steps["session"].tolist() == [0] * 8 + [1] * 7
    assert set(steps["tokens"].tolist()) == {3}  # only rank 0 logged


def test_log_of_one_rank_makes_the_run_directory(tmp_path):
    folder = run_script(tmp_path, "all", "1", "3", ranks=1)
    assert side_tables.read(folder / "metrics.h5").steps["step"].tolist() == [1, 2, 3]


def test_log_without_run_directory_has_no_effect(tmp_path):
    run_script(tmp_path, "all", "1", "2", out="")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
