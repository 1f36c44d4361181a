"""`hpcdist doctor` as ranks of a launcher, and starting two ranks by itself."""

import json
import os
import subprocess
import sys

import pytest

EXPECTED = {"world", "thread level", "placement", "MPI library", "launcher match"}


def report_of(output: str) -> dict[str, dict[str, str]]:
    report = next(json.loads(line) for line in output.splitlines() if line.startswith('{"ok"'))
    return {check["name"]: check for check in report["checks"]}


def test_under_a_launcher_rank_0_reports_for_all(mpiexec):
    done = mpiexec(2, ["-P", "-m", "hpcdist", "doctor", "--json"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('{"ok"') == 1
    checks = report_of(done.stdout)
    assert set(checks) >= EXPECTED
    assert checks["world"]["found"].startswith("2 ranks on 1 node")
    assert "rank 0:" in checks["placement"]["found"] and "rank 1:" in checks["placement"]["found"]


@pytest.mark.usefixtures("mpi")
def test_a_world_that_fell_apart_is_told_with_its_cure():
    """A rank of three that finds itself alone, as under the mpirun of another MPI."""
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}
    line = [sys.executable, "-P", "-m", "hpcdist", "doctor", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    world = report_of(done.stdout)["world"]
    assert world["status"] == "FAIL"
    assert "announced 3 ranks" in world["found"] and "a world of 1" in world["found"]


@pytest.mark.timeout(150)
def test_launch_starts_two_ranks(mpi):
    line = [sys.executable, "-P", "-m", "hpcdist", "doctor", "--launch", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report_of(done.stdout)["world"]["found"].startswith("2 ranks on 1 node")
