"""Disks that fail during a save, and invalid directories: earlier checkpoints stay."""

import errno
import itertools
import json
import os
import resource
import sys

import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint
from harness.marks import cases
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import SavePlan, save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError

ELEMENTS = 50_000


def state_of(step):
    return Piece.whole("parameters", "w", np.full(ELEMENTS, float(step)))


def save_step(root, step, **options):
    return save(root / "checkpoints", step, [state_of(step)], {"step": step}, solo(), **options)


def restored_step(path):
    into = state_of(-1)
    step = restore(path, [into])["step"]
    assert (into.array == step).all()
    return step


def rewrite(path, **changed):
    body = json.loads((path / "manifest.json").read_text()) | changed
    body = {key: value for key, value in body.items() if value is not None and key != "digest"}
    (path / "manifest.json").write_text(manifest.seal(body))


def test_manifest_of_version_1_is_read(tmp_path):
    path = save_step(tmp_path, 3)
    rewrite(path, version=1, about=None, index=None)
    assert "about" not in json.loads((path / "manifest.json").read_text())
    assert newest_intact_checkpoint(tmp_path) == path and restored_step(path) == 3


def test_newer_schema_error_says_update(tmp_path):
    _, path = save_step(tmp_path, 3), save_step(tmp_path, 4)
    rewrite(path, version=3)
    with pytest.raises(StorageError, match="version 3, expected 1 to 2; update hpcdist"):
        restored_step(path)
    with pytest.raises(StorageError, match="update hpcdist"):
        newest_intact_checkpoint(tmp_path)


def test_invalid_checkpoints_are_rejected(tmp_path):
    with pytest.raises(StorageError, match=r"manifest.json is missing"):
        restored_step(tmp_path / "step-1")
    (tmp_path / "step-2").write_text("a file")
    with pytest.raises(StorageError, match="Not a directory"):
        restored_step(tmp_path / "step-2")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "manifest.json").write_text('{"format": "pt"}')
    with pytest.raises(StorageError, match="no manifest|not a manifest"):
        restored_step(tmp_path / "step-3")
    copied = save_step(tmp_path, 7)
    copied.rename(copied.with_name("step-9"))
    assert newest_intact_checkpoint(tmp_path) is None, "the step in the manifest differs from the directory name"


@cases(
    "call, way",
    *(("fsync", "waiting"), ("rename", "waiting"), ("ftruncate", "waiting")),
    *(("fsync", "beside"), ("pwrite", "beside"), ("replace", "beside"), ("open", "beside")),
)
@pytest.mark.full_except("pwrite-beside")
def test_failure_of_any_system_call_keeps_checkpoints(tmp_path, monkeypatch, call, way):
    for count in itertools.count(1):
        run = tmp_path / str(count)
        save_step(run, 1, keep=1)
        true, seen = getattr(os, call), itertools.count(1)

        def fail_at_count(*args, true=true, seen=seen, count=count, **kwargs):
            if next(seen) == count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return true(*args, **kwargs)

        monkeypatch.setattr(os, call, fail_at_count)
        failure = save_failure(run, way)
        monkeypatch.undo()
        assert not failure or "Input/output error" in failure
        result = newest_intact_checkpoint(run)
        assert result is not None and restored_step(result) in ((1, 2) if failure else (2,))
        save_step(run, 3, keep=1)
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-3"], "files of the failed save are left"
        if next(seen) <= count:
            break
    assert count > 1, "the call was never made"


def save_failure(run, way):
    """Save step 2. Return the error message, or an empty string."""
    try:
        if way == "waiting":
            save_step(run, 2, keep=1)
        else:
            beside = BackgroundCheckpoints(solo())
            beside.begin(SavePlan(run / "checkpoints", 2, 1, {"step": 2}, {}, 1), [state_of(2)], "rank")
            beside.finish()
    except StorageError as error:
        return str(error)
    return ""


def run_in_child(body):
    """Run ``body`` in a child process, so that its limits apply only there. Return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        body()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child must not return into pytest
        sys.excepthook(*sys.exc_info())
        os._exit(1)


@pytest.mark.parametrize("limit", [1000, 5000, 100_000, 300_000])
def test_quota_reached_within_a_shard_keeps_checkpoints(tmp_path, limit):
    before = save_step(tmp_path, 1)

    def save_with_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="File too large"):
            save_step(tmp_path, 2)
        beside = BackgroundCheckpoints(solo())
        beside.begin(SavePlan(tmp_path / "checkpoints", 3, 1, {}, {}, 1), [state_of(3)], "rank")
        with pytest.raises(StorageError, match="File too large"):
            beside.finish()

    assert run_in_child(save_with_limit) == 0
    assert newest_intact_checkpoint(tmp_path) == before and restored_step(before) == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]


def test_save_on_a_read_only_file_system_is_reported(tmp_path, monkeypatch):
    before = save_step(tmp_path, 1)

    def raise_read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", raise_read_only)

    def body(comm):
        with pytest.raises(StorageError, match="checkpoints cannot be written: Read-only file system"):
            save(tmp_path / "checkpoints", 2, [state_of(2)] if comm.rank == 0 else [], {}, comm)

    run_threads(3, body)
    assert newest_intact_checkpoint(tmp_path) == before
