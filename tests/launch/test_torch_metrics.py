"""Metrics of PyTorch scripts: the rows of `hpcdist.torch.log` in the run directory, and their readers."""

import json
import os
import re
import shutil
from collections import Counter

import numpy as np
import pytest

from harness import jobs
from hpcdist.comm.record import flight_recorder
from hpcdist.telemetry import report
from hpcdist.telemetry.metrics import side_tables, step_metrics
from hpcdist.telemetry.page import document
from hpcdist.telemetry.trace import summary
from hpcdist.training.use_cases import energy_figures

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


TRACED = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import hpcdist.torch

dist.init_process_group("hpcdist")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
replicated = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
sharded = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
for layer in sharded:
    fully_shard(layer)
fully_shard(sharded)
for step in range(1, 9):
    model = replicated if step <= 4 else sharded
    with hpcdist.torch.phase("data"):
        time.sleep(0.01)
    began = Path(__file__ + str(step))
    if rank == 0:
        began.touch()
    else:
        while not began.exists():
            time.sleep(0.001)
        time.sleep(0.1)
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    with hpcdist.torch.phase("update"):
        time.sleep(0.02)
    hpcdist.torch.should_stop()
    if step == 4:
        with hpcdist.torch.phase("validation"):
            time.sleep(0.2)
    if step <= 2 or step % 2 == 0:  # later rows stand for two steps
        hpcdist.torch.log(step, loss=loss, samples=8 if step <= 2 else 16)
dist.destroy_process_group()
"""


def run_script(tmp_path, *arguments, out="run", ranks=2, text=SCRIPT, **variables):
    script = tmp_path / "script.py"
    script.write_text(text)
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
    for path in (folder / "recorder").glob("rank-*.rec"):
        (last,) = (event for event in flight_recorder.read(path).events if event.op == "destroy_process_group")
        assert last.ended_ns is not None, "the event began in another sink than it ended"


@pytest.mark.full
def test_logged_steps_of_a_resumed_script_replace_those_after_the_checkpoint(tmp_path):
    run_script(tmp_path, "rank 0", "1", "12")
    folder = run_script(tmp_path, "rank 0", "9", "15")
    steps = side_tables.read(folder / "metrics.h5").steps
    assert steps["step"].tolist() == [*range(1, 16)]
    assert steps["session"].tolist() == [0] * 8 + [1] * 7
    assert set(steps["tokens"].tolist()) == {3}  # only rank 0 logged


def check_reports(folder):
    """Check the commands that read run directories: units are samples, and no recipe is needed."""
    account = energy_figures.figures(folder, energy_figures.EnergyReportOptions())
    assert account["phases"]["validation"]["seconds"] >= 0.2
    assert {"compute", "communication", "update", "data"} <= account["activities"].keys()
    training_j = account["phases"]["training"]["joules"]
    assert account["j_per_step"] == pytest.approx(training_j / 8)
    assert account["j_per_sample"] == pytest.approx(training_j / (8 * 2 * 8)) and account["j_per_token"] is None
    assert [start["steps"] for start in account["starts"]] == [8]
    text = report.text(report.report(folder))
    assert "energy a sample" in text and "token" not in text and "recipe" not in text
    listed = json.loads(jobs.hpcdist("runs", folder.parent, "--json").stdout)
    assert [(run["state"], run["steps"], run["planned"], run["speed_unit"]) for run in listed] == [
        ("finished", 8, None, "samples")
    ]
    shutil.copytree(folder, folder.parent / "copy")
    compared = jobs.hpcdist("compare", folder, folder.parent / "copy", "--json")
    assert json.loads(compared.stdout)["recipe"] == {}


def test_trace_of_a_script_shows_its_buckets_gathers_and_waits(tmp_path):
    energy = {"HPCDIST_SET__ENERGY__SOURCES": "declared", "HPCDIST_SET__ENERGY__CPU_TDP_W": "100"}
    folder = run_script(tmp_path, text=TRACED, **energy)
    check_reports(folder)
    trace = summary.collect(folder)
    figures = summary.figures(trace)
    counts = {1: 1, 2: 1, 4: 2, 6: 2, 8: 2}  # number of steps for which a row stands
    assert figures["steps"] == [*counts]
    assert not any("no spans" in note for note in figures["notes"])
    metrics = step_metrics.read(folder / "metrics.h5").steps
    for rank, line in trace.timeline.lines.items():
        exposed_s = metrics["communication_s"][:, rank] @ [*counts.values()]
        assert figures["communication"][rank]["exposed_s"] == pytest.approx(exposed_s, rel=1e-9)
        for row, (step, count) in enumerate(counts.items()):
            begin, end = line.steps[step]
            spans = [span for span in line.spans if begin <= span.begin_ns and span.end_ns <= end]
            lengths = [span.end_ns - span.begin_ns for span in spans]
            assert sum(lengths) == end - begin, "the spans of a step are disjoint and cover the step"
            assert metrics["step_s"][row, rank] * count == pytest.approx((end - begin) / 1e9, rel=1e-9)
            slept_s = {"data": 0.01, "update": 0.02, "compute": 0.1 * rank, "validation": 0.1 * (step == 4)}
            for phase, least_s in slept_s.items():
                spent_ns = sum(ns for ns, span in zip(lengths, spans, strict=True) if span.phase == phase)
                assert spent_ns / 1e9 >= least_s * count
    calls = [call for call in trace.timeline.lines[0].calls if call.comm.endswith("torch0")]
    assert all(call.is_asynchronous for call in calls)
    buckets = [(call.op, call.count) for call in calls if call.step == 4 and "bucket" in call.op]
    count = len(buckets) // 2  # of each of both backward passes
    assert count > 1
    assert [op for op, _ in buckets] == [f"all_reduce bucket {number}" for number in range(count)] * 2
    assert sum(count for _, count in buckets) == 2 * 4 * 65 * 64
    sharded = Counter((call.op, call.count) for call in calls if call.step == 8 and call.op.count("_") == 1)
    assert min(sharded["reduce_scatter", 65 * 64], sharded["all_gather", 65 * 64]) >= 3
    # Rank 1 computes at least 0.1 s longer, so rank 0 waits for rank 1.
    assert figures["communication"][0]["waited_s"] > figures["communication"][1]["waited_s"]
    assert figures["communication"][0]["waited_s"] > 8 * 0.05  # of at least 8 * 0.1 s
    waits = [wait for wait in figures["longest_waits"] if wait["for"] == 1]
    assert {wait["in"].partition(":")[0] for wait in waits} & {"wait gradients", "wait all_gather"}


@pytest.mark.full
def test_script_without_trace_keeps_no_spans(tmp_path):
    folder = run_script(tmp_path, "all", "1", "3", HPCDIST_SET__TELEMETRY__TRACE="false")
    assert [path.suffix for path in sorted((folder / "recorder").iterdir())] == [".rec"] * 2


def test_log_of_one_rank_makes_the_run_directory(tmp_path):
    folder = run_script(tmp_path, "all", "1", "3", ranks=1)
    assert side_tables.read(folder / "metrics.h5").steps["step"].tolist() == [1, 2, 3]


def test_log_without_run_directory_has_no_effect(tmp_path):
    run_script(tmp_path, "all", "1", "2", out="")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
