"""Fail-fast handling, with one process per case: the output and the exit code."""

import os
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.arrays import backend
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.exits import error_lines, exit_code
from hpcdist.comm.record import flight_recorder
from hpcdist.errors import CommunicationError, ConfigurationError, StorageError

PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
from hpcdist.comm.failure import failfast
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.errors import ConfigurationError, CommunicationError

def abort(code):
    print("abort", code, flush=True)
    os._exit(code)

failfast.install(abort, 2)
"""


def run(source, *arguments, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HPCDIST_")}
    return jobs.python(
        PREAMBLE + source, *arguments, env={**kept, "PYTHONPATH": str(Path(hpcdist.__file__).parents[1]), **environment}
    )


@cases(
    "source, code, text",
    ("1 / 0", 1, "ZeroDivisionError"),
    ("raise ConfigurationError('bad')", 78, "ConfigurationError: bad"),
    ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ("failfast.guarded(lambda: 1 / 0)", 1, "ZeroDivisionError"),
    ("failfast.guarded(lambda: sys.exit(3))", 3, "SystemExit: 3"),
    ("failfast.guarded(lambda: sys.exit(-1))", 255, "SystemExit: -1"),
    ("failfast.guarded(lambda: sys.exit('give up'))", 1, "give up"),
    ("failfast.guarded(lambda: 5)", 5, "SystemExit: 5"),
    ("threading.Thread(target=lambda: 1 / 0, name='w').start(); time.sleep(60)", 1, "rank 2, thread w failed"),
    ("threading.Thread(target=sys.exit, args=(9,)).start(); time.sleep(60)", 9, "SystemExit: 9"),
    ("raise CommunicationError('echo')", 1, "CommunicationError: echo"),
)
@pytest.mark.full_except("raise KeyboardInterrupt-130-KeyboardInterrupt")
def test_failure_aborts_with_its_exit_code(source, code, text):
    ended = run(source)
    assert (ended.returncode, ended.stdout) == (code, f"abort {code}\n"), ended
    assert text in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line]
    assert all(line.startswith("[rank 2]") for line in lines), ended.stderr
    traces = sum("Traceback (most recent call last)" in line for line in lines)
    assert traces == (0 if "ConfigurationError" in source else 1), "an error for the user has no traceback"


@cases(
    "source, code",
    ("failfast.guarded(lambda: None)", 0),
    ("failfast.guarded(lambda: sys.exit(0))", 0),
    ("failfast.guarded(lambda: sys.exit(None))", 0),
    ("failfast.guarded(lambda: failfast.agreed_exit(75))", 75),
    ("thread = threading.Thread(target=sys.exit); thread.start(); thread.join()", 0),
    ("failfast.uninstall()\nfailfast.guarded(lambda: sys.exit(4))", 4),
    ("failfast.uninstall()\nsys.exit(failfast.guarded(lambda: 6))", 6),
)
def test_normal_exits_do_not_abort(source, code):
    ended = run(source)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


OUTLIVED = "failfast.set_survivable(lambda error: isinstance(error, CommunicationError))\n"


def test_survivable_death_in_a_thread_is_silent():
    source = """
def work(error):
    raise error
thread = threading.Thread(target=work, args=(CommunicationError("died"),))
thread.start()
thread.join()
print("on it goes", flush=True)
threading.Thread(target=work, args=(ValueError("own"),)).start()
time.sleep(60)
"""
    ended = run(OUTLIVED + source)
    assert (ended.returncode, ended.stdout) == (1, "on it goes\nabort 1\n")
    assert "ValueError: own" in ended.stderr and "died" not in ended.stderr


@pytest.mark.full
def test_survivable_death_in_main_thread_still_aborts(tmp_path):
    ended = run(OUTLIVED + "raise CommunicationError('died')", HPCDIST_LAUNCH_DIR=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "abort 1\n") and "CommunicationError: died" in ended.stderr
    assert (tmp_path / "ended").read_text() == "1", "the launcher may not end by the abort"
    left = run(OUTLIVED + "failfast.agreed_exit(0)", HPCDIST_LAUNCH_DIR=str(tmp_path))
    assert left.returncode == 0 and [path.name for path in tmp_path.iterdir()] == ["ended"]
    assert (tmp_path / "ended").read_text() == "1", "a failure comes before the end of the others"


def test_agreed_exit_of_survivable_job_is_recorded_and_immediate(tmp_path):
    source = "import atexit; atexit.register(print, 'finalised')\nfailfast.guarded(lambda: failfast.agreed_exit(75))"
    ended = run(OUTLIVED + source, HPCDIST_LAUNCH_DIR=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, "", "")
    assert (tmp_path / "ended").read_text() == "75"


@pytest.mark.full
def test_exceeded_recovery_limit_aborts_the_job():
    ended = run("failfast.set_recovery_limit(60)\nfailfast.set_recovery_limit(0.05)\ntime.sleep(60)")
    assert (ended.returncode, ended.stdout) == (1, "abort 1\n")
    assert "DeadlineError: a rank died, and the others did not continue within 0.05 s" in ended.stderr
    first, *others = (f"failfast.set_recovery_limit({limit})\n" for limit in ("0.2", "None", "float('inf')"))
    gone_on = run(f"{first}{others[0]}time.sleep(0.5)\n{others[1]}")
    assert (gone_on.returncode, gone_on.stdout, gone_on.stderr) == (0, "", "")


def test_renumbered_rank_fails_under_its_new_number():
    ended = run("failfast.set_rank(1)\n1 / 0")
    assert ended.returncode == 1 and "[rank 1] rank 1 failed" in ended.stderr


def test_exceptions_without_install_are_unchanged():
    ended = run("failfast.uninstall()\nfailfast.guarded(lambda: 1 / 0)")
    assert ended.returncode == 1 and ended.stderr.startswith("Traceback") and "[rank" not in ended.stderr


@pytest.mark.parametrize("how", ["raise OSError('no')", "return", "time.sleep(600)"])
@pytest.mark.full_except("return")
def test_process_ends_even_if_abort_returns_or_hangs(how):
    ended = run(f"def broken(code):\n    {how}\nfailfast.install(broken, 2)\nraise ConfigurationError('bad')")
    assert ended.returncode == 78 and "ConfigurationError: bad" in ended.stderr


def test_only_the_first_failing_thread_reports():
    source = """
start = threading.Barrier(8)
def work(n):
    start.wait()
    raise ValueError(n)
for n in range(8):
    threading.Thread(target=work, args=(n,)).start()
time.sleep(60)
"""
    ended = run(source)
    assert ended.returncode == 1 and ended.stderr.count("ValueError: ") == 1


def test_failure_is_copied_to_launcher_and_recorder(tmp_path):
    source = """
recorder = Recorder(Path(sys.argv[1]), 2, 4)
failfast.attach(recorder)
raise ConfigurationError("bad\\nsecond line")
"""
    path = tmp_path / "rank-00002.rec"
    ended = run(source, str(path), HPCDIST_FAILURE_DIR=str(tmp_path))
    assert "rank 2 failed: exit code 78" in (tmp_path / "rank-2.txt").read_text() and not ended.stderr
    assert (
        flight_recorder.read(path).notes["raised"].text
        == "ConfigurationError: bad second line at <string>:16 (<module>)"
    )


LAUNCHED = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}


def test_slow_launcher_reads_the_failure_before_the_abort(tmp_path):
    """A launcher drops unread pipe data when it is told to abort."""
    abort = """
def abort(code):
    import fcntl, struct, termios
    unread = fcntl.ioctl(2, termios.FIONREAD, b"0000")
    print("unread", struct.unpack("i", unread)[0], flush=True)
    os._exit(code)
failfast.install(abort, 2)
failfast.READ_S = 60.0
1 / 0
"""
    line = [sys.executable, "-c", PREAMBLE + abort]
    environment = {**os.environ, **LAUNCHED, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        while not list(tmp_path.iterdir()) and process.poll() is None:  # the file is written before stderr
            time.sleep(0.01)
        time.sleep(1.0)
        output = process.stderr.read()
        assert process.stdout.read() == "unread 0\n"
    assert process.returncode == 1
    (copy,) = tmp_path.iterdir()
    assert copy.name.startswith("hpcdist-rank-2-failed-") and f"a copy is in {copy}" in output
    assert "ZeroDivisionError" in output and output.startswith(copy.read_text())


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_failure_with_unwritable_stderr_is_in_file_named_by_abort(stderr, tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    source = """
failfast.READ_S = 0.1
failfast.install(abort, 2, lambda text: print(text, flush=True))
raise FileNotFoundError(os.fsdecode(b"data-\\xff"))
"""
    environment = {**os.environ, **LAUNCHED, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", PREAMBLE + ("os.close(2)" if stderr == "closed" else "") + source]
    ended = subprocess.run(
        line, env=environment, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=LIMIT_S, check=False
    )
    for end in (reader, writer):
        os.close(end)
    (copy,) = tmp_path.iterdir()
    assert "FileNotFoundError: data-\\udcff" in copy.read_text()
    title, aborted = ended.stdout.splitlines()
    assert title.startswith("see ") and len(title) <= failfast.TITLE_BYTES
    assert str(copy).endswith(title.removeprefix("see ").removeprefix("..."))
    assert (ended.returncode, aborted) == (1, "abort 1")


def test_failure_file_is_next_to_the_flight_record(tmp_path):
    source = "failfast.attach(Recorder(Path(sys.argv[1]), 2, 4))\n1 / 0"
    (tmp_path / "rank-00002.failed").write_text("of an earlier start")
    ended = run(source, str(tmp_path / "rank-00002.rec"), **LAUNCHED)
    assert "ZeroDivisionError" in (tmp_path / "rank-00002.failed").read_text()
    assert f"a copy is in {tmp_path / 'rank-00002.failed'}" in ended.stderr


def test_missing_failure_directory_does_not_hide_the_failure(tmp_path):
    ended = run("1 / 0", HPCDIST_FAILURE_DIR=str(tmp_path / "gone"))
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr and "no copy for the launcher" in ended.stderr


def test_closed_stderr_does_not_prevent_abort():
    ended = run("sys.stderr.close()\n1 / 0")
    assert (ended.returncode, ended.stdout) == (1, "abort 1\n")


def test_normal_end_is_noted_in_flight_record(tmp_path):
    path = tmp_path / "rank-00002.rec"
    assert run("failfast.attach(Recorder(Path(sys.argv[1]), 2, 4))", str(path)).returncode == 0
    assert flight_recorder.read(path).notes["finished"].text == "end of the program"


def test_sigusr2_prints_all_stacks_and_continues():
    source = """
def here_it_sleeps():
    time.sleep(600)
threading.Thread(target=here_it_sleeps, daemon=True).start()
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGUSR2)
print("on it goes")
"""
    ended = run(source)
    assert ended.returncode == 0 and ended.stdout == "on it goes\n"
    assert "here_it_sleeps" in ended.stderr and "Current thread" in ended.stderr


@cases(
    "error, code",
    (ValueError(), 1),
    (StorageError(), 74),
    (ConfigurationError(), 78),
    (CommunicationError(), 1),
    (KeyboardInterrupt(), 130),
    (SystemExit(), 0),
    (SystemExit(7), 7),
    (SystemExit(True), 1),
    (SystemExit("text"), 1),
    (SystemExit(259), 3),
)
def test_exit_code_of_each_exception(error, code):
    assert exit_code(error) == code


def test_allocation_beyond_address_space_prints_one_line():
    with pytest.raises(MemoryError) as caught:
        backend.zeros((1 << 40, 1 << 40), np.dtype(np.float32))
    (line,) = error_lines(caught.value)
    assert line.startswith(
        "out of memory: cannot allocate an array of shape (1099511627776, 1099511627776) and type float32: 4.84e+24"
    )
    assert "hpcdist plan" in line and exit_code(caught.value) == 1


def test_traceback_frames_are_released_before_exit():
    """A virtual HDF5 dataset in a traceback would crash libhdf5 at the end of the process."""

    class Dataset:
        pass

    references = []

    def read():
        dataset = Dataset()
        references.append(weakref.ref(dataset))
        raise OSError

    def fail():
        try:
            read()
        except OSError as error:
            raise StorageError("damaged") from error

    with pytest.raises(StorageError) as caught:
        fail()
    failfast._release_frames(caught.value)
    assert references[0]() is None


def test_traceback_frames_are_released_before_abort():
    """MPICH ends an aborted job of one rank by exit()."""
    source = """
class Dataset:
    def __del__(self):
        print("released", flush=True)

def read():
    dataset = Dataset()
    raise ConfigurationError("bad")

read()
"""
    assert run(source).stdout == "released\nabort 78\n"
