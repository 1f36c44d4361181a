"""`hpcdist run`: exit codes come back, signals reach the ranks, and nothing outlives it. Shown failing, and killing."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hpcdist.cli import main
from hpcdist.cli import run as run_command
from hpcdist.comm import mpirun, supervisor
from hpcdist.errors import USAGE
from hpcdist.hdf5 import files

MARK = "HPCDIST_TEST_MARK"
LIMIT_S = 60.0

# A launcher command for ranks that need no MPI: rank.py with one word that says how it behaves.
DRIVER = """
import os, sys
from pathlib import Path
from hpcdist.comm import mpirun, supervisor
behaviour, folder, grace = sys.argv[1:]
found = mpirun.find()
settings = {**mpirun.settings(found), supervisor.LAUNCH_DIR: folder}
line = mpirun.command(found, 2, [sys.executable, str(Path(folder) / "rank.py"), behaviour], settings)
sys.exit(supervisor.supervise(line, {**os.environ, **settings}, Path(folder), float(grace)))
"""

RANK = """
import os, signal, subprocess, sys, time
behaviour, folder = sys.argv[1], os.environ["HPCDIST_LAUNCH_DIR"]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])

def leave(code):
    return lambda number, frame: os._exit(code)

if behaviour == "late":
    time.sleep(1.0 + rank)  # a signal would end it now
if behaviour in ("polite", "late"):
    signal.signal(signal.SIGINT, leave(130))
    signal.signal(signal.SIGTERM, leave(75))
    signal.signal(signal.SIGUSR1, leave(75))
    signal.signal(signal.SIGUSR2, lambda number, frame: print(f"rank {rank} dumps its stacks", flush=True))
if behaviour in ("deaf", "unannounced"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
if behaviour == "parent":
    subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sys.exit(0)
if behaviour == "three":
    sys.exit(3 if rank == 1 else 0)
if behaviour != "unannounced":
    open(f"{folder}/pid-{rank}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{folder}/pid-{rank}.tmp", f"{folder}/pid-{rank}")
open(f"{folder}/ready-{rank}", "w").close()
while True:
    time.sleep(0.05)
"""


def survivors(mark: str) -> list[str]:
    """The processes, of anybody's children, that carry the mark of this test in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
            except OSError:
                continue
    return found


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {limit_s:g} s"
        time.sleep(0.05)


class Job:
    """A process that carries a mark, with its output in a file."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.mark, self.folder, self.path = uuid.uuid4().hex, folder, folder / "output"
        with self.path.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
                cwd=folder,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """The exit code, after which nothing of the job may be left."""
        code = self.process.wait(limit_s)
        assert survivors(self.mark) == [], self.output
        return code

    @property
    def output(self) -> str:
        return self.path.read_text()

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        for line in survivors(self.mark):
            os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path, mpi: mpirun.Launcher) -> Iterator[Callable[..., Job]]:
    """``start(behaviour, grace=60)``: two ranks under a supervisor; returns when both are there."""
    (tmp_path / "rank.py").write_text(RANK)
    jobs: list[Job] = []

    def begin(behaviour: str, grace: float = 60.0, wait: bool = True) -> Job:
        jobs.append(Job(["-P", "-c", DRIVER, behaviour, str(tmp_path), str(grace)], tmp_path))
        if wait:
            until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "ranks")
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


def test_the_ranks_exit_code_comes_back(start):
    assert start("three", wait=False).end() == 3


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGUSR1, 75)],
    ids=["INT", "TERM", "HUP", "USR1"],
)
def test_a_signal_reaches_the_ranks_and_their_code_comes_back(start, number, code):
    job = start("polite")
    job.send(number)
    assert job.end() == code, job.output


def test_usr2_reaches_the_ranks_and_they_go_on(start):
    job = start("polite")
    job.send(signal.SIGUSR2)
    until(lambda: job.output.count("dumps its stacks") == 2, "answer of both ranks")
    assert job.process.poll() is None
    job.send(signal.SIGTERM)
    assert job.end() == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_deaf_ranks_are_killed_after_the_grace(start, number, code):
    job = start("deaf", grace=0.5)
    job.send(number)
    assert job.end() == code
    assert "did not stop within 0.5 s" in job.output


def test_a_second_interrupt_kills_at_once(start):
    job = start("deaf", grace=1000.0)
    job.send(signal.SIGINT)
    until(lambda: "again kills them" in job.output, "message")
    job.send(signal.SIGINT)
    assert job.end() == 130


def test_an_interrupt_before_the_ranks_have_started_ends_the_launcher(start):
    job = start("unannounced", grace=1000.0)
    job.send(signal.SIGINT)
    assert job.end() == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_a_signal_waits_for_ranks_that_are_still_starting(start, number):
    job = start("late", wait=False)
    words = [os.fsencode(word) + b"\0" for word in (sys.executable, str(job.folder / "rank.py"), "late")]
    rank = repr(b"".join(words))
    until(lambda: sum(line.partition(" ")[2] == rank for line in survivors(job.mark)) == 2, "processes of ranks")
    job.send(number)
    assert job.end() == 75


def test_a_rank_is_known_by_its_environment_wherever_it_was_started(tmp_path):
    """Under Slurm it may be no descendant, and a process id that another host announced may be a stranger here."""
    supervision = object.__new__(supervisor._Supervision)
    supervision._launch_dir = tmp_path
    rank = subprocess.Popen(["sleep", "60"], env={supervisor.LAUNCH_DIR: str(tmp_path)})
    stranger = subprocess.Popen(["sleep", "60"], env={supervisor.LAUNCH_DIR: f"{tmp_path}-other"})
    try:
        until(lambda: Path(f"/proc/{stranger.pid}/cmdline").read_bytes().startswith(b"sleep"), "a started process")
        assert supervision._is_ours(rank.pid) and not supervision._is_ours(stranger.pid)
    finally:
        for process in (rank, stranger):
            process.kill()
            process.wait()
    assert not supervision._is_ours(rank.pid), "it has ended"


def test_what_a_rank_left_behind_is_killed(start):
    assert start("parent", wait=False).end() == 0


def test_killing_the_supervisor_ends_the_ranks(start):
    job = start("sleeps")
    job.send(signal.SIGKILL)
    job.process.wait()
    until(lambda: not survivors(job.mark), "end of the ranks", 20.0)


TRAIN = ["-P", "-m", "hpcdist", "run", "-n", "2", "train", "--out", "run"]
SMALL = ["model.layers=1", "model.hidden=32", "model.heads=2", "data.context=32", "data.path=text.txt"]


@pytest.fixture
def training(tmp_path: Path, mpi: mpirun.Launcher) -> Iterator[Callable[..., Job]]:
    """``training(steps)``: `hpcdist run -n 2 train` on a small text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 500)
    jobs: list[Job] = []

    def begin(*settings: str) -> Job:
        chosen = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
        jobs.append(Job([*TRAIN, *chosen], tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


def test_ctrl_c_under_hpcdist_run(training, tmp_path):
    job = training("run.steps=1000000", "run.log_every_s=0.1")
    until(lambda: job.output.count("\nstep ") > 2, "steps", 120.0)
    job.send(signal.SIGINT)
    assert job.end() == 130, job.output
    assert "Traceback" not in job.output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")), "no checkpoint of the stop"
    with files.open_read(tmp_path / "run" / "metrics.h5") as metrics:
        losses = metrics["steps/loss"][...]
    assert len(losses) > 2 and np.isfinite(losses).all()


def test_a_killed_rank_ends_the_job(training):
    job = training("run.steps=1000000", "run.log_every_s=0.1")
    until(lambda: job.output.count("\nstep ") > 1, "steps", 120.0)
    ranks = [line for line in survivors(job.mark) if f"{sys.executable}\\x00-P\\x00-m\\x00hpcdist\\x00train" in line]
    direct = [line for line in ranks if "mpirun" not in line and "prterun" not in line and "hydra" not in line]
    assert len(direct) == 2
    os.kill(int(direct[0].split()[0]), signal.SIGKILL)
    assert job.end() not in (0, 75, 130)


def test_a_bad_recipe_comes_back_as_78(training):
    job = training("model.layrs=3")
    assert job.end() == 78, job.output
    assert "model.layrs" in job.output and "model.layers" in job.output


def test_the_first_failure_is_shown_last(tmp_path, capsys):
    (tmp_path / "rank-0.txt").write_text("[rank 0] an echo")
    (tmp_path / "rank-2.txt").write_text("[rank 2] the cause")
    os.utime(tmp_path / "rank-2.txt", ns=(1, 1))
    run_command._show_first_failure(tmp_path)
    shown = capsys.readouterr().err
    assert "the first failure (of 2 that failed)" in shown
    assert "[rank 2] the cause" in shown and "echo" not in shown


def test_options_of_mpirun_that_end_in_a_quotation(capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["run", "-n", "2", "--mpi-args", "-x 'A", "train"])
    said = capsys.readouterr().err
    assert leaving.value.code == USAGE
    assert "--mpi-args" in said and "No closing quotation" in said and "Traceback" not in said


@pytest.mark.parametrize("name", ["bench", "submit", "run", "nonsense"])
def test_what_starts_ranks_itself_is_no_command_for_ranks(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["run", "-n", "2", name])
    known = capsys.readouterr().err.partition("known: ")[2].strip().split(", ")
    assert leaving.value.code == USAGE
    assert "train" in known and name not in known
