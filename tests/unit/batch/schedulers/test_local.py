"""Jobs without a scheduler: real processes that outlive their submitter, wait, fail, and are cancelled."""

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
def jobs_folder(tmp_path, monkeypatch):
    """The folder of the local jobs. Jobs still running at the end of a test are killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "state" / "hpcdist" / "local"
    for folder in (tmp_path / "state" / "hpcdist" / "local").glob("local-*"):
        if local._alive(folder.name):
            os.killpg(local._pid_and_start(folder.name)[0], signal.SIGKILL)


def wait_until_over(job):
    return until(lambda: (result := local.state(job)).is_over and result)


def test_job_runs_detached_and_reports_exit_code():
    Path("log").write_text("of a start before\n")
    job = local.submit('cat; echo "$HPCDIST_JOB_ID" $$; echo error >&2; ps -o sid=,tty= -p $$\n', Path("log"))
    result = wait_until_over(job)
    assert (result.state, result.exit_code, result.log) == (SchedulerState.COMPLETED, 0, str(Path("log").absolute()))
    assert result.begun_utc and result.ended_utc and result.elapsed_s >= 0 and result.energy_j is None
    first, named, error, session = Path("log").read_text().splitlines()
    assert (first, error) == ("of a start before", "error"), "expected an appended log, and an empty stdin"
    assert named.split()[0] == job
    assert session.split() == [re.fullmatch(r"local-(\d+)-\d+", job)[1], "?"]


def test_failed_job_reports_exit_code():
    result = wait_until_over(local.submit("exit 78\n", Path("log")))
    assert (result.state, result.exit_code) == (SchedulerState.FAILED, 78)


def test_job_outlives_its_submitter(tmp_path):
    imports = "from pathlib import Path\nfrom hpcdist.batch.schedulers import local\n"
    code = f"{imports}print(local.submit({SLEEP!r}, Path('log')))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    job = done.stdout.strip()
    until((tmp_path / "ready").exists)
    assert local.state(job).state == SchedulerState.RUNNING and not local.state(job).is_over
    assert local.cancel(job)
    assert wait_until_over(job).state == SchedulerState.CANCELLED


def test_cancel_signals_all_processes_and_lets_them_save(tmp_path):
    """The signal reaches the script and its foreground program, during which bash does not run a trap."""
    child = "trap 'touch saved; exit 75' TERM\n" + SLEEP
    Path("child").write_text(child)
    job = local.submit("code=0; trap : TERM; bash child || code=$?; exit $code\n", Path("log"))
    until((tmp_path / "ready").exists)
    assert local.cancel(job)
    result = wait_until_over(job)
    assert (result.state, result.exit_code, Path("saved").exists()) == (SchedulerState.CANCELLED, 75, True)
    assert not local.cancel(job), "cancelled a job that has ended"


@pytest.mark.full
def test_job_waits_for_its_begin_time(tmp_path):
    soon = datetime.now(UTC) + timedelta(seconds=1)
    job = local.submit("date +%s.%N > ran\n", Path("log"), soon)
    result = local.state(job)
    assert (
        result.state == SchedulerState.PENDING
        and result.is_waiting
        and "begins at" in result.reason
        and result.elapsed_s is None
    )
    assert wait_until_over(job).state == SchedulerState.COMPLETED
    assert float(Path("ran").read_text()) >= soon.timestamp()


def test_waiting_job_can_be_cancelled():
    job = local.submit("touch ran\n", Path("log"), datetime.now(UTC) + timedelta(hours=1))
    assert local.state(job).state == SchedulerState.PENDING
    assert local.cancel(job)
    result = wait_until_over(job)
    assert (result.state, result.exit_code, Path("ran").exists()) == (SchedulerState.CANCELLED, 143, False)


def test_keeper_survives_other_signals(tmp_path):
    job = local.submit("trap 'touch told; exit 3' USR1\n" + SLEEP, Path("log"))
    until((tmp_path / "ready").exists)
    os.killpg(local._pid_and_start(job)[0], signal.SIGUSR1)
    assert wait_until_over(job).exit_code == 3 and Path("told").exists()


def test_killed_job_fails_without_exit_code(tmp_path):
    job = local.submit(SLEEP, Path("log"))
    until((tmp_path / "ready").exists)
    os.killpg(local._pid_and_start(job)[0], signal.SIGKILL)
    result = wait_until_over(job)
    assert (result.state, result.exit_code) == (SchedulerState.FAILED, None) and "killed" in result.reason


def test_cancel_ignores_another_process_with_the_same_pid(jobs_folder):
    """The job id contains the keeper's start time, which differs from the start time of this process."""
    job = f"local-{os.getpid()}-1"
    (jobs_folder / job).mkdir(parents=True)
    place = {"host": os.uname().nodename, "boot": boot_id(), "log": "log", "begin_s": 0}
    (jobs_folder / job / "job.json").write_text(json.dumps(place))
    assert local.state(job).state == SchedulerState.FAILED
    assert not local.cancel(job) and not (jobs_folder / job / "cancelled").exists()


def test_job_without_begin_time_has_no_pending_reason(jobs_folder):
    job = local.submit(SLEEP, Path("log"))
    until(Path("ready").exists)
    (jobs_folder / job / "began").unlink()  # a job that starts has no such file for a moment
    assert (local.state(job).state, local.state(job).reason) == (SchedulerState.PENDING, "")


def test_job_state_after_reboot_and_on_another_machine(jobs_folder, monkeypatch):
    job = wait_until_over(local.submit("exit 0\n", Path("log"))).id
    kept = json.loads((jobs_folder / job / "job.json").read_text())
    (jobs_folder / job / "job.json").write_text(json.dumps(kept | {"boot": "before"}))
    assert local.state(job).state == SchedulerState.COMPLETED, "the recorded exit code decides"
    (jobs_folder / job / "code").unlink()
    assert local.state(job).state == SchedulerState.NODE_FAIL and not local.cancel(job)
    (jobs_folder / job / "job.json").write_text(json.dumps(kept | {"boot": "other", "host": "elsewhere"}))
    assert local.state(job).state == SchedulerState.UNKNOWN and "elsewhere" in local.state(job).reason
    with pytest.raises(MissingCapabilityError, match="elsewhere"):
        local.cancel(job)


@pytest.mark.parametrize("job", ["local-1-1", "local-../..", "4711", ""])
def test_unknown_job_is_rejected(job):
    assert local.state(job).state == SchedulerState.UNKNOWN and "no such job" in local.state(job).reason
    with pytest.raises(UsageError, match="jobs status"):
        local.cancel(job)


def test_unwritable_log_or_state_folder_is_rejected(monkeypatch, tmp_path):
    with pytest.raises(StorageError, match="not/there"):
        local.submit("exit 0\n", Path("not/there"))
    Path("file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        local.submit("exit 0\n", Path("log"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingCapabilityError, match="bash is not on PATH"):
        local.submit("exit 0\n", Path("log"))
