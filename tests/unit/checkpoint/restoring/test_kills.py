"""SIGKILL at random times while checkpoints are saved continuously: the newest valid one can always be loaded.

Three disks: one that works, one that becomes full at a random time, and one whose fsync sometimes fails and loses
unwritten data. 2 kills on each, or HPCDIST_TEST_KILLS if it is set (200 take a few minutes). After each kill a new
process resumes from the files.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint
from harness.jobs import LIMIT_S
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.restoring.restore import restore

KILLS = int(os.environ.get("HPCDIST_TEST_KILLS", "2"))
LONGEST_S = 0.4  # between the first checkpoint of a process and its death
ELEMENTS = 60_000
DISK_BYTES = 4 << 20

WRITER = """
import errno
import os
import random
import stat
import sys
from pathlib import Path

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.restoring.restore import from_newest_intact, newest_complete, restore_together
from hpcdist.checkpoint.two_phase import SavePlan, save_planned
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError

run, way, elements, trouble = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
chance, true_fsync, true_pwrite = random.Random(sys.argv[5]), os.fsync, os.pwrite


def fsync(fd):
    if chance.random() < 0.04:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            true_pwrite(fd, bytes(64), max(0, os.fstat(fd).st_size - 64))
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    true_fsync(fd)


def pwrite(fd, data, offset):
    if os.path.exists(run / "full"):
        true_pwrite(fd, memoryview(data)[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return true_pwrite(fd, data, offset)


if trouble == "fsync":
    os.fsync = fsync
elif trouble == "full, pretended":
    os.pwrite = pwrite


def body(comm):
    part = split(elements, comm.size, 8)[comm.rank]
    state = np.zeros(part.size)
    piece = Piece("parameters", "w", (elements,), ((0, elements),), part, state)
    step = from_newest_intact(
        run, comm, newest_complete(run, comm), lambda path: path and restore_together(comm, path, [piece])["step"]
    ) or 0
    assert (state == step).all(), (step, state)
    beside, begun = BackgroundCheckpoints(comm), 0
    while True:
        step += 1
        state[...] = step
        plan = SavePlan(run / "checkpoints", step, comm.size, {"step": step}, {}, 2)
        try:
            if way == "beside":
                complete, begun = begun, 0
                beside.begin(plan, [piece], "rank")
                begun = step
            else:
                complete = 0
                save_planned(plan, [piece], comm, "rank" if way == "alone" else "1")
                complete = step
        except StorageError:
            complete = -1
        state[...] = -1
        if comm.rank == 0 and complete:
            print(complete, flush=True)


run_threads(2, body)
"""


@pytest.fixture
def disk(tmp_path):
    """A small file system for a few checkpoints, if this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    size = f"size={DISK_BYTES}"
    made = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield place
    if made:
        subprocess.check_call(["umount", "-l", place])


@contextlib.contextmanager
def fill_disk(disk):
    """Fill the disk, so that it has no free block."""
    (disk / "full").touch()
    ballast = os.open(disk / "ballast", os.O_RDWR | os.O_CREAT)
    try:
        if disk.is_mount():
            free = os.statvfs(disk)
            with contextlib.suppress(OSError):  # a checkpoint may take some of the space meanwhile
                os.posix_fallocate(ballast, 0, free.f_bavail * free.f_bsize)
        yield
    finally:
        os.close(ballast)
        (disk / "ballast").unlink()
        (disk / "full").unlink()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trouble", ["", "full", "fsync"])
@pytest.mark.full_except("fsync")
def test_newest_valid_checkpoint_loads_after_every_kill(disk, rng, trouble):
    reached = failed = 0
    pretended = ", pretended" if trouble == "full" and not disk.is_mount() else ""
    for kill in range(KILLS):
        way = ("alone", "beside", "one writer")[(kill + len(trouble)) % 3]
        arguments = [str(disk), way, str(ELEMENTS), trouble + pretended, str(rng.integers(2**30))]
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        steps = []
        while max(steps, default=-1) < 0 and (line := process.stdout.readline()):
            steps.append(int(line))
        time.sleep(float(rng.random()) * LONGEST_S)
        with fill_disk(disk) if trouble == "full" else contextlib.nullcontext():
            if trouble == "full":
                time.sleep(float(rng.random()) * LONGEST_S)
            process.send_signal(signal.SIGKILL)
            output, errors = process.communicate(timeout=LIMIT_S)
        assert steps and process.returncode == -signal.SIGKILL, errors
        steps += map(int, output.split())
        failed += steps.count(-1)
        result = newest_intact_checkpoint(disk)
        assert result is not None, f"kill {kill}"
        state = np.zeros(ELEMENTS)
        step = restore(result, [Piece.whole("parameters", "w", state)])["step"]
        assert (state == step).all() and result.name == f"step-{step}"
        complete = max(steps)
        assert step >= max(complete, reached), f"kill {kill}: step {complete} was complete"
        reached = step
    print(f"{KILLS} of {KILLS} loaded after a kill; saves that failed of {trouble or 'nothing'}{pretended}: {failed}")
    assert failed or not trouble or KILLS <= 20
