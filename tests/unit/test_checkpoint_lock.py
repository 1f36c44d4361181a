"""The lock of a run directory: one writer, and no dead one that keeps others out."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpcdist.checkpoint import lock
from hpcdist.checkpoint.lock import LOCK_FILE, Lock
from hpcdist.comm.solo import solo
from hpcdist.errors import StorageError
from hpcdist.training import directory
from hpcdist.training import recipe as recipes

HOLD = """
import sys, time
from pathlib import Path
from hpcdist.checkpoint.lock import Lock
Lock().take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "STALE_S", 0.5)


def forge(path, **changed):
    own = json.loads((path / LOCK_FILE).read_text())
    (path / LOCK_FILE).write_text(json.dumps(own | changed))


def test_one_at_a_time(tmp_path):
    first, second = Lock(), Lock()
    first.take(tmp_path)
    with pytest.raises(StorageError, match=rf"is being written by process {os.getpid()} on .*choose another --out"):
        second.take(tmp_path)
    first.release()
    assert not list(tmp_path.iterdir())
    second.take(tmp_path)
    first.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE], "another's lock is not given back"
    second.release()
    assert not list(tmp_path.iterdir())


def test_many_at_once(tmp_path):
    taken = []

    def attempt():
        mine = Lock()
        try:
            mine.take(tmp_path)
        except StorageError:
            return
        taken.append(mine)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    taken[0].release()


def test_a_living_process_keeps_it_and_a_killed_one_does_not(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    with pytest.raises(StorageError, match=f"process {process.pid}"):
        Lock().take(tmp_path)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    mine = Lock()
    mine.take(tmp_path)
    mine.release()
    process.wait()


def test_of_another_machine_until_it_is_not_touched_any_more(tmp_path, quick):
    other = Lock()
    other.take(tmp_path)
    forge(tmp_path, machine="another", host="far")
    with pytest.raises(StorageError, match="on far"):
        Lock().take(tmp_path)  # it is touched all the time
    other._ended.set()
    began = time.monotonic()
    mine = Lock()
    mine.take(tmp_path)  # waits
    assert time.monotonic() - began > 0.1
    mine.release()


def test_an_earlier_start_of_the_same_batch_job_is_over(tmp_path):
    Lock({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}).take(tmp_path)
    forge(tmp_path, machine="another")
    mine = Lock({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    mine.take(tmp_path)
    mine.release()


def test_a_damaged_lock_is_stale_when_it_is_old(tmp_path, quick):
    (tmp_path / LOCK_FILE).write_text("{")
    mine = Lock()
    mine.take(tmp_path)
    mine.release()


def test_two_runs_of_one_directory(tmp_path):
    recipe = recipes.load(None, [], {}).recipe
    first, second = Lock(), Lock()
    directory.prepare(solo(), recipe, tmp_path / "run", "auto", first)
    (tmp_path / "run" / "checkpoints").mkdir()
    before = (tmp_path / "run" / "recipe.toml").read_text()
    longer = recipes.load(None, ["run.steps=77"], {}).recipe
    with pytest.raises(StorageError, match="is being written by process"):
        directory.prepare(solo(), longer, tmp_path / "run", "auto", second)
    assert (tmp_path / "run" / "recipe.toml").read_text() == before
    first.release()
    directory.prepare(solo(), longer, tmp_path / "run", "auto", second)
    second.release()
