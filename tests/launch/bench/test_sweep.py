"""Sweeps of real trainings: a failed trial, a sweep that is ended at any point, and the next call that resumes it."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.bench.sweep import results
from hpcdist.errors import StorageError

SWEEP = """
[sweep]
ranks = 2

[recipe]
model = {layers = 1, hidden = 32, heads = 2}
data = {path = "text.txt", context = 16}
run = {steps = 12, global_batch = 6, validation_samples = 8}
communication = {algorithm = "ring"}
"""

pytestmark = pytest.mark.usefixtures("mpi")


@pytest.fixture
def folder(tmp_path, rng):
    """A directory with a text of random words."""
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(30)]
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words, 2000)))
    return tmp_path


def line(folder, *arguments):
    names = [str(folder / "sweep.toml"), "-o", str(folder / "results.h5")]
    return [sys.executable, "-m", "hpcdist", "bench", "sweep", *names, *arguments]


def hpcdist(*command):
    return jobs.run(command)


def test_failed_trial_is_recorded_and_can_be_retried(folder):
    trials = "[[trial]]\nname = 'late'\ndata.path = 'late.txt'\n[[trial]]\nname = 'good'\n"
    (folder / "sweep.toml").write_text(SWEEP + trials)
    done = hpcdist(*line(folder))
    assert done.returncode == 1, done.stderr
    assert "1 ok, 1 failed, 0 left" in done.stderr and "late.txt" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["results.h5", "sweep.toml", "text.txt"]
    late, good = results.read(folder / "results.h5").configurations
    assert (late.repeats[0].status, late.repeats[0].exit_code) == ("failed", 78)
    assert "late.txt" in late.repeats[0].reason
    (repeat,) = good.repeats
    assert repeat.samples["step_s"].shape == repeat.samples["sent_bytes"].shape == (12, 2)
    parts = [repeat.samples[name] for name in ("compute_s", "communication_s", "update_s")]
    assert (sum(parts) <= repeat.samples["step_s"]).all() and (repeat.samples["step_s"] > 0).all(), "and the rest"
    gradients = repeat.summary["peak_bytes.gradients"]
    assert gradients * 0.99 <= np.median(repeat.samples["sent_bytes"]) <= gradients * 1.01 + 200, "2 Psi (p - 1) / p"

    (folder / "late.txt").write_text((folder / "text.txt").read_text())
    again = hpcdist(*line(folder))
    assert again.returncode == 1 and "repeat" not in again.stderr, "a failure is not tried again by itself"
    retried = hpcdist(*line(folder, "--retry-failed"))
    assert retried.returncode == 0, retried.stderr
    assert "late on 2 ranks" in retried.stderr and "good on 2 ranks" not in retried.stderr
    reported = hpcdist(sys.executable, "-m", "hpcdist", "report", str(folder / "results.h5"), "--json")
    rows = json.loads(reported.stdout)["configurations"]
    assert [row["status"] for row in rows] == ["1 ok", "1 ok"]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-6), "the same data under another name"


def _recorded_statuses(folder):
    try:
        return results.statuses(folder / "results.h5")
    except StorageError:
        return {}  # not there yet


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.matrix_except("SIGTERM")
@pytest.mark.full
def test_next_call_resumes_a_sweep_that_was_ended(folder, number, code):
    (folder / "sweep.toml").write_text(SWEEP + "[axes]\nrun.seed = [1, 2]\n")
    process = subprocess.Popen(line(folder), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + LIMIT_S
    while not _recorded_statuses(folder):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(number)
    _, output = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, output
    jobs.until(
        lambda: not jobs.is_running(f"{folder}/results.h5.trial-"), "end of the trials after that of their sweep"
    )
    assert list(_recorded_statuses(folder).values()) == ["ok"], "the trial under way is not recorded"
    done = hpcdist(*line(folder))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": ok, ") == 1 and "2 ok, 0 failed, 0 left" in done.stderr
    assert len(_recorded_statuses(folder)) == 2
