"""Records of a program's MPI world."""

import os
import time
from types import SimpleNamespace

import pytest

from hpcdist.comm.mpi import world


def test_old_records_of_failed_programs_are_removed(tmp_path):
    old = time.time() - world.RECORDS_KEPT_S - 60
    for name, written in ((f"{world.RECORDS}old", old), (f"{world.RECORDS}new", time.time()), ("other", old)):
        (tmp_path / name / "recorder").mkdir(parents=True)
        os.utime(tmp_path / name, (written, written))
    world._remove_old_records(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{world.RECORDS}new", "other"}


def test_error_at_start_of_training_leaves_no_open_operation(monkeypatch):
    calls = []
    events = SimpleNamespace(begin=lambda *_: calls.append("begin"), end=lambda _: calls.append("end"))
    comm = SimpleNamespace(events=events, name="world")
    session = SimpleNamespace(comm=comm, stop_recording=lambda _: calls.append("stop"))
    monkeypatch.setattr(world, "_worlds", [SimpleNamespace(session=session)])
    with pytest.raises(ZeroDivisionError):
        world.end_records(lambda: 1 // 0)
    assert calls == ["begin", "end"]
    assert world.end_records(lambda: 3) == 3 and calls[2:] == ["begin", "end", "stop"]
