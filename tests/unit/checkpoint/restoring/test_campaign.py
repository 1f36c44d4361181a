"""Whole trainings whose disk fails: they say so, leave with exit code 74, and go on from what they had when it is well.

Each is a child of this process, which starts without importing anything again.
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

from harness.inputs import newest, write_text
from harness.jobs import LIMIT_S
from harness.trainings import SETTINGS
from hpcdist.checkpoint.verify import verify
from hpcdist.cli.main import main
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import side_tables, step_metrics

STEPS = 12


def train(out, *keys, before=lambda: None):
    """Begin to train in ``out``, after ``before``, in a child of this process; return its id."""
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


def code_of(child):
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("it did not end")


def said(out):
    return out.with_suffix(".log").read_text()


def losses(out):
    return step_metrics.read(out / "metrics.h5").steps["loss"].tolist()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The data, and the losses of a run to which nothing happens."""
    place = tmp_path_factory.mktemp("calm")
    text = f"data.path={write_text(place / 'text.txt', np.random.default_rng(7))}"
    assert code_of(train(place / "run", text)) == 0, said(place / "run")
    return text, losses(place / "run")


def failing(call, number, after=0):
    """Let ``os.<call>`` fail for what concerns the checkpoint of step 4, when it has been called ``after`` times."""
    true, left = getattr(os, call), [after]

    def called(target, *arguments, **more):
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if "/checkpoints/step-4" in path:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return true(target, *arguments, **more)

    setattr(os, call, called)


def check_it_goes_on(out, expected, *keys):
    """What the failure left loads, and the run ends with the losses of one that met none."""
    found = newest(out)
    assert found is not None and 1 <= int(found.name.removeprefix("step-")) < STEPS and not verify(found).damage
    assert code_of(train(out, *keys)) == 0, said(out)
    assert f"resumed from {found}" in said(out)
    assert losses(out) == expected and len(expected) == STEPS


@pytest.mark.full
def test_an_exceeded_quota(calm, tmp_path):
    (text, expected), out = calm, tmp_path / "run"
    beside = "checkpoint.asynchronous=true"
    ended = code_of(train(out, text, beside, before=lambda: failing("pwrite", errno.EDQUOT, 10)))
    assert ended == 74, said(out)
    assert re.search(r"StorageError: the checkpoint was not saved: .*cannot be written: Disk quota exceeded", said(out))
    assert "Traceback" not in said(out)
    check_it_goes_on(out, expected, text, beside)


def mount(*arguments):
    """Mount something, where this process may; whether it is."""
    return not subprocess.call(["mount", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.full
def test_a_file_system_that_becomes_read_only(calm, tmp_path):
    (text, expected), out = calm, tmp_path / "run"
    checkpoints = out / "checkpoints"
    if os.geteuid() == 0 and mount("--bind", tmp_path, tmp_path):
        subprocess.check_call(["umount", "-l", tmp_path])
        child = train(out, text, "chaos.step_s=0.02")
        limit = time.monotonic() + LIMIT_S
        while not (checkpoints / "step-3").exists() and time.monotonic() < limit:
            time.sleep(0.002)
        try:
            assert mount("--bind", checkpoints, checkpoints)
            while not mount("-o", "remount,bind,ro", checkpoints):  # a file is open for writing just now
                assert time.monotonic() < limit
            ended = code_of(child)
        finally:
            subprocess.check_call(["umount", "-l", checkpoints])
    else:
        ended = code_of(train(out, text, before=lambda: failing("mkdir", errno.EROFS)))
    assert ended == 74, said(out)
    assert re.search(r"StorageError: the checkpoint was not saved: .*: Read-only file system", said(out))
    check_it_goes_on(out, expected, text)


@pytest.mark.full
def test_kills_and_a_full_disk_happen_once_each_and_change_no_bit(calm, tmp_path):
    (text, expected), out = calm, tmp_path / "run"
    keys = text, "chaos.kill=['0@3:update', '0@7:save']", "chaos.disk=['0@5:full']", "checkpoint.incremental=true"
    assert code_of(train(out, *keys)) == -signal.SIGKILL and "rank 0 is killed in the update of step 3" in said(out)
    assert code_of(train(out, *keys)) == 74 and "cannot be written: No space left on device" in said(out)
    assert not list((out / "checkpoints").glob("step-5*")), "it has its space back"
    assert code_of(train(out, *keys)) == -signal.SIGKILL and "rank 0 is killed in the save after step 7" in said(out)
    assert (out / "checkpoints" / "step-7.tmp").exists()
    check_it_goes_on(out, expected, *keys)


def test_a_silent_fault_is_told_and_cured(calm, tmp_path):
    (text, expected), out = calm, tmp_path / "run"
    keys = text, "chaos.corrupt=['0@5']", "run.recompute_every_steps=5", "run.suspicious_factor=50"
    assert code_of(train(out, *keys)) == 0, said(out)
    assert losses(out) == expected
    assert f"step 5: a silent fault: rank 0 on {socket.gethostname()} computed other bits" in said(out)
    with files.open_read(out / "metrics.h5") as file:
        rows = side_tables.RECOMPUTED.read(file)
    assert {name: rows[name].tolist() for name in ("step", "suspicious", "same", "rank")} == {
        "step": [5, 10],
        "suspicious": [0, 0],
        "same": [0, 1],
        "rank": [0, -1],
    }
