"""Sweeps over power limits of real trainings, under a stand-in for the NVIDIA driver whose GPUs draw their limit."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.power import report
from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.bench.sweep import results

FOUND_W, FREE_W, POWER_W = 700, 600, (300, 30)
RECIPE = """
model = {layers = 1, hidden = 32, heads = 2}
data = {path = "text.txt", context = 16}
run = {steps = 200, global_batch = 6, validation_samples = 8}
energy = {interval_s = 0.01, powercap = "nowhere"}
"""

pytestmark = [pytest.mark.usefixtures("mpi"), pytest.mark.full]


@pytest.fixture
def folder(tmp_path, rng):
    """A directory with a recipe and three GPUs, which draw 600 W and whose limit is 700 W."""
    (tmp_path / "text.txt").write_bytes(rng.integers(97, 105, 20_000).astype(np.uint8).tobytes())
    (tmp_path / "r.toml").write_text(RECIPE)
    limits = f"limits=20000:{FOUND_W}000:{FOUND_W}000 clocks=345:1980"
    rows = [f"GPU-{n:02d} 0:{n}:0 H200 0 power:{FREE_W}000:10 {limits}\n" for n in range(3)]
    (tmp_path / "gpus").write_text("".join(rows))
    return tmp_path


@pytest.fixture
def environment(folder, nvml_stub):
    """The environment of a job that holds the last two GPUs, listed in reverse order."""
    path = os.pathsep.join(filter(None, [str(nvml_stub), os.environ.get("LD_LIBRARY_PATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    added = {"LD_LIBRARY_PATH": path, "NVML_STUB": str(folder / "gpus"), "XDG_STATE_HOME": str(folder / "state")}
    return kept | added | {"CUDA_VISIBLE_DEVICES": "2,1", "PYTHONPATH": harness.search_path()}


def line(folder, *arguments):
    return [sys.executable, "-P", "-m", "benchmarks", "power", *arguments, "-o", str(folder / "power.h5")]


def run_study(folder, environment, *arguments):
    return jobs.run(line(folder, *arguments), env=environment, cwd=folder)


def summary(folder):
    return report.summarize(results.read(folder / "power.h5"), "energy")


def power_limits(folder):
    """Return the power limits that were set, in W, by UUID."""
    path = folder / "gpus.set"
    rows = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
    return {row[0]: int(row[1]) // 1000 for row in rows}


@pytest.mark.matrix
def test_sweep_over_two_limits_and_no_limit_recommends_one(folder, environment):
    asked = ("r.toml", "-n", "2", "--limits", ",".join(map(str, POWER_W)), "--repeats", "1", "--objective", "energy")
    refused = run_study(folder, environment, *asked)
    assert refused.returncode == 2 and "nothing was changed: add --change-limits" in refused.stderr
    assert not power_limits(folder) and not (folder / "power.h5").exists()

    done = run_study(folder, environment, *asked, "--change-limits", "--plot", "plot.svg")
    assert done.returncode == 0, done.stderr
    assert power_limits(folder) == {"GPU-01": FOUND_W, "GPU-02": FOUND_W}, (
        "the limits of the GPUs of the job were restored"
    )
    assert not list((folder / "state").rglob("*.json")) and (folder / "plot.svg").stat().st_size > 5000

    (choice,) = [line for line in done.stdout.splitlines() if line.startswith("recommended: 30 W: ")]
    assert "less energy" in choice and "relative to as found; there is only one repeat" in choice
    assert "the energy includes gpu; not included: cpu" in done.stdout

    kept = results.read(folder / "power.h5")
    assert kept.provenance["power_devices"] == "GPU-02 (H200), GPU-01 (H200)" and kept.provenance["git_commit"]
    repeats = {one.name: one.repeats[0].summary for one in kept.configurations}
    assert repeats.keys() == {"as found", "300 W", "30 W"}
    for name, watts, shown in (("as found", FREE_W, FOUND_W), ("300 W", 300, 300), ("30 W", 30, 30)):
        output = repeats[name]
        assert (
            output["power.limit_w"] == (None if name == "as found" else watts) and output["power.in_force_w"] == shown
        )
        assert output["power.mean_w"] == pytest.approx(2 * watts, rel=0.25), "what two GPUs draw"
        assert output["power.training_j"] == pytest.approx(output["power.mean_w"] * output["power.training_s"])
        assert output["power.j_per_token"] == pytest.approx(output["power.training_j"] / (200 * 6 * 16))
        assert output["power.edp_js"] == pytest.approx(output["power.training_j"] * output["power.training_s"])
        assert output["power.gpu_j"] == output["energy_j"] >= output["power.training_j"] and output["train_loss"] > 0
    losses = [output["train_loss"] for output in repeats.values()]
    assert max(losses) == pytest.approx(min(losses), rel=1e-6), "limits do not change what is computed"

    again = run_study(folder, environment, *asked, "--change-limits")
    assert again.returncode == 0 and "3 ok, 0 failed, 0 left" in again.stderr and "repeat" not in again.stderr
    assert choice in again.stdout and summary(folder).chosen.name == "30 W"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)]
)
def test_limits_are_restored_however_a_sweep_ends(folder, environment, number, code):
    # With this seed the first trial is the one under 250 W.
    asked = ("r.toml", "--limits", "250", "--change-limits", "--no-warm-up", "--set", "run.steps=100000", "--seed", "2")
    process = subprocess.Popen(
        line(folder, *asked), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    limit = time.monotonic() + LIMIT_S
    while not (set(power_limits(folder).values()) == {250} and list(folder.glob("power.h5.trial-*/run"))):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(number)
    _, output = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, output
    if number == signal.SIGKILL:
        assert power_limits(folder) == {"GPU-01": 250, "GPU-02": 250}
        refused = run_study(folder, environment, *asked)
        assert refused.returncode == 69 and "first run python -m benchmarks power --restore" in refused.stderr
        restored = run_study(folder, environment, "--restore")
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.count("700 W again (it was at 250 W)") == 2
    assert power_limits(folder) == {"GPU-01": FOUND_W, "GPU-02": FOUND_W}
    assert not list((folder / "state").rglob("*.json"))


def test_sweep_over_keys_needs_no_permission(folder, environment):
    words = ("r.toml", "--sweep", "model.hidden=32,64", "--repeats", "1", "--no-warm-up")
    done = run_study(folder, environment, *words)
    assert done.returncode == 0, done.stderr
    result = summary(folder)
    assert [row.name for row in result.rows] == ["hidden=32", "hidden=64"]
    assert all(row.median("j_per_token") > 0 and row.in_force_w is None for row in result.rows)
    assert result.chosen.name in ("hidden=32", "hidden=64") and not power_limits(folder)
