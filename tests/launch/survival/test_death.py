"""Ranks that die, stop, or take another path: the job ends with the reason, and the records name the culprit."""

import re
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hpcdist
from harness import jobs
from harness.jobs import clean_environment
from hpcdist.comm.launch.environment import start_ticks
from hpcdist.comm.record.flight_recorder import read
from hpcdist.telemetry.hang import analyse, load

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path

import numpy as np

from hpcdist.comm.failure import failfast
from hpcdist.comm.start import start
from hpcdist.errors import ConfigurationError, HpcdistError


def main():
    session = start()
    comm = session.comm
    session.record(Path(sys.argv[1]), float(sys.argv[2]))
    comm.allreduce(np.ones(8, np.float32))
    body(comm, session)
    session.leave(0)


def body(comm, session):
{body}

failfast.guarded(main)
"""

Die = Callable[..., object]


@pytest.fixture
def run_ranks(launch, tmp_path):
    """Run ``body`` on several ranks and return how the job ended. The run directory is tmp_path/run."""

    def run(n, body, deadline_s=60, **extra):
        source = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body).strip("\n"), "    "))
        return launch(n, source, str(tmp_path / "run"), str(deadline_s), **extra)

    return run


def line_of(tmp_path, text):
    """Return "program.py:<line>" for the program line that contains ``text``."""
    lines = (tmp_path / "program.py").read_text().splitlines()
    return f"program.py:{next(number for number, line in enumerate(lines, 1) if text in line)} "


def cause(tmp_path):
    report = analyse(load(tmp_path / "run"))
    assert report.findings, report
    print(report)
    return report.findings[0]


def test_agreed_end_is_not_reported_as_death(run_ranks, tmp_path):
    ended = run_ranks(2, "comm.barrier()")
    assert ended.code == 0, ended.output
    report = analyse(load(tmp_path / "run"))
    assert report.findings == ()
    assert [rank.state for rank in report.ranks] == ["finished", "finished"]


def test_agreed_exit_code_passes_without_abort(run_ranks, tmp_path):
    ended = run_ranks(2, "session.leave(75)")
    assert ended.code == 75, ended.output
    assert "MPI_ABORT" not in ended.stderr and "Traceback" not in ended.stderr
    assert analyse(load(tmp_path / "run")).findings == ()


def test_exception_on_one_rank_ends_the_job(run_ranks, tmp_path):
    failures = tmp_path / "failures"
    failures.mkdir()
    ended = run_ranks(
        3,
        """
        class Broken(HpcdistError):
            exit_code = 41

        if comm.rank == 1:
            raise Broken("no such thing")
        comm.barrier()
        """,
        HPCDIST_FAILURE_DIR=str(failures),
    )
    assert ended.code == 41, ended.output
    assert "Traceback" not in ended.stderr, "hpcdist run prints the text that is left for it"
    copy = (failures / "rank-1.txt").read_text()
    assert "[rank 1] Traceback (most recent call last):" in copy and copy.count("Traceback") == 1
    assert "Broken: no such thing" in copy and [p.name for p in failures.iterdir()] == ["rank-1.txt"]
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("raised", (1,))
    assert line_of(tmp_path, "raise Broken").strip() in result.text


def test_user_error_prints_its_message_without_a_traceback(run_ranks):
    ended = run_ranks(2, "raise ConfigurationError('run.steps is negative')")
    assert ended.code == 78, ended.output
    assert "ConfigurationError: run.steps is negative" in ended.stderr and "Traceback" not in ended.stderr


def test_exception_in_a_thread_ends_the_job(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        def work():
            raise ZeroDivisionError("in the writer")

        if comm.rank == 1:
            threading.Thread(target=work, name="writer").start()
        comm.barrier()
        comm.recv(np.empty(1), 1 - comm.rank)
        """,
    )
    assert ended.code == 1, ended.output
    assert "rank 1, thread writer failed" in ended.stderr and "ZeroDivisionError: in the writer" in ended.stderr
    assert (cause(tmp_path).kind, cause(tmp_path).ranks) == ("raised", (1,))


def test_system_exit_on_one_rank_ends_the_job(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        if comm.rank == 0:
            sys.exit(3)
        comm.barrier()
        """,
    )
    assert ended.code == 3, ended.output
    assert "rank 0 failed: exit code 3" in ended.stderr
    assert (cause(tmp_path).kind, cause(tmp_path).ranks) == ("raised", (0,))


SCRIPT = """
import sys
import numpy as np, hpcdist

with hpcdist.session() as world:
    if "all" in sys.argv or world.rank == 1:
        sys.exit(3)
    hpcdist.allreduce(np.ones(3))
"""
ALONE = "rank 1 ended with exit code 3 while others go on"


def test_sys_exit_of_a_script_on_one_rank_ends_the_job(launch):
    ended = launch(2, SCRIPT)
    assert ended.code == 3, ended.output
    assert ALONE in ended.stderr and "program.py" in ended.stderr


def test_sys_exit_of_a_script_on_all_ranks_is_the_exit_code(launch, tmp_path):
    ended = launch(2, SCRIPT, "all")
    assert ended.code == 3, ended.output
    assert "MPI_ABORT" not in ended.output and "others go on" not in ended.output
    run = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "--", sys.executable, tmp_path / "program.py"]
    environment = clean_environment() | {"PYTHONPATH": str(Path(hpcdist.__file__).parents[1])}
    for arguments in ["all"], []:
        done = jobs.run([*run, *arguments], env=environment)
        assert done.returncode == 3 and (ALONE in done.stderr) is not bool(arguments), done.stderr


def test_forked_child_ends_without_mpi_and_exit_hooks(launch, tmp_path):
    program = """
import os, sys
import numpy as np
import hpcdist

world, run = hpcdist.init(), os.environ["HPCDIST_RUN_DIR"]
hpcdist.checkpoint.save(run, {"step": 1})
codes = []
for error in (None, SystemExit(3), ValueError("of a child")):
    child = os.fork()
    if not child:
        if error:
            raise error
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert os.path.exists(run + "/lock")  # the lock of rank 0, which waits in the allreduce below until all ranks come
codes.append(int(hpcdist.allreduce(np.ones(1))[0]))
print(*codes, flush=True)
"""
    ended = launch(2, program, HPCDIST_RUN_DIR=str(tmp_path / "run"))
    assert ended.code == 0, ended.output
    assert re.findall("0 3 1 2", ended.stdout) == ["0 3 1 2"] * 2, ended.output
    assert ended.stderr.count("ValueError: of a child") == 2, ended.output
    assert [rank.state for rank in analyse(load(tmp_path / "run")).ranks] == ["finished", "finished"]


def test_killed_rank_is_named(run_ranks, tmp_path):
    ended = run_ranks(
        3,
        """
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(np.ones(16, np.float32))
        """,
    )
    assert ended.code != 0, ended.output
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("killed", (1,))
    assert result.event is not None and result.event.op == "allreduce" and result.event.count == 16
    assert line_of(tmp_path, "np.ones(16") in result.event.site


@pytest.mark.full
def test_rank_that_skipped_a_collective_is_named(run_ranks, tmp_path):
    ended = run_ranks(
        3,
        """
        if comm.rank != 1:
            comm.allreduce(np.ones(1 << 20, np.float32))
        comm.barrier()
        """,
        deadline_s=1.5,
    )
    assert ended.code != 0, ended.output
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("skipped", (1,))
    assert result.event is not None and result.event.op == "allreduce"
    assert line_of(tmp_path, "1 << 20") in result.event.site
    assert line_of(tmp_path, "    comm.barrier()").strip() in result.text


@pytest.mark.full
def test_deadlock_of_skipped_messages_names_both_lines(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        from hpcdist.collectives import ring_allreduce
        if comm.rank != 1:
            ring_allreduce(comm, np.ones(1 << 18, np.float32))
        comm.barrier()
        """,
        deadline_s=1.5,
    )
    assert ended.code == 1, ended.output
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("deadlock", (0, 1))
    assert line_of(tmp_path, "1 << 18") in result.text and "via hpcdist/collectives/algorithms/ring.py:" in result.text
    assert line_of(tmp_path, "    comm.barrier()") in result.text


@pytest.mark.full
def test_rank_waiting_for_an_absent_rank_reaches_the_deadline(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        if comm.rank == 1:
            time.sleep(600)  # busy elsewhere
        comm.barrier()
        """,
        deadline_s=1.5,
    )
    assert ended.code == 1, ended.output
    assert "rank 0 waited past its deadline" in ended.stderr
    assert "hpcdist hang" in ended.stderr
    recorder = tmp_path / "run" / "recorder"
    assert line_of(tmp_path, "    comm.barrier()").strip() in ended.stderr
    # The rank that did not come has no overdue operation, but its stacks are there: it is where the sleep is.
    line = line_of(tmp_path, "busy elsewhere").strip().split(":")[1]
    assert f'program.py", line {line} in body' in (recorder / "rank-00001.stacks").read_text()
    assert 'program.py", line' in (recorder / "rank-00000.stacks").read_text()
    assert "deadline" in read(recorder / "rank-00000.rec").notes
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("absent", (1,))
    assert result.event is not None and result.event.op == "barrier"


@pytest.mark.full
def test_rank_that_finished_early_is_named(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        if comm.rank == 1:
            sys.exit(0)
        comm.barrier()
        """,
        deadline_s=1.5,
    )
    assert ended.code == 1, ended.output
    assert (cause(tmp_path).kind, cause(tmp_path).ranks) == ("skipped", (1,))
    assert line_of(tmp_path, "    comm.barrier()") in cause(tmp_path).event.site


@pytest.mark.full
def test_stopped_rank_is_named(run_ranks, tmp_path):
    ended = run_ranks(
        2,
        """
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.barrier()
        """,
        deadline_s=2,
    )
    assert ended.code == 1, ended.output
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("stopped", (1,))
    assert line_of(tmp_path, "    comm.barrier()") in result.event.site
    pid = read(tmp_path / "run" / "recorder" / "rank-00001.rec").pid
    for _ in range(300):  # no process is left, not even asleep
        if not start_ticks(pid):
            break
        time.sleep(0.1)
    assert not start_ticks(pid)


def test_rank_with_a_mismatched_size_is_named(run_ranks, tmp_path):
    ended = run_ranks(
        3,
        """
        comm.allreduce(np.ones((1 << 20) + (comm.rank == 2), np.float32))
        comm.barrier()
        """,
        deadline_s=2,
    )
    print(ended.output)  # the MPI library may notice, hang, or take it as it is: the records show it in any case
    result = cause(tmp_path)
    assert (result.kind, result.ranks) == ("mismatch", (2,))
    assert result.event is not None and result.event.count == (1 << 20) + 1
    assert line_of(tmp_path, "comm.rank == 2") in result.event.site


def test_sigusr2_dumps_all_stacks_and_the_job_continues(run_ranks):
    ended = run_ranks(
        2,
        """
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGUSR2)
        comm.barrier()
        """,
    )
    assert ended.code == 0, ended.output
    assert ended.stderr.count("Current thread") == 2 and "line" in ended.stderr
    labels = re.findall(r'File "<rank (\d) on (\S+), process \d+>"', ended.stderr)
    assert sorted(labels) == [(rank, socket.gethostname()) for rank in "01"], ended.stderr


LATE = """
import time
from hpcdist.comm.launch import environment
from hpcdist.comm import start

start.STARTING_S = 2
if environment.launch_environment().rank == 1:
    time.sleep(600)
start.start()
"""


def test_rank_that_never_starts_mpi_ends_the_job(launch):
    ended = launch(2, LATE)
    print(ended.output)
    assert ended.code != 0 and "import_mpi" in ended.stderr, "the stacks say where it waits"
