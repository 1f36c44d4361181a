"""Stop requests: flags set by signals and a file, and the common decision of all ranks."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.batch.ledger import STOP_FILE
from hpcdist.comm.launch import garbage
from hpcdist.training.run.stop_requests import EXIT_CODES, StopReason, StopRequests, agreed_reason

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers that a test installs."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@cases(
    "number, stop_request",
    (signal.SIGTERM, StopReason.REQUEUE),
    (signal.SIGHUP, StopReason.REQUEUE),
    (signal.SIGUSR1, StopReason.REQUEUE),
    (signal.SIGINT, StopReason.INTERRUPT),
)
def test_signal_only_sets_a_stop_request(number, stop_request):
    stop_requests = StopRequests(None)
    stop_requests.listen()
    assert agreed_reason(stop_requests.current()) is None
    os.kill(os.getpid(), number)
    assert agreed_reason(stop_requests.current()) is stop_request


def test_second_interrupt_raises_immediately():
    StopRequests(None).listen()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_stop_file_requests_a_requeue(tmp_path):
    stop_requests = StopRequests(tmp_path / STOP_FILE)
    assert agreed_reason(stop_requests.current()) is None
    (tmp_path / STOP_FILE).touch()
    assert agreed_reason(stop_requests.current()) is StopReason.REQUEUE


def test_request_of_one_rank_counts_and_interrupts_have_priority():
    assert agreed_reason(np.array([0.0, 0.0])) is None
    assert agreed_reason(np.array([1.0, 0.0])) is StopReason.REQUEUE
    assert agreed_reason(np.array([3.0, 1.0])) is StopReason.INTERRUPT
    assert EXIT_CODES == {StopReason.REQUEUE: 75, StopReason.INTERRUPT: 130}


@pytest.mark.parametrize("text", ["", "two", "-1", "9" * 400])
def test_invalid_growth_request_is_ignored(tmp_path, text):
    stop_requests = StopRequests()
    grow_file = tmp_path / "grow"
    stop_requests.grow_file = grow_file
    assert stop_requests.ranks() == 0
    grow_file.write_text(text)
    assert stop_requests.ranks() == 0
    grow_file.write_text("2\n")
    assert stop_requests.ranks() == 2


# A rank in a call that ends by no signal, as in a collective of MPI: no handler of Python's runs. Its launcher sends.
BLOCKED = """
import ctypes, os, signal, subprocess, sys
from hpcdist.batch.ledger import STOP_FILE
from hpcdist.training.run.stop_requests import StopRequests
wishes = StopRequests()
wishes.listen()
wishes.starts(lambda: print("let go"), lambda: 1 / 0)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
libc.pthread_mutex_lock(mutex)
subprocess.Popen(["sh", "-c", "sleep 0.2; kill -$0 $1", sys.argv[1], str(os.getpid())])
libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("name", "code"), [("TERM", 75), ("HUP", 75), ("USR1", 75), ("INT", 130)])
@pytest.mark.full_except("USR1-75")
def test_signal_ends_a_process_with_nothing_to_save(name, code, tmp_path):
    ended = jobs.run([sys.executable, "-c", BLOCKED, name], env={**os.environ, "HPCDIST_LAUNCH_DIR": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (code, "let go\n"), ended
    assert f"SIG{name}: nothing to save, exit code {code}" in ended.stderr
    assert (tmp_path / "ended").read_text() == str(code)
    assert len(list(tmp_path.glob("at-once-*"))) == 1, "the supervisor has to know"


def test_signal_is_a_request_once_there_is_something_to_save(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_LAUNCH_DIR", str(tmp_path))
    stop_requests = StopRequests()
    stop_requests.listen()
    stop_requests.starts()
    assert [path.name for path in tmp_path.iterdir()] == [f"at-once-{os.getpid()}"]
    stop_requests.begun()
    assert not list(tmp_path.iterdir())
    os.kill(os.getpid(), signal.SIGTERM)
    assert agreed_reason(stop_requests.current()) is StopReason.REQUEUE
    stop_requests.ignore()


# The command line has not been imported yet; what it would do is given.
EARLY = """
import atexit, gc, os, signal, sys, time, types
sys.argv[1:] = [sys.argv[1]]
command = types.ModuleType("hpcdist.cli.main")
command.main = {command}
sys.modules["hpcdist.cli.main"] = command
from hpcdist.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("command", "code"), [("run", 75), ("train", 75), ("plan", -signal.SIGTERM)], ids=["run", "train", "plan"]
)
def test_signal_during_the_import_ends_the_process(command, code):
    source = EARLY.format(command="lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))")
    ended = subprocess.run([sys.executable, "-c", source, command], timeout=LIMIT_S, check=False)
    assert ended.returncode == code


@pytest.mark.parametrize(("command", "seldom"), [("train", 3), ("plan", 4)], ids=["train", "plan"])
def test_garbage_collection_is_rare_during_the_start(command, seldom):
    source = EARLY.format(command="lambda: sys.exit(3 if gc.get_threshold()[0] > 10_000 else 4)")
    ended = subprocess.run([sys.executable, "-c", source, command], timeout=LIMIT_S, check=False)
    assert ended.returncode == seldom


def test_steps_use_default_garbage_collection_unless_configured():
    try:
        garbage.collect_seldom()
        garbage.collect_as_usual()
        assert gc.get_threshold() == garbage.USUAL
        gc.set_threshold(50_000, 5, 5)
        garbage.collect_as_usual()
        assert gc.get_threshold() == (50_000, 5, 5)
    finally:
        gc.set_threshold(*garbage.USUAL)


def test_signal_at_the_end_keeps_the_exit_code():
    source = EARLY.format(command="lambda: (atexit.register(os.kill, os.getpid(), signal.SIGTERM), sys.exit(3))")
    ended = subprocess.run([sys.executable, "-c", source, "run"], timeout=LIMIT_S, check=False)
    assert ended.returncode == 3
