"""Trainings with failing disks: they report the error, exit with code 74, and resume from the last checkpoint later.

Each training is a fork of this process, so it imports nothing again.
"""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint, write_text
from harness.jobs import LIMIT_S
from harness.trainings import SETTINGS
from hpcdist.checkpoint.listing import verify
from hpcdist.cli.main import main
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import side_tables, step_metrics

STEPS = 12


def train(out, *keys, before=lambda: None):
    """Start a training in ``out`` in a child process, after calling ``before`` there. Return the child's process id."""
    child = os.fork()
    if child:
        return child
    with out.with_suffix(".log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    before()
    settings = {**SETTINGS, "run.steps": STEPS, "checkpoint.every_steps": 1, "energy.sources": "none"}
    texts = [*(f"{key}={value}" for key, value in settings.items()), *keys]
    sys.argv = ["hpcdist", "train", "--out", str(out), "--resume", "auto", *(w for t in texts for w in ("--set", t))]
    try:
        main()
    except SystemExit as left:
        os._exit(left.code if isinstance(left.code, int) else 1)
    finally:
        os._exit(99)


def wait_for_exit_code(child):
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("it did not end")


def printed_output(out):
    return out.with_suffix(".log").read_text()


def recorded_losses(out):
    return step_metrics.read(out / "metrics.h5").steps["loss"].tolist()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The data key, and the losses of an undisturbed run."""
    place = tmp_path_factory.mktemp("calm")
    text = f"data.path={write_text(place / 'text.txt', np.random.default_rng(7))}"
    assert wait_for_exit_code(train(place / "run", text)) == 0, printed_output(place / "run")
    return text, recorded_losses(place / "run")


def make_call_fail(call, number, after=0):
    """Let ``os.<call>`` fail for files of the checkpoint of step 4, after ``after`` successful calls."""
    true, left = getattr(os, call), [after]

    def fail_on_step_4(target, *arguments, **more):
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if "/checkpoints/step-4" in path:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return true(target, *arguments, **more)

    setattr(os, call, fail_on_step_4)


def assert_resumes(out, expected, *keys):
    """Check that the newest checkpoint is intact, and that the resumed run has the losses of an undisturbed run."""
    result = newest_intact_checkpoint(out)
    assert result is not None and 1 <= int(result.name.removeprefix("step-")) < STEPS and not verify(result).damage
    assert wait_for_exit_code(train(out, *keys)) == 0, printed_output(out)
    assert f"resumed from {result}" in printed_output(out)
    assert recorded_losses(out) == expected and len(expected) == STEPS


@pytest.mark.full
def test_training_resumes_after_an_exceeded_quota(undisturbed, tmp_path):
    (text, expected), out = undisturbed, tmp_path / "run"
    beside = "checkpoint.asynchronous=true"
    ended = wait_for_exit_code(train(out, text, beside, before=lambda: make_call_fail("pwrite", errno.EDQUOT, 10)))
    assert ended == 74, printed_output(out)
    assert re.search(
        r"StorageError: the checkpoint was not saved: .*cannot be written: Disk quota exceeded", printed_output(out)
    )
    assert "Traceback" not in printed_output(out)
    assert_resumes(out, expected, text, beside)


def mount(*arguments):
    """Run mount with ``arguments``. Return True if it worked."""
    return not subprocess.call(["mount", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.full
def test_training_resumes_after_a_read_only_file_system(undisturbed, tmp_path):
    (text, expected), out = undisturbed, tmp_path / "run"
    checkpoints = out / "checkpoints"
    if os.geteuid() == 0 and mount("--bind", tmp_path, tmp_path):
        subprocess.check_call(["umount", "-l", tmp_path])
        child = train(out, text, "chaos.step_s=0.02")
        limit = time.monotonic() + LIMIT_S
        while not (checkpoints / "step-3").exists() and time.monotonic() < limit:
            time.sleep(0.002)
        try:
            assert mount("--bind", checkpoints, checkpoints)
            while not mount("-o", "remount,bind,ro", checkpoints):  # fails while a file is open for writing
                assert time.monotonic() < limit
            ended = wait_for_exit_code(child)
        finally:
            subprocess.check_call(["umount", "-l", checkpoints])
    else:
        ended = wait_for_exit_code(train(out, text, before=lambda: make_call_fail("mkdir", errno.EROFS)))
    assert ended == 74, printed_output(out)
    assert re.search(r"StorageError: the checkpoint was not saved: .*: Read-only file system", printed_output(out))
    assert_resumes(out, expected, text)


@pytest.mark.full
def test_training_resumes_unchanged_after_kills_and_a_full_disk(undisturbed, tmp_path):
    (text, expected), out = undisturbed, tmp_path / "run"
    keys = text, "chaos.kill=['0@3:update', '0@7:save']", "chaos.disk=['0@5:full']", "checkpoint.incremental=true"
    assert wait_for_exit_code(
        train(out, *keys)
    ) == -signal.SIGKILL and "rank 0 is killed in the update of step 3" in printed_output(out)
    assert wait_for_exit_code(
        train(out, *keys)
    ) == 74 and "cannot be written: No space left on device" in printed_output(out)
    assert not list((out / "checkpoints").glob("step-5*")), "the space of the failed checkpoint must be free again"
    assert wait_for_exit_code(
        train(out, *keys)
    ) == -signal.SIGKILL and "rank 0 is killed in the save after step 7" in printed_output(out)
    assert (out / "checkpoints" / "step-7.tmp").exists()
    assert_resumes(out, expected, *keys)


def test_silent_fault_is_reported_and_repaired(undisturbed, tmp_path):
    (text, expected), out = undisturbed, tmp_path / "run"
    keys = text, "chaos.corrupt=['0@5']", "run.recompute_every_steps=5", "run.suspicious_factor=50"
    assert wait_for_exit_code(train(out, *keys)) == 0, printed_output(out)
    assert recorded_losses(out) == expected
    assert f"step 5: a silent fault: rank 0 on {socket.gethostname()} computed other bits" in printed_output(out)
    with files.open_read(out / "metrics.h5") as file:
        rows = side_tables.RECOMPUTED.read(file)
    assert {name: rows[name].tolist() for name in ("step", "suspicious", "same", "rank")} == {
        "step": [5, 10],
        "suspicious": [0, 0],
        "same": [0, 1],
        "rank": [0, -1],
    }
