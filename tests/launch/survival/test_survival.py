"""Jobs that continue after ranks are killed: `hpcdist run --survive`, as a user starts them.


HPCDIST_TEST_DEATHS=20 kills 20 ranks of one job, one after another. Each is replaced by a new process.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.comm.launch import mpirun
from hpcdist.telemetry.metrics import step_metrics

DEATHS = int(os.environ.get("HPCDIST_TEST_DEATHS", "2"))
EVERY = 4  # steps between two deaths
SMALL = ["model.layers=1", "model.hidden=32", "model.heads=2", "data.context=16", "run.global_batch=6"]


@pytest.fixture(autouse=True)
def surviving_mpi(mpi):
    if mpi.vendor != mpirun.OPEN_MPI or not mpi.version.startswith("5"):
        pytest.skip(f"{mpi.vendor} {mpi.version} ends the job when a rank dies")


def line(ranks, text, out, *options, keys):
    settings = [word for key in [*SMALL, f"data.path={text}", *keys] for word in ("--set", key)]
    run = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), *options]
    return [*run, "train", "--json", "--out", str(out), "--resume", "auto", *settings]


def train(ranks, text, out, *options, keys):
    """Return the summary and the losses of a job that ends without an error."""
    done = jobs.run(line(ranks, text, out, *options, keys=keys))
    assert done.returncode == 0, done.stdout + done.stderr
    steps = step_metrics.read(out / "metrics.h5").steps
    assert steps["step"].tolist() == list(range(1, len(steps["step"]) + 1))
    return json.loads(done.stdout.splitlines()[-1]), steps["loss"]


@pytest.mark.full
def test_new_processes_replace_dead_ranks(text, tmp_path, rng):
    steps = EVERY * (DEATHS + 1)
    keys = [f"run.steps={steps}", "parallel.strategy=zero1"]
    _, calm = train(3, text, tmp_path / "calm", keys=keys)
    moments = rng.choice(["begin", "backward", "exchange", "update"], DEATHS)
    kills = [f"'{rng.integers(3)}@{EVERY * (death + 1)}:{moment}'" for death, moment in enumerate(moments)]
    killed = [*keys, f"chaos.kill=[{', '.join(kills)}]"]
    result, losses = train(3, text, tmp_path / "killed", "--survive", "replace", keys=killed)
    np.testing.assert_array_equal(losses, calm, err_msg=str(kills))
    lives = result["lives"]
    assert [(life["died"], life["added"], life["world"]) for life in lives] == [(1, 1, 3)] * DEATHS
    for death, life in enumerate(lives):
        assert EVERY * (death + 1) - 2 <= life["step"] <= EVERY * (death + 1), "a step was repeated, and no more"
    if DEATHS >= 8:  # the first lives fill caches
        grown = lives[-1]["pss_bytes"] - lives[DEATHS // 4]["pss_bytes"]
        assert grown < 1e6 * (DEATHS - DEATHS // 4), f"{grown / 1e6:.1f} MB more: {lives}"
    print(f"{DEATHS} deaths survived, each within {max(life['seconds'] for life in lives):.2f} s")


@pytest.mark.full
def test_shrunk_job_saves_on_a_signal_and_resumes(text, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    keys = ["run.steps=1000000", "parallel.strategy=zero2"]
    command = line(3, text, out, "--survive", "shrink", keys=[*keys, "chaos.kill=['0@5:update']"])
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        jobs.until(lambda: "rank 0 died: on 2 ranks" in log.read_text(), process=started, log=log)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=LIMIT_S) == 75, log.read_text()
    finally:
        started.kill()
    assert step_metrics.read(out / "metrics.h5").steps["world"][-1] == 2
    steps = int((out / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    resumed, _ = train(2, text, out, keys=[f"run.steps={steps + 3}", "parallel.strategy=zero2"])
    assert resumed["steps"] == steps + 3


@pytest.mark.full
def test_new_ranks_join_at_a_step_boundary(text, tmp_path):
    out = tmp_path / "run"
    steps = 80
    keys = [f"run.steps={steps}", "chaos.step_s=0.05", "precision.mode=float64"]
    started = subprocess.Popen(
        line(2, text, out, "--survive", "shrink", keys=keys), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        jobs.until((out / "metrics.h5").exists, process=started)
        asked = jobs.hpcdist("grow", str(out), "1")
        assert asked.returncode == 0, asked.stderr
        output, printed = started.communicate(timeout=LIMIT_S)
    finally:
        started.kill()
    assert started.returncode == 0, printed
    document = json.loads(output.splitlines()[-1])
    assert document["world"] == 3 and [(life["died"], life["added"]) for life in document["lives"]] == [(0, 1)]
    rows = step_metrics.read(out / "metrics.h5").steps
    assert rows["world"][-1] == 3 and len(rows["step"]) == steps
    # Nobody died: what was used before they came in counts to the last step.
    assert sum(document["seconds_by_phase"].values()) > 0.95 * np.nanmax(rows["step_s"], axis=1).sum()
    _, calm = train(2, text, tmp_path / "calm", keys=[f"run.steps={steps}", "precision.mode=float64"])
    np.testing.assert_allclose(rows["loss"], calm, rtol=1e-9)
    assert not (out / "grow").exists()
