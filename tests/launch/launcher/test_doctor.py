"""`hpcdist doctor` on the ranks of a launcher, and as a command that starts two ranks itself."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from harness import jobs
from hpcdist.comm.launch import mpirun

EXPECTED = {"world", "thread level", "placement", "MPI library", "launcher match"}


def report_of(output):
    report = next(json.loads(line) for line in output.splitlines() if line.startswith('{"ok"'))
    return {check["name"]: check for check in report["checks"]}


def test_rank_0_reports_for_all_ranks_of_a_launcher(mpiexec):
    done = mpiexec(2, ["-P", "-m", "hpcdist", "doctor", "--json"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('{"ok"') == 1
    checks = report_of(done.stdout)
    assert set(checks) >= EXPECTED
    assert checks["world"]["found"].startswith("2 ranks on 1 node")
    assert "rank 0:" in checks["placement"]["found"] and "rank 1:" in checks["placement"]["found"]


def run_separate_rank(rank, *options):
    """Run a rank of three that finds itself alone, as under the mpirun of another MPI."""
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": rank}
    return jobs.run([sys.executable, "-P", "-m", "hpcdist", "doctor", "--json", *options], env=environment)


@pytest.mark.usefixtures("mpi")
def test_separate_worlds_of_one_rank_are_reported_as_failure():
    done = run_separate_rank("1")
    assert done.returncode == 1
    world = report_of(done.stdout)["world"]
    assert world["status"] == "FAIL"
    assert "announced 3 ranks" in world["found"] and "a world of 1" in world["found"]


def test_launch_option_starts_two_ranks(mpi):
    line = [sys.executable, "-P", "-m", "hpcdist", "doctor", "--launch", "--json"]
    done = jobs.run(line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report_of(done.stdout)["world"]["found"].startswith("2 ranks on 1 node")


RUN = [sys.executable, "-P", "-m", "hpcdist", "run", "-n", "2", "doctor"]


@pytest.mark.usefixtures("mpi")
def test_report_has_no_colours_in_a_pipe():
    done = jobs.run(RUN)
    assert done.returncode == 0 and "OK" in done.stdout and "\33" not in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(("no_colour", "coloured"), [("", True), ("1", False)])
def test_report_has_colours_on_a_terminal(mpi, no_colour, coloured):
    """Ranks of Open MPI see a terminal, ranks of other launchers a pipe."""
    coloured = coloured and mpi.vendor == mpirun.OPEN_MPI
    ours, theirs = pty.openpty()
    environment = jobs.clean_environment() | {"NO_COLOR": no_colour}
    with subprocess.Popen(RUN, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 65536):
                shown += chunk
    os.close(ours)
    assert process.returncode == 0 and b"OK" in shown and (b"\33[32m" in shown) == coloured


@pytest.mark.usefixtures("mpi")
def test_job_of_separate_worlds_is_reported_once():
    first, second = run_separate_rank("0", "--job"), run_separate_rank("1", "--job")
    assert (first.returncode, second.returncode, second.stdout) == (1, 1, "")
    world = report_of(first.stdout)["world"]
    assert world["status"] == "FAIL" and "a world of 1" in world["found"] and "hpcdist run" in world["cure"]


def test_doctor_of_a_job_checks_all_its_ranks(mpiexec, tmp_path):
    done = mpiexec(
        2, ["-P", "-m", "hpcdist", "doctor", "--job", "--json", "--device", "cpu", "--out", "run"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('{"ok"') == 1
    checks = report_of(done.stdout)
    assert not [check for check in checks.values() if check["status"] == "FAIL"]
    assert "2 ranks on 1 node (2 on each)" in checks["scheduler"]["found"]
    assert "inside a node" in checks["messages"]["found"]
    assert "seen by 1 node" in checks["run directory"]["found"]
    assert list((tmp_path / "run").iterdir()) == []


# Told in place of the launcher's variables, which the MPI library reads as well.
MISNUMBERED = """
import dataclasses
from hpcdist.comm.launch import environment
said = environment.launch_environment()
environment.launch_environment = lambda: dataclasses.replace(said, local_rank=1 + said.rank)
from hpcdist.cli.main import main
main(["doctor", "--job", "--json", "--device", "cpu"])
"""


def test_wrong_local_ranks_are_reported_for_all_ranks(launch):
    ended = launch(2, MISNUMBERED)
    assert ended.code == 1, ended.output
    check = report_of(ended.stdout)["local ranks"]
    assert check["status"] == "FAIL" and "numbers the 2 ranks of the node 1 2" in check["found"], ended.output
    assert "Traceback" not in ended.stderr


SILENT = """
import functools, time
from hpcdist.comm.doctor import gather
from hpcdist.comm.launch import environment
gather.StageDeadline = functools.partial(gather.StageDeadline, limit_s=0.5)
if environment.launch_environment().rank == 1:
    gather.greet = lambda *_: time.sleep(60)
from hpcdist.cli.main import main
main(["doctor", "--job", "--device", "cpu"])
"""


def test_rank_that_does_not_answer_ends_the_job_and_is_named(launch):
    ended = launch(2, SILENT)
    assert ended.code == 1, ended.output
    assert "messages inside the node with rank 1 did not end within 0.5 s" in ended.stderr, ended.output
