"""World of a program: what its records leave behind."""

import os
import time

from hpcdist.comm.mpi import world


def test_old_records_of_failed_programs_are_removed(tmp_path):
    old = time.time() - world.RECORDS_KEPT_S - 60
    for name, written in ((f"{world.RECORDS}old", old), (f"{world.RECORDS}new", time.time()), ("other", old)):
        (tmp_path / name / "recorder").mkdir(parents=True)
        os.utime(tmp_path / name, (written, written))
    world._remove_old_records(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{world.RECORDS}new", "other"}
