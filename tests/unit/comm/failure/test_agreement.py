"""Common failures: ranks that fail alike agree, a rank that fails alone notices, and one rank reports."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs
from harness.jobs import call_command
from hpcdist.cli import main
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.rank_failures import all_agree
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError


@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_with_equal_errors_agree(size):
    def body(comm):
        first = all_agree(comm, "DataError: there is no such file")
        comm.barrier()  # other messages still work
        return first and all_agree(comm, "another")

    assert run_threads(size, body) == [True] * size


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_one_different_error_prevents_agreement(odd):
    assert run_threads(4, lambda comm: all_agree(comm, "odd" if comm.rank == odd else "even")) == [False] * 4


@pytest.mark.parametrize("absent", [0, 2])
def test_absent_rank_ends_the_vote_after_patience(absent):
    """The other ranks are notified or run out of patience. The absent rank is still busy with other work."""

    def body(comm):
        if comm.rank == absent:
            comm.recv(np.zeros(1), (absent + 1) % comm.size, 5)  # from a rank that has given up asking
            return None
        answer = all_agree(comm, "alone", patience_s=0.05)
        if comm.rank == (absent + 1) % comm.size:
            comm.send(np.ones(1), absent, 5)
        return answer

    expected = [None if rank == absent else False for rank in range(3)]
    assert run_threads(3, body) == expected


PROGRAM = """
import os, sys
from hpcdist.comm.failure import failfast
from hpcdist.errors import DataError

def abort(code):
    print("abort", code, flush=True)
    os._exit(code)

def main():
    {statement}

rank, agree = int(sys.argv[1]), sys.argv[2] == "yes"
failfast.install(abort, rank)
failfast.set_agreement(lambda text, *_: print("asked", text) or agree, lambda: print("withdrawn", flush=True))
failfast.guarded(main)
"""
SCRIPT = PROGRAM.replace("failfast.guarded(main)", "main()")  # a user's script: failfast does not catch its error
EARLY = "\n".join(line for line in SCRIPT.splitlines() if "set_agreement" not in line)  # before the job has begun


def run(rank, agree, error="DataError('no data')", program=PROGRAM, **environment):
    return run_statement(rank, agree, f"raise {error}", program, **environment)


def run_statement(rank, agree, statement, program, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HPCDIST_")}
    kept["PYTHONPATH"] = str(Path(hpcdist.__file__).parents[1])
    done = jobs.run(
        [sys.executable, "-c", program.format(statement=statement), str(rank), agree], env=kept | environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", [PROGRAM, SCRIPT], ids=["command", "script"])
def test_only_rank_0_reports_a_common_failure(program):
    code, out, errors = run(0, "yes", program=program)
    assert code == 78 and out == "asked DataError: no data\nwithdrawn\n"
    assert "[rank 0] every rank failed alike: exit code 78" in errors and errors.count("no data") == 1
    code, out, errors = run(3, "yes", program=program)
    assert (code, out, errors) == (78, "asked DataError: no data\nwithdrawn\n", "")


@pytest.mark.parametrize("program", [PROGRAM, SCRIPT], ids=["command", "script"])
def test_rank_that_fails_alone_reports_and_aborts(program):
    code, out, errors = run(3, "no", program=program)
    assert code == 78 and out == "asked DataError: no data\nabort 78\n"
    assert "[rank 3] rank 3 failed: exit code 78" in errors and "no data" in errors


def test_exit_of_a_single_rank_aborts_the_job():
    code, out, errors = run_statement(3, "no", "sys.exit(4)", SCRIPT)
    assert code == 4 and out == "asked exit code 4\nabort 4\n"
    assert "[rank 3] rank 3 ended with exit code 4 while others go on" in errors and "SystemExit: 4" in errors


@pytest.mark.parametrize(("agree", "statement", "expected"), [
    ("yes", "sys.exit(4)", (4, "asked exit code 4\n")),
    ("yes", "sys.exit((1, 2))", (1, "asked exit code 1\n")),
    ("no", "sys.exit(75)", (75, "")),  # all have agreed to stop, and one may still save
    ("no", "sys.exit()", (0, "")),
    ("no", "__import__('threading').Thread(target=sys.exit).start()", (0, "")),
])  # fmt: skip
def test_common_or_successful_exits_do_not_abort(agree, statement, expected):
    code, out, errors = run_statement(3, agree, statement, SCRIPT)
    assert (code, out) == expected and "rank 3" not in errors


def test_caught_exit_does_not_abort():
    program = SCRIPT.replace(
        "\nmain()", "\ntry:\n    main()\nexcept SystemExit as left:\n    print(left.code, repr(left))"
    )
    assert run_statement(3, "no", "sys.exit(4)", program) == (0, "4 SystemExit(4)\n", "")


def test_error_inside_the_vote_keeps_the_original_error():
    program = PROGRAM.replace('print("asked", text) or agree', "1 / 0").format(statement="raise DataError('no data')")
    done = jobs.python(program, "1", "yes")
    assert done.returncode == 78 and "no data" in done.stderr and "abort 78" in done.stdout


def test_failure_shown_by_the_launcher_is_not_printed(tmp_path):
    _, _, errors = run(0, "yes", HPCDIST_FAILURE_DIR=str(tmp_path))
    assert errors == "" and "no data" in (tmp_path / "rank-0.txt").read_text()
    _, _, errors = run(0, "yes", HPCDIST_FAILURE_DIR=str(tmp_path / "of another host"))
    assert "no data" in errors, "the launcher will not see it"


@pytest.mark.parametrize(("rank", "waited"), [("0", ""), ("2", f"{failfast.GIVE_WAY_S}\n")])
def test_script_failure_before_start_is_reported_by_rank_0_first(rank, waited, tmp_path):
    launched = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": rank, "HPCDIST_FAILURE_DIR": str(tmp_path)}
    program = EARLY.replace("def main():", "failfast.time.sleep = lambda s: s >= 1 and print(s)\ndef main():")
    code, out, errors = run(int(rank), "no", program=program, **launched)
    assert (code, out, errors) == (78, f"{waited}abort 78\n", ""), "the launcher shows it"
    assert "DataError: no data" in (tmp_path / f"rank-{rank}.txt").read_text()
    code, _, errors = run(int(rank), "no", "RuntimeError('a bug')", program, **launched)
    assert code == 1 and not errors and "a bug" in (tmp_path / f"rank-{rank}.txt").read_text()


@pytest.mark.parametrize(("rank", "waits"), [(None, []), ("0", []), ("2", [failfast.GIVE_WAY_S])])
def test_command_failure_before_start_is_reported_by_rank_0_first(rank, waits, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(main.time, "sleep", slept.append)
    for name in [name for name in os.environ if name.startswith(("OMPI_COMM_WORLD", "PMI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    code, _, err = call_command(capsys, "train", "/does/not/exist.toml")
    assert code == StorageError.exit_code and slept == waits and "exist.toml" in err


def test_exception_of_all_ranks_is_printed_once():
    code, out, errors = run(0, "yes", error="ValueError('bug')")
    assert code == 1 and out.endswith("withdrawn\n") and errors.count("ValueError: bug") == 1
    assert run(3, "yes", error="ValueError('bug')")[2] == ""


def test_traceback_left_for_the_launcher_is_not_printed(tmp_path):
    code, _, errors = run(3, "no", error="ValueError('bug')", HPCDIST_FAILURE_DIR=str(tmp_path))
    assert code == 1 and errors == "" and "ValueError: bug" in (tmp_path / "rank-3.txt").read_text()


def test_rank_exits_with_its_code_if_the_vote_hangs():
    """A dead or hung peer can block the messages themselves."""
    short = "".join(f"failfast.{name}_S = 0.05\n" for name in ("PRECEDENCE", "GIVE_WAY", "READ", "DRAIN", "ABORT"))
    program = SCRIPT.replace('print("asked", text) or agree', "__import__('threading').Event().wait()")
    program = program.replace("failfast.set_agreement", f"{short}failfast.set_agreement")
    assert "Event" in program
    code, out, _ = run(1, "no", error="ValueError('a bug')", program=program)
    assert (code, out) == (1, "")
