"""A whole job on a machine without a scheduler: submitted, stopped, restarted automatically, and cancelled."""

import os
from pathlib import Path

import pytest

from harness.jobs import hpcdist, until
from hpcdist.batch import ledger
from hpcdist.batch.schedulers import local
from hpcdist.batch.schedulers.base import SchedulerState

pytestmark = pytest.mark.full


def test_job_restarts_automatically_until_it_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
    Path("recipe.toml").write_text(
        "[data]\npath = 'text.txt'\ncontext = 16\n[model]\nlayers = 1\nhidden = 32\nheads = 2\n"
        "[run]\nglobal_batch = 6\nsteps = 1000000\n[checkpoint]\nevery_steps = 20\n"
    )
    options = ["--site", "workstation", "--nodes", "1", "--ranks-per-node", "2", "--out", "run"]
    done = hpcdist("submit", "recipe.toml", *options)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    try:
        log = Path(local.state(job).log)
        until(lambda: "\nstep 1/" in log.read_text(), log=log)
        assert local.state(job).state == SchedulerState.RUNNING
        Path("run", "stop").touch()
        until(lambda: "resumed from" in log.read_text(), log=log)
        cancelled = hpcdist("jobs", "cancel", "run")
        assert cancelled.returncode == 0, cancelled.stderr
        until(lambda: local.state(job).is_over, log=log)
    finally:
        if local.cancel(job):
            until(lambda: local.state(job).is_over, log=log)
    result = local.state(job)
    assert (result.state, result.exit_code) == (SchedulerState.COMPLETED, 0), log.read_text()
    entries = ledger.read(Path("run"))
    assert [entry.number("restart") for entry in entries if entry.event == ledger.BEGAN] == [0, 1]
    assert [entry.text("word") for entry in entries if entry.event == ledger.ENDED] == ["again", "stop"]
    assert {entry.job for entry in entries} == {job} and "the job was cancelled" in log.read_text()
    until(
        lambda: not [pid for pid in os.listdir("/proc") if pid.isdecimal() and belongs_to_job(int(pid), job)], log=log
    )


def belongs_to_job(pid, job):
    """Whether the process belongs to the session of the job, and has not ended."""
    try:
        return os.getsid(pid) == local._pid_and_start(job)[0] and local._stat(pid)[0] not in "ZX"
    except ProcessLookupError:
        return False
