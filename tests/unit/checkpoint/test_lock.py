"""The lock of a run directory: one writer at a time, and the lock of a dead process does not block others."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint
from harness.jobs import LIMIT_S, call_command
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import lock, state
from hpcdist.checkpoint.lock import LOCK_FILE, RunLock
from hpcdist.checkpoint.two_phase import SavePlan, commit, save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic
from hpcdist.training import run_directory
from hpcdist.training.recipe import recipe as recipes

HOLD = """
import sys, time
from pathlib import Path
from hpcdist.checkpoint.lock import RunLock
RunLock().take(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock, "STALE_S", 0.5)


def lock_owner(path):
    entry = json.loads((path / LOCK_FILE).read_text())
    entry.pop("place", None)
    return entry


def forge(path, **changed):
    (path / LOCK_FILE).write_text(json.dumps(lock_owner(path) | changed))


def test_second_lock_of_a_directory_is_rejected(tmp_path):
    first, second = RunLock(), RunLock()
    first.take(tmp_path)
    with pytest.raises(StorageError, match=rf"is being written by process {os.getpid()} on .*choose another --out"):
        second.take(tmp_path)
    first.release()
    assert not list(tmp_path.iterdir())
    second.take(tmp_path)
    first.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE], "released the lock of another process"
    second.release()
    assert not list(tmp_path.iterdir())


def test_only_one_of_many_concurrent_locks_succeeds(tmp_path):
    taken = []

    def try_to_lock():
        mine = RunLock()
        try:
            mine.take(tmp_path)
        except StorageError:
            return
        taken.append(mine)

    threads = [threading.Thread(target=try_to_lock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    taken[0].release()


def test_lock_of_a_living_process_blocks_and_of_a_killed_one_not(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    with pytest.raises(StorageError, match=f"process {process.pid}"):
        RunLock().take(tmp_path)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process is a zombie from here on
    mine = RunLock()
    mine.take(tmp_path)
    mine.release()
    process.wait()


def test_lock_of_another_machine_expires_without_heartbeat(tmp_path, short_timeouts):
    other = RunLock()
    other.identity |= {"machine": "another", "host": "far"}
    other.take(tmp_path)
    with pytest.raises(StorageError, match="on far"):
        RunLock().take(tmp_path)  # its heartbeat continues
    other._ended.set()
    began = time.monotonic()
    mine = RunLock()
    mine.take(tmp_path)  # waits
    assert time.monotonic() - began > 0.1
    mine.release()


def test_lock_of_an_earlier_start_of_the_same_job_is_replaced(tmp_path):
    earlier = RunLock({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"})
    earlier.take(tmp_path)
    forge(tmp_path, machine="another")
    mine = RunLock({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    mine.take(tmp_path)
    assert lock_owner(tmp_path) == mine.identity and not mine.lost() and earlier.lost()
    mine.release()
    earlier.release()
    assert not list(tmp_path.iterdir())


def test_old_damaged_lock_is_replaced(tmp_path, short_timeouts):
    (tmp_path / LOCK_FILE).write_text("{")
    mine = RunLock()
    mine.take(tmp_path)
    assert lock_owner(tmp_path) == mine.identity and not mine.lost()
    mine.release()
    assert not list(tmp_path.iterdir())


def test_second_run_in_one_directory_changes_nothing(tmp_path):
    recipe = recipes.load(None, [], {}).recipe
    first, second = RunLock(), RunLock()
    run_directory.prepare_run_directory(solo(), recipe, tmp_path / "run", "auto", first)
    (tmp_path / "run" / "checkpoints").mkdir()
    before = (tmp_path / "run" / "recipe.toml").read_text()
    longer = recipes.load(None, ["run.steps=77"], {}).recipe
    with pytest.raises(StorageError, match="is being written by process"):
        run_directory.prepare_run_directory(solo(), longer, tmp_path / "run", "auto", second)
    assert (tmp_path / "run" / "recipe.toml").read_text() == before
    first.release()
    run_directory.prepare_run_directory(solo(), longer, tmp_path / "run", "auto", second)
    second.release()


def test_process_that_lost_its_lock_cannot_save(tmp_path, short_timeouts):
    """A process was frozen for longer than a lock lives. Another host took the directory over and saves that step."""

    def state(value):
        return [Piece.whole("parameters", "w", np.full(100, float(value)))]

    frozen, other = RunLock(), RunLock()
    frozen.take(tmp_path)
    save(tmp_path / "checkpoints", 1, state(1), {}, solo())
    assert frozen.lost() == "" and lock.lost(tmp_path) == "" and lock.lost(tmp_path / "elsewhere") == ""
    other.identity |= {"machine": "another", "host": "far"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(other.identity))
    theirs = tmp_path / "checkpoints" / "step-2.tmp"
    theirs.mkdir()
    with pytest.raises(StorageError, match=r"not saved: process \d+ on far has taken .* over") as caught:
        save(tmp_path / "checkpoints", 2, state(2), {}, solo())
    assert caught.value.exit_code == 74 and theirs.is_dir(), "the files of the new owner must stay"
    assert "on far" in commit(SavePlan(tmp_path / "checkpoints", 2, 1, {}, {}, 2), []) and theirs.is_dir()
    before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
    time.sleep(4 * lock.HEARTBEAT_S)
    assert (tmp_path / LOCK_FILE).stat().st_mtime_ns == before, "the heartbeat must not touch a foreign lock"
    frozen.release()
    assert (tmp_path / LOCK_FILE).exists() and newest_intact_checkpoint(tmp_path).name == "step-1"


def test_removed_lock_is_created_again_by_save(tmp_path):
    mine = RunLock()
    mine.take(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    save(tmp_path / "checkpoints", 1, [Piece.whole("parameters", "w", np.zeros(3))], {}, solo())
    assert (tmp_path / LOCK_FILE).exists()
    (tmp_path / LOCK_FILE).write_text("{")
    assert mine.lost() == "", "a damaged lock has no known owner"
    mine.release()


def test_heartbeat_continues_after_lock_reappears(tmp_path, short_timeouts):
    mine = RunLock()
    mine.take(tmp_path)
    (tmp_path / LOCK_FILE).rename(tmp_path / "away")
    time.sleep(4 * lock.HEARTBEAT_S)
    (tmp_path / "away").rename(tmp_path / LOCK_FILE)
    before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
    limit = time.monotonic() + LIMIT_S
    while (tmp_path / LOCK_FILE).stat().st_mtime_ns == before and time.monotonic() < limit:
        time.sleep(lock.HEARTBEAT_S)
    assert (tmp_path / LOCK_FILE).stat().st_mtime_ns > before
    mine.release()


def test_moved_run_directory_fails_save_on_all_ranks(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    mine = RunLock()
    mine.take(run)
    run.rename(tmp_path / "elsewhere")
    piece = Piece.whole("parameters", "w", np.zeros(3))

    def body(comm):
        with pytest.raises(StorageError, match="not saved: .*lock cannot be created") as caught:
            save(run / "checkpoints", 1, [piece] if comm.rank == 0 else [], {}, comm)
        return caught.value.exit_code

    assert run_threads(2, body) == [74, 74]
    mine.release()


def test_prune_is_rejected_while_a_job_runs(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", step, [Piece.whole("parameters", "w", np.zeros(3))], {}, solo(), keep=9)
    job = RunLock()
    job.take(tmp_path)

    def prune(*arguments):
        code, _, err = call_command(capsys, "checkpoint", "prune", "--keep", "1", *arguments)
        return code, err

    for place in tmp_path, tmp_path / "checkpoints":
        code, output = prune(place)
        assert code == 74 and "let it keep fewer itself (checkpoint.keep)" in output
        assert prune(place, "--dry-run")[0] == 0
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 3
    job.release()
    assert prune(tmp_path)[0] == 0 and not (tmp_path / LOCK_FILE).exists()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-3"]


def test_lock_on_a_read_only_file_system_raises_storage_error(tmp_path, monkeypatch, capsys):
    """On Linux, removing a missing file on a read-only file system fails with the same error as creating it."""
    save(tmp_path / "checkpoints", 1, [Piece.whole("parameters", "w", np.zeros(3))], {}, solo())

    def raise_os_error(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic, "create", raise_os_error)
    monkeypatch.setattr(type(tmp_path), "unlink", raise_os_error)
    with pytest.raises(
        StorageError, match=r"lock cannot be created: Read-only file system; choose a writable directory"
    ):
        RunLock().take(tmp_path)
    with pytest.raises(StorageError, match="Read-only file system"):
        state.save(tmp_path / "api", {"w": np.zeros(3)}, comm=solo())
    code, _, err = call_command(capsys, "checkpoint", "prune", "--keep", "1", tmp_path)
    assert code == 74 and "Read-only file system" in err


def test_take_of_a_read_only_mount_raises_storage_error(tmp_path):
    script = (
        'mount -t tmpfs -o ro none "$1" && '
        'exec "$2" -c "import sys; from hpcdist.checkpoint import save; save(sys.argv[1], {}, step=1)" "$1"'
    )
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=LIMIT_S, check=False).returncode:
        pytest.skip("unshare needs root")
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if "mount:" in done.stderr:
        pytest.skip("mount is not permitted")
    assert done.returncode == 74 and "Read-only file system" in done.stderr and "Traceback" not in done.stderr


def test_copy_of_a_locked_directory_is_not_locked(tmp_path):
    original, copy = tmp_path / "run", tmp_path / "copy"
    original.mkdir()
    first, second = RunLock(), RunLock()
    first.take(original)
    shutil.copytree(original, copy)
    assert lock.is_held(original) and not lock.is_held(copy)
    second.take(copy)
    assert lock.is_held(copy) and not first.lost() and not second.lost()
    with pytest.raises(StorageError, match="is being written by process"):
        RunLock().take(original)
    first.release()
    second.release()
    assert not list(original.iterdir()) and not list(copy.iterdir())


def test_moved_directory_stays_locked(tmp_path):
    """A second mount point of a shared file system looks like a moved directory: same inode, other path."""
    original = tmp_path / "run"
    original.mkdir()
    mine = RunLock()
    mine.take(original)
    moved = original.rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="is being written by process"):
        RunLock().take(moved)
    moved.rename(original)
    mine.release()


def test_copied_lock_of_a_file_system_without_links_still_locks(tmp_path, monkeypatch):
    def raise_os_error(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", raise_os_error)
    mine = RunLock()
    mine.take(tmp_path)
    assert lock_owner(tmp_path) == mine.identity and lock.is_held(tmp_path)
    mine.release()


def test_wait_for_a_damaged_lock_is_announced(tmp_path, short_timeouts, capsys):
    (tmp_path / LOCK_FILE).write_text("{")
    with pytest.raises(StorageError, match=r"lock is damaged .*remove .*lock"):
        RunLock().take(tmp_path, waits=False)
    assert not capsys.readouterr().err
    mine = RunLock()
    mine.take(tmp_path)
    mine.release()
    err = capsys.readouterr().err
    assert err.count("is damaged") == 1 and "waiting " in err


@pytest.mark.parametrize("name", [LOCK_FILE, "stop"])
def test_directory_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    recipe = recipes.load(None, [], {}).recipe
    with pytest.raises(StorageError, match=rf"^{tmp_path}/run/{name} is a directory.*move"):
        run_directory.prepare_run_directory(solo(), recipe, tmp_path / "run", "auto", RunLock())
