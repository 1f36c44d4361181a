"""Disks that fail in the middle, and directories that are not what they should be: the checkpoints before stay."""

import errno
import itertools
import json
import os
import resource
import sys

import numpy as np
import pytest

from harness.inputs import newest
from harness.marks import cases
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.saving.background import BackgroundCheckpoints
from hpcdist.checkpoint.saving.two_phase import SavePlan, save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError

ELEMENTS = 50_000


def state_of(step):
    return Piece.whole("parameters", "w", np.full(ELEMENTS, float(step)))


def save_step(root, step, **options):
    return save(root / "checkpoints", step, [state_of(step)], {"step": step}, solo(), **options)


def loads(path):
    into = state_of(-1)
    step = restore(path, [into])["step"]
    assert (into.array == step).all()
    return step


def rewrite(path, **changed):
    body = json.loads((path / "manifest.json").read_text()) | changed
    body = {key: value for key, value in body.items() if value is not None and key != "digest"}
    (path / "manifest.json").write_text(manifest.seal(body))


def test_a_manifest_of_the_first_version_is_read(tmp_path):
    path = save_step(tmp_path, 3)
    rewrite(path, version=1, about=None, index=None)
    assert "about" not in json.loads((path / "manifest.json").read_text())
    assert newest(tmp_path) == path and loads(path) == 3


def test_a_newer_schema_says_update(tmp_path):
    _, path = save_step(tmp_path, 3), save_step(tmp_path, 4)
    rewrite(path, version=3)
    with pytest.raises(StorageError, match="version 3, known here are 1 to 2; update hpcdist"):
        loads(path)
    with pytest.raises(StorageError, match="update hpcdist"):
        newest(tmp_path)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(StorageError, match=r"manifest.json is missing"):
        loads(tmp_path / "step-1")
    (tmp_path / "step-2").write_text("a file")
    with pytest.raises(StorageError, match="Not a directory"):
        loads(tmp_path / "step-2")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "manifest.json").write_text('{"format": "pt"}')
    with pytest.raises(StorageError, match="no manifest|not a manifest"):
        loads(tmp_path / "step-3")
    copied = save_step(tmp_path, 7)
    copied.rename(copied.with_name("step-9"))
    assert newest(tmp_path) is None, "of another step than its name says"


@cases(
    "call, way",
    *(("fsync", "waiting"), ("rename", "waiting"), ("ftruncate", "waiting")),
    *(("fsync", "beside"), ("pwrite", "beside"), ("replace", "beside"), ("open", "beside")),
)
@pytest.mark.full_except("pwrite-beside")
def test_any_call_may_fail(tmp_path, monkeypatch, call, way):
    for count in itertools.count(1):
        run = tmp_path / str(count)
        save_step(run, 1, keep=1)
        true, seen = getattr(os, call), itertools.count(1)

        def failing(*args, true=true, seen=seen, count=count, **kwargs):
            if next(seen) == count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return true(*args, **kwargs)

        monkeypatch.setattr(os, call, failing)
        failure = attempt(run, way)
        monkeypatch.undo()
        assert not failure or "Input/output error" in failure
        found = newest(run)
        assert found is not None and loads(found) in ((1, 2) if failure else (2,))
        save_step(run, 3, keep=1)
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-3"], "what failed is cleared up"
        if next(seen) <= count:
            break
    assert count > 1, "it was never called"


def attempt(run, way):
    """Save step 2; return why that failed."""
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


def in_child(body):
    """Run ``body`` in a child, whose limits are its own; return its exit code."""
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
def test_a_quota_in_the_middle_of_a_shard(tmp_path, limit):
    before = save_step(tmp_path, 1)

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="File too large"):
            save_step(tmp_path, 2)
        beside = BackgroundCheckpoints(solo())
        beside.begin(SavePlan(tmp_path / "checkpoints", 3, 1, {}, {}, 1), [state_of(3)], "rank")
        with pytest.raises(StorageError, match="File too large"):
            beside.finish()

    assert in_child(limited) == 0
    assert newest(tmp_path) == before and loads(before) == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]


def test_a_file_system_that_became_read_only(tmp_path, monkeypatch):
    before = save_step(tmp_path, 1)

    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refused)

    def body(comm):
        with pytest.raises(StorageError, match="checkpoints cannot be written: Read-only file system"):
            save(tmp_path / "checkpoints", 2, [state_of(2)] if comm.rank == 0 else [], {}, comm)

    run_threads(3, body)
    assert newest(tmp_path) == before
