"""A trial is a separate process: its end, and its stored outcome."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.bench.sweep import trial as trials
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK

TRIAL = SweepTrial("0123", "fake", 2, {}, "[run]\nsteps = 3\n")
MEASURED = """
    import json, sys
    import numpy as np
    from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
    ranks, recipe, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with MetricsWriter(out + "/metrics.h5", ranks, attributes={"mpi_library": "Fake MPI 1"}) as writer:
        for step in range(1, 4):
            wide = np.arange(ranks) + 10.0 * step
            writer.append(step=step, loss=1 / step, learning_rate=0.1, tokens=64, step_s=7 * wide, compute_s=wide,
                          communication_s=2 * wide, update_s=3 * wide, sent_bytes=np.full(ranks, np.nan))
    print("noise")
    print(json.dumps({"recipe": open(recipe).read(), "val_loss": None}))
"""


@pytest.fixture
def measure(tmp_path):
    """``measure(source, limit_s)`` runs a trial whose command is a Python program."""

    def run(source, limit_s=60.0):
        program = textwrap.dedent(source)

        def line(of, recipe, out):
            out.mkdir()
            return [sys.executable, "-c", program, str(of.ranks), str(recipe), str(out)]

        folder = tmp_path / "trial"
        folder.mkdir()
        return trials.run(TRIAL, folder, limit_s, line, os.environ)

    return run


def test_trial_command_is_hpcdist_run(tmp_path):
    line = trials.command(SweepTrial("0", "fake", 3, {}, ""), tmp_path / "recipe.toml", tmp_path / "run")
    assert line[:6] == [sys.executable, "-P", "-m", "hpcdist", "run", "-n"] and line[6] == "3"
    assert line[line.index("train") :] == [
        "train",
        str(tmp_path / "recipe.toml"),
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]


def test_successful_trial_keeps_summary_and_samples(measure):
    outcome = measure(MEASURED)
    assert (outcome.status, outcome.exit_code, outcome.reason, outcome.mpi_library) == (OK, 0, "", "Fake MPI 1")
    assert outcome.summary == {"recipe": TRIAL.recipe, "val_loss": None}
    wide = 10.0 * np.arange(1, 4)[:, None] + np.arange(2)
    assert (outcome.samples["compute_s"].values == wide).all()
    assert (outcome.samples["step_s"].values == 7 * wide).all() and outcome.samples["step_s"].units == "s"
    assert np.isnan(outcome.samples["sent_bytes"].values).all() and outcome.samples["sent_bytes"].units == "By"
    assert outcome.samples["iteration"].values.tolist() == [1, 2, 3]
    assert outcome.wall_s > 0


@cases(
    "source, reason",
    ("import sys; sys.exit('Error: data.path = nowhere')", "exit code 1: data.path = nowhere"),
    ("raise ValueError('got 3')", "exit code 1: ValueError: got 3"),
    (
        "import sys; sys.stderr.write('[rank 1] hpcdist.errors.DataError: too short\\n====\\n'); sys.exit(78)",
        "exit code 78: hpcdist.errors.DataError: too short",
    ),
    ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
)
def test_failed_trial_has_a_reason(measure, source, reason):
    outcome = measure(source)
    assert (outcome.status, outcome.reason) == (FAILED, reason)
    assert not outcome.summary and not outcome.samples
    assert ("Error" in outcome.stderr_tail) == ("Error" in source)


def test_only_the_tail_of_stderr_is_kept(measure):
    outcome = measure("import sys; sys.stderr.write('begin' + '\\0x' * 50000 + 'end'); sys.exit(3)")
    assert outcome.exit_code == 3 and "begin" not in outcome.stderr_tail
    assert outcome.stderr_tail.endswith("xend") and "\0" not in outcome.stderr_tail
    assert len(outcome.stderr_tail) <= trials.TAIL_BYTES


@pytest.mark.parametrize("source", ["print('{}')", "print('no json')", "pass"])
def test_trial_without_results_is_a_failure(measure, source):
    outcome = measure(source)
    assert (outcome.status, outcome.exit_code) == (FAILED, 0)
    assert "cannot be read" in outcome.reason


def test_time_limit_ends_a_trial(measure):
    outcome = measure("import time; time.sleep(600)", limit_s=0.5)
    assert (outcome.status, outcome.reason) == (FAILED, "timed out after 0.5 s")
    assert outcome.wall_s < 300


@pytest.mark.full
def test_trial_that_ignores_sigterm_is_killed(measure, monkeypatch):
    monkeypatch.setattr(trials, "GRACE_S", 0.1)
    monkeypatch.setattr(trials, "TEARDOWN_S", 0.1)
    source = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('', flush=True); time.sleep(600)"
    )
    outcome = measure(source, limit_s=3.0)
    assert (outcome.reason, outcome.exit_code) == ("timed out after 3 s", -signal.SIGKILL)


def test_exception_of_the_parent_ends_the_trial(measure, tmp_path):
    class Asked(BaseException):
        pass

    def raise_asked(number, frame):
        raise Asked

    def signal_when_started():
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    name = str(tmp_path / "pid")
    source = f"import os, time\nopen({name!r} + '.new', 'w').write(str(os.getpid()))\n"
    source += f"os.rename({name!r} + '.new', {name!r})\ntime.sleep(600)"
    before = signal.signal(signal.SIGUSR2, raise_asked)
    try:
        threading.Thread(target=signal_when_started, daemon=True).start()
        with pytest.raises(Asked):
            measure(source)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not _is_running(int((tmp_path / "pid").read_text()))


def test_trial_does_not_outlive_a_killed_sweep(tmp_path):
    """SIGKILL cannot be handled: the kernel ends the child when its parent dies."""
    program = f"""
    import os, sys
    from pathlib import Path
    from hpcdist.bench.sweep import trial
    from hpcdist.bench.sweep.definition import SweepTrial
    child = "import os, time; from pathlib import Path; Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))"
    line = lambda of, recipe, out: [sys.executable, "-c", child + "; time.sleep(600)"]
    trial.run(SweepTrial("0", "fake", 1, {{}}, ""), Path({str(tmp_path)!r}), 600.0, line, os.environ)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    limit = time.monotonic() + LIMIT_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while _is_running(child):
        assert time.monotonic() < limit, "the trial goes on without its sweep"
        time.sleep(0.02)


def _is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # an orphan may wait for a reaper
    except FileNotFoundError:
        return False
