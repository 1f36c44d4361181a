"""Asynchronous jobs as a user starts them: train, stop and resume, and fail with the name of the worker."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from harness.trainings import recipe_keys
from hpcdist.telemetry.metrics import step_metrics

SERVED = recipe_keys(
    "layers=1 hidden=32 heads=2 data.context=16 global_batch=6 strategy=parameter_server "
    "parameter_server.consistency=asp"
)


def start(ranks, out, text, *arguments, **keys):
    values = SERVED | {"data.path": text} | {name.replace("__", "."): value for name, value in keys.items()}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), "train", "--out", str(out), "--json"]
    return subprocess.Popen(
        [*command, *settings, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def summary(process):
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def test_asynchronous_job_learns_and_records_bytes_and_evaluations(text, tmp_path):
    out = tmp_path / "run"
    result = summary(start(3, out, text, run__steps=60, checkpoint__every_steps=25))
    assert (result["steps"], result["world"]) == (60, 3)
    rows = step_metrics.read(out / "metrics.h5").steps
    assert rows["step"].tolist() == list(range(1, 61)) and np.isfinite(rows["loss"]).all()
    assert rows["loss"][-5:].mean() < rows["loss"][:5].mean() - 1.0
    assert (rows["tokens"] == 6 * 16).all(), "both halves of the batch"
    psi = 4 * result["parameters"]
    np.testing.assert_allclose(rows["sent_bytes"][:, :2], psi, rtol=0.01)
    assert np.isnan(rows["sent_bytes"][:, 2]).all(), "a dedicated server has no steps"
    np.testing.assert_allclose(result["bytes_sent_per_step"], 2 * psi, rtol=0.02)
    evaluated = jobs.run([sys.executable, "-m", "hpcdist", "evaluate", str(out), "--json"], check=True)
    assert json.loads(evaluated.stdout.splitlines()[-1])["val_loss"] == pytest.approx(result["val_loss"], rel=1e-5)


@pytest.mark.full
def test_bytes_served_after_the_last_step_are_counted(text, tmp_path):
    """The only server reads its part locally, so it finishes long before the ranks to which it sends."""
    keys = {"parameter_server__placement": "colocated", "parameter_server__servers": 1}
    result = summary(start(3, tmp_path / "run", text, run__steps=30, **keys))
    np.testing.assert_allclose(result["bytes_sent_per_step"], 2 * 4 * result["parameters"], rtol=0.02)


@pytest.mark.parametrize(("ranks", "placement"), [(3, "dedicated"), (2, "colocated")])
@pytest.mark.matrix_except("3-dedicated")
@pytest.mark.full
def test_stopped_and_resumed_job_makes_every_step_once(text, tmp_path, ranks, placement):
    out = tmp_path / "run"
    keys = {"parameter_server__placement": placement, "run__steps": 4000, "checkpoint__every_steps": 10}
    process = start(ranks, out, text, **keys)
    limit = time.monotonic() + LIMIT_S
    while not (out / "checkpoints" / "latest").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit, "nothing was saved in time"
        time.sleep(0.02)
    (out / "stop").touch()
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, stderr
    assert not (out / "stop").exists()
    done = int(step_metrics.read(out / "metrics.h5").steps["step"][-1])
    assert 10 <= done < 4000
    recipe = out / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 4000", f"steps = {done + 20}"))
    result = summary(start(ranks, out, text, "--resume", "auto", **(keys | {"run__steps": done + 20})))
    assert result["steps"] == done + 20
    assert all(result[name] is not None for name in ("tokens_per_s", "step_s_median", "bytes_sent_per_step"))
    unmeasured = ("energy", "emissions", "cost")  # there need be no counter here
    assert not [name for name in result if name.endswith("_reason") and not name.startswith(unmeasured)]
    rows = step_metrics.read(out / "metrics.h5").steps
    assert rows["step"].tolist() == list(range(1, done + 21)) and np.isfinite(rows["loss"]).all()
    assert set(rows["session"].tolist()) == {0, 1}


def test_non_finite_loss_names_the_worker(text, tmp_path):
    keys = {"optimizer__learning_rate": 1e30, "optimizer__name": "sgd", "optimizer__warmup_steps": 0}
    process = start(3, tmp_path / "run", text, run__steps=50, optimizer__clip_norm=0, **keys)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "NonFiniteError: non-finite loss or gradient: worker " in stderr and "was not applied" in stderr
