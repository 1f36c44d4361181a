"""`hpcdist plan calibrate` on real ranks: it writes a cluster file that plans accept."""

import json
import sys

import pytest

from harness import jobs
from hpcdist.planner.cluster import toml_file

pytestmark = pytest.mark.full

HPCDIST = [sys.executable, "-P", "-m", "hpcdist"]
MODEL = ["--layers", "2", "--hidden", "64", "--heads", "1", "--vocabulary", "64", "--context", "32", "--batch", "4"]


@pytest.mark.matrix
def test_calibration_on_two_ranks_writes_a_usable_cluster_file(tmp_path, mpi):
    path = tmp_path / "here.toml"
    line = [*HPCDIST, "run", "-n", "2", "plan", "calibrate", "-o", str(path), "--seconds", "0.2", "--max-bytes", "64K"]
    done = jobs.run(line)
    assert done.returncode == 0, done.stderr
    assert "at other sizes" in done.stdout
    result = toml_file.read(str(path))
    assert result.name == "here"
    assert result.node.devices >= 2
    assert {fit.operation for fit in result.fits} == {"message", "allreduce", "reduce_scatter", "all_gather"}
    assert "1 host" in result.calibrated
    asked = ["plan", "--cluster", str(path), *MODEL, "--data", "2", "--precision", "float32", "--json"]
    done = jobs.run([*HPCDIST, *asked])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_calibrate_does_not_overwrite_an_existing_file(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text("mine")
    done = jobs.run([*HPCDIST, "plan", "--calibrate", "-o", str(path)])
    assert done.returncode == 74
    assert path.read_text() == "mine"
