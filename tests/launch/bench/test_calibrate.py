"""`hpcdist plan calibrate` on real ranks: the file it writes is a cluster that plans can be made of."""

import json
import sys

import pytest

from harness import jobs
from hpcdist.planner.cluster import toml_file

pytestmark = pytest.mark.full

HPCDIST = [sys.executable, "-P", "-m", "hpcdist"]
MODEL = ["--layers", "2", "--hidden", "64", "--heads", "1", "--vocabulary", "64", "--context", "32", "--batch", "4"]


@pytest.mark.matrix
def test_two_ranks_calibrate_and_a_plan_takes_the_file(tmp_path, mpi):
    path = tmp_path / "here.toml"
    line = [*HPCDIST, "run", "-n", "2", "plan", "calibrate", "-o", str(path), "--seconds", "0.2", "--max-bytes", "64K"]
    done = jobs.run(line)
    assert done.returncode == 0, done.stderr
    assert "unseen sizes" in done.stdout
    found = toml_file.read(str(path))
    assert found.name == "here"
    assert found.node.devices >= 2
    assert {fit.operation for fit in found.fits} == {"message", "allreduce", "reduce_scatter", "all_gather"}
    assert "1 host" in found.calibrated
    asked = ["plan", "--cluster", str(path), *MODEL, "--data", "2", "--precision", "float32", "--json"]
    done = jobs.run([*HPCDIST, *asked])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text("mine")
    done = jobs.run([*HPCDIST, "plan", "--calibrate", "-o", str(path)])
    assert done.returncode == 74
    assert path.read_text() == "mine"
