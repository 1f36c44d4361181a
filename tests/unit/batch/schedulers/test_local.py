"""Jobs without a scheduler: real processes, that outlive who submits them, wait, fail, and are cancelled."""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S, until
from hpcdist.batch.schedulers import local
from hpcdist.batch.schedulers.base import SchedulerState
from hpcdist.comm.launch.environment import boot_id
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError

SLEEP = "touch ready\nfor ((i = 0; i < 600; i++)); do sleep 0.05; done\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Jobs are kept, and run, in a folder of the test; none outlives it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "state" / "hpcdist" / "local"
    for folder in (tmp_path / "state" / "hpcdist" / "local").glob("local-*"):
        if local._alive(folder.name):
            os.killpg(local._pid_and_start(folder.name)[0], signal.SIGKILL)


def over(job):
    return until(lambda: (found := local.state(job)).is_over and found)


def test_a_job_runs_apart_and_says_its_code():
    Path("log").write_text("of a start before\n")
    job = local.submit('cat; echo "$HPCDIST_JOB_ID" $$; echo error >&2; ps -o sid=,tty= -p $$\n', Path("log"))
    found = over(job)
    assert (found.state, found.exit_code, found.log) == (SchedulerState.COMPLETED, 0, str(Path("log").absolute()))
    assert found.begun_utc and found.ended_utc and found.elapsed_s >= 0 and found.energy_j is None
    first, named, error, session = Path("log").read_text().splitlines()
    assert (first, error) == ("of a start before", "error"), "it is appended to, and nothing is on its stdin"
    assert named.split()[0] == job
    assert session.split() == [re.fullmatch(r"local-(\d+)-\d+", job)[1], "?"]


def test_a_failure_has_its_code():
    found = over(local.submit("exit 78\n", Path("log")))
    assert (found.state, found.exit_code) == (SchedulerState.FAILED, 78)


def test_it_outlives_who_submits_it(tmp_path):
    imports = "from pathlib import Path\nfrom hpcdist.batch.schedulers import local\n"
    code = f"{imports}print(local.submit({SLEEP!r}, Path('log')))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    job = done.stdout.strip()
    until((tmp_path / "ready").exists)
    assert local.state(job).state == SchedulerState.RUNNING and not local.state(job).is_over
    assert local.cancel(job)
    assert over(job).state == SchedulerState.CANCELLED


def test_all_processes_are_told_to_end_and_may_save(tmp_path):
    """The script, and a program that it waits for in the foreground, where bash does not run a trap."""
    child = "trap 'touch saved; exit 75' TERM\n" + SLEEP
    Path("child").write_text(child)
    job = local.submit("code=0; trap : TERM; bash child || code=$?; exit $code\n", Path("log"))
    until((tmp_path / "ready").exists)
    assert local.cancel(job)
    found = over(job)
    assert (found.state, found.exit_code, Path("saved").exists()) == (SchedulerState.CANCELLED, 75, True)
    assert not local.cancel(job), "there is nobody left to be told"


@pytest.mark.full
def test_a_job_waits_for_its_begin(tmp_path):
    soon = datetime.now(UTC) + timedelta(seconds=1)
    job = local.submit("date +%s.%N > ran\n", Path("log"), soon)
    found = local.state(job)
    assert (
        found.state == SchedulerState.PENDING
        and found.is_waiting
        and "begins at" in found.reason
        and found.elapsed_s is None
    )
    assert over(job).state == SchedulerState.COMPLETED
    assert float(Path("ran").read_text()) >= soon.timestamp()


def test_a_job_that_waits_can_be_cancelled():
    job = local.submit("touch ran\n", Path("log"), datetime.now(UTC) + timedelta(hours=1))
    assert local.state(job).state == SchedulerState.PENDING
    assert local.cancel(job)
    found = over(job)
    assert (found.state, found.exit_code, Path("ran").exists()) == (SchedulerState.CANCELLED, 143, False)


def test_other_signals_do_not_end_the_keeper(tmp_path):
    job = local.submit("trap 'touch told; exit 3' USR1\n" + SLEEP, Path("log"))
    until((tmp_path / "ready").exists)
    os.killpg(local._pid_and_start(job)[0], signal.SIGUSR1)
    assert over(job).exit_code == 3 and Path("told").exists()


def test_a_job_that_was_killed_has_failed_without_a_code(tmp_path):
    job = local.submit(SLEEP, Path("log"))
    until((tmp_path / "ready").exists)
    os.killpg(local._pid_and_start(job)[0], signal.SIGKILL)
    found = over(job)
    assert (found.state, found.exit_code) == (SchedulerState.FAILED, None) and "killed" in found.reason


def test_another_process_with_the_same_number_is_left_alone(home):
    """The id says when the keeper started, and that is not when this process did."""
    job = f"local-{os.getpid()}-1"
    (home / job).mkdir(parents=True)
    place = {"host": os.uname().nodename, "boot": boot_id(), "log": "log", "begin_s": 0}
    (home / job / "job.json").write_text(json.dumps(place))
    assert local.state(job).state == SchedulerState.FAILED
    assert not local.cancel(job) and not (home / job / "cancelled").exists()


def test_a_job_that_is_to_begin_at_once_names_no_time(home):
    job = local.submit(SLEEP, Path("log"))
    until(Path("ready").exists)
    (home / job / "began").unlink()  # as it is for a moment
    assert (local.state(job).state, local.state(job).reason) == (SchedulerState.PENDING, "")


def test_after_a_reboot_and_on_another_machine(home, monkeypatch):
    job = over(local.submit("exit 0\n", Path("log"))).id
    kept = json.loads((home / job / "job.json").read_text())
    (home / job / "job.json").write_text(json.dumps(kept | {"boot": "before"}))
    assert local.state(job).state == SchedulerState.COMPLETED, "what it said counts"
    (home / job / "code").unlink()
    assert local.state(job).state == SchedulerState.NODE_FAIL and not local.cancel(job)
    (home / job / "job.json").write_text(json.dumps(kept | {"boot": "other", "host": "elsewhere"}))
    assert local.state(job).state == SchedulerState.UNKNOWN and "elsewhere" in local.state(job).reason
    with pytest.raises(MissingCapabilityError, match="elsewhere"):
        local.cancel(job)


@pytest.mark.parametrize("job", ["local-1-1", "local-../..", "4711", ""])
def test_what_is_no_job(job):
    assert local.state(job).state == SchedulerState.UNKNOWN and "no such job" in local.state(job).reason
    with pytest.raises(UsageError, match="jobs status"):
        local.cancel(job)


def test_where_nothing_can_be_kept(monkeypatch, tmp_path):
    with pytest.raises(StorageError, match="not/there"):
        local.submit("exit 0\n", Path("not/there"))
    Path("file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        local.submit("exit 0\n", Path("log"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingCapabilityError, match="no bash"):
        local.submit("exit 0\n", Path("log"))
