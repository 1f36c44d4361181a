"""`hpcdist run`: exit codes are returned, signals reach the ranks, and no process outlives the command."""

import itertools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from harness.jobs import LIMIT_S, call_command, run, until
from harness.marks import cases
from hpcdist.checkpoint import lock
from hpcdist.cli import main
from hpcdist.cli import run as run_command
from hpcdist.comm.launch import exit_file, mpirun, standard_streams, supervisor
from hpcdist.errors import USAGE, MissingCapabilityError
from hpcdist.hdf5 import files

MARK = "HPCDIST_TEST_MARK"

# A launcher command for ranks that need no MPI: rank.py with one word that says how it behaves.
DRIVER = """
import os, sys
from pathlib import Path
from hpcdist.comm.launch import mpirun, supervisor
behaviour, folder, grace = sys.argv[1:]
found = mpirun.find()
settings = {**mpirun.settings(found), supervisor.LAUNCH_DIR: folder}
survives = behaviour == "said" or behaviour.startswith("mortal")
tells = behaviour in ("mute", "talks")
options = mpirun.ulfm_options(found) if behaviour.startswith("mortal") else []
line = mpirun.command(found, 2, [sys.executable, str(Path(folder) / "rank.py"), behaviour], settings, options)
environment = {**os.environ, **settings, **mpirun.session(found, Path(folder))}
with supervisor.signals_held() as mask:
    outcome = supervisor.Supervision(line, environment, Path(folder), float(grace), mask, survives, tells).run()
sys.exit(outcome.code)
"""

RANK = """
import os, signal, subprocess, sys, time
from hpcdist.comm.launch import exit_file
behaviour, folder = sys.argv[1], os.environ["HPCDIST_LAUNCH_DIR"]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])

def leave(code):
    return lambda number, frame: os._exit(code)

if behaviour == "late" and rank == 1:
    time.sleep(2.0)  # a signal would end it now
if behaviour in ("polite", "late"):
    signal.signal(signal.SIGINT, leave(130))
    signal.signal(signal.SIGTERM, leave(75))
    signal.signal(signal.SIGUSR1, leave(75))
    signal.signal(signal.SIGUSR2, lambda number, frame: print(f"rank {rank} dumps its stacks", flush=True))
if behaviour == "slow":
    def save(number, frame):
        time.sleep(0.5)
        open(f"{folder}/saved-{rank}", "w").close()
        os._exit(130)
    signal.signal(signal.SIGINT, save)
if behaviour in ("deaf", "unannounced", "said"):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
if behaviour == "parent":
    subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sys.exit(0)
if behaviour == "three":
    sys.exit(3 if rank == 1 else 0)
if behaviour == "mortal-all" or (behaviour == "mortal" and rank == 1):
    open(f"{folder}/rank-{rank}.txt", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "mortal":
    time.sleep(1.0)
    exit_file.write_exit_code(0)
    sys.exit(3)  # whatever its own code is
if behaviour == "said":
    exit_file.write_exit_code(75)
if behaviour != "unannounced":
    open(f"{folder}/pid-{rank}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{folder}/pid-{rank}.tmp", f"{folder}/pid-{rank}")
if behaviour in ("mute", "talks"):
    if behaviour == "talks":
        exit_file.write_exit_code(0)
    sys.exit(0)
open(f"{folder}/ready-{rank}", "w").close()
while True:
    time.sleep(0.05)
"""


def survivors(mark):
    """Return the living processes that carry the mark of this test in their environment, whoever started them."""
    results = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    results.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
            except OSError:
                continue
    return results


class Job:
    """A process that carries a mark in its environment and writes its output to a file."""

    def __init__(self, arguments, folder):
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

    def send(self, number):
        self.process.send_signal(number)

    def end(self, limit_s=LIMIT_S):
        """Return the exit code. No process of the job may be left."""
        code = self.process.wait(limit_s)
        assert survivors(self.mark) == [], self.output
        return code

    @property
    def output(self):
        return self.path.read_text()

    def clean_up(self):
        self.process.kill()
        self.process.wait()
        for line in survivors(self.mark):
            os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def start(tmp_path, mpi):
    """``start(behaviour, grace=60)``: start two ranks under a supervisor and return when both run."""
    (tmp_path / "rank.py").write_text(RANK)
    jobs = []

    def begin(behaviour, grace=60.0, wait=True):
        jobs.append(Job(["-P", "-c", DRIVER, behaviour, str(tmp_path), str(grace)], tmp_path))
        if wait:
            until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "ranks")
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


def test_exit_code_of_the_ranks_is_returned(start):
    assert start("three", wait=False).end() == 3


@cases(
    "number, code",
    (signal.SIGINT, 130),
    (signal.SIGTERM, 75),
    (signal.SIGHUP, 75),
    (signal.SIGUSR1, 75),
    ids=["INT", "TERM", "HUP", "USR1"],
)
def test_signal_reaches_the_ranks_and_their_code_is_returned(start, number, code):
    job = start("polite")
    job.send(number)
    assert job.end() == code, job.output


def guard_of(job):
    """Return the process id of the guard, which has the same command line as the supervisor."""
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(job.process.pid)]
    return children(job.process.pid)[words.index(Path(f"/proc/{job.process.pid}/cmdline").read_bytes())]


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@cases("number, code", (signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), ids=["INT", "TERM", "USR1"])
def test_signal_to_the_guard_is_passed_to_the_supervisor(start, number, code):
    job = start("polite")
    os.kill(guard_of(job), number)
    assert job.end() == code, job.output


@pytest.mark.parametrize("first", ["guard", "supervisor"])
def test_signal_to_guard_and_supervisor_counts_once(start, first):
    job = start("slow")
    pids = [guard_of(job), job.process.pid]
    for pid in pids if first == "guard" else pids[::-1]:
        os.kill(pid, signal.SIGINT)
    assert job.end() == 130, job.output
    assert job.output.count("SIGINT: the ranks") == 1 and "interrupted again" not in job.output
    assert len(list(job.folder.glob("saved-*"))) == 2, "the ranks were killed"


def test_usr2_dumps_stacks_of_the_ranks_and_they_continue(start):
    job = start("polite")
    job.send(signal.SIGUSR2)
    until(lambda: job.output.count("dumps its stacks") == 2, "answer of both ranks")
    assert job.process.poll() is None
    job.send(signal.SIGTERM)
    assert job.end() == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_ranks_that_ignore_signals_are_killed_after_the_grace(start, number, code):
    job = start("deaf", grace=0.5)
    job.send(number)
    assert job.end() == code
    assert "did not stop within 0.5 s" in job.output


NOTICE = "prterun detected that one or more processes exited with non-zero status,"


def notice(code):
    line, of = "-" * 74, "thus causing the job to be terminated. The first process to do so was:"
    return f"{line}\n{NOTICE}\n{of}\n\n   Process name: [prterun-host-1@1,1]\n   Exit code:    {code}\n{line}\n"


@pytest.mark.full
def test_requested_stop_prints_no_failure_notice(training):
    job = training("run.steps=1000000", "run.log_every_s=0.1")
    until(lambda: job.output.count("\nstep ") > 2, "steps", limit_s=120.0)
    job.send(signal.SIGTERM)
    assert job.end() == 75, job.output
    assert NOTICE not in job.output and "saved; go on with" in job.output, job.output


ABORT = """--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[3460,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
--------------------------------------------------------------------------
"""
EXITED = """--------------------------------------------------------------------------
prterun has exited due to process rank 1 with PID 0 on node host calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("expected", "printed"), [(75, (130, 1, ABORT)), (1, (75, 130)), (None, (75, 130, 1, ABORT, EXITED))]
)
def test_notices_of_the_launcher_are_held_until_release(capfd, expected, printed):
    texts = {code: notice(code) for code in (75, 130, 1)} | {text: text for text in (ABORT, EXITED)}
    relay = standard_streams.Relay()
    ours = os.dup(relay.stderr)
    relay.begin()
    with os.fdopen(ours, "w") as pipe:
        pipe.write("before\n" + "".join(texts.values()) + texts[75][:-2] + "after\n")
    until(lambda: relay.ended, "end of the pipe")
    assert capfd.readouterr().err == "before\n" + texts[75][:-2] + "after\n"
    relay.release(expected)
    assert capfd.readouterr().err == "".join(texts[each] for each in printed)


def test_split_notice_is_held_back_but_a_line_of_dashes_is_not(capfd, rng, monkeypatch):
    monkeypatch.setattr(standard_streams, "_REST_S", 60.0)
    text, relay = notice(75).encode(), standard_streams.Relay()
    ours = os.dup(relay.stderr)
    relay.begin()
    cuts = [0, 10, *sorted(rng.integers(11, len(text), 3)), len(text)]
    output = b""
    for first, last in itertools.pairwise(cuts):
        os.write(ours, text[first:last])
        time.sleep(0.05)
    until(lambda: relay._held, "the whole notice")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(standard_streams, "_REST_S", 0.1)
    os.write(ours, b"-" * 74 + b"\n")

    def is_shown():
        nonlocal output
        output += capfd.readouterr().err.encode()
        return output == b"-" * 74 + b"\n"

    until(is_shown, "line of dashes")
    os.close(ours)
    until(lambda: relay.ended, "end of the pipe")
    assert [code for _, code, _ in relay._held] == [75]


def test_second_interrupt_kills_the_ranks_immediately(start):
    job = start("deaf", grace=1000.0)
    job.send(signal.SIGINT)
    until(lambda: "again kills them" in job.output, "message")
    job.send(signal.SIGINT)
    assert job.end() == 130


def test_interrupt_before_the_ranks_started_ends_the_launcher(start):
    job = start("unannounced", grace=1000.0)
    job.send(signal.SIGINT)
    assert job.end() == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_signal_waits_for_a_rank_that_is_still_starting(start, number):
    job = start("late", wait=False)
    until(lambda: list(job.folder.glob("ready-0")), "first rank")
    job.send(number)
    assert job.end() == 75


def test_ranks_are_recognised_by_their_environment(tmp_path):
    """Under Slurm a rank may be no descendant, and a process id from another host may be unrelated here."""
    supervision = object.__new__(supervisor.Supervision)
    supervision.launch_dir = tmp_path
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


def test_only_running_ranks_without_a_mark_have_begun(tmp_path, monkeypatch):
    """Ranks with nothing to save leave marks. Only a running rank without a mark may have something to save."""
    supervision = object.__new__(supervisor.Supervision)
    supervision.launch_dir = tmp_path
    running = {10, 11}
    monkeypatch.setattr(supervision, "_is_ours", running.__contains__)
    for pid in running:
        (tmp_path / f"pid-{pid}").write_text(str(pid))
        (tmp_path / f"{exit_file.NOTHING_TO_SAVE}{pid}").touch()
    assert not supervision._has_begun()
    (tmp_path / f"{exit_file.NOTHING_TO_SAVE}10").unlink()
    assert supervision._has_begun()
    running.clear()
    assert not supervision._has_begun()


def test_missing_segment_does_not_prevent_removal_of_others(tmp_path):
    left = Path("/dev/shm") / f"sm_segment.hpcdist-test-{os.getpid()}"
    left.touch()
    try:
        (tmp_path / f"{exit_file.SEGMENTS}1").write_text(f"{left}-gone\n{left}\n")
        exit_file.remove_segments(tmp_path)
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_output_kept_open_by_a_stuck_process_is_not_waited_for(monkeypatch):
    supervision = object.__new__(supervisor.Supervision)
    supervision._watched, supervision._relay = {signal.SIGTERM}, type("Open", (), {"ended": False})()
    monkeypatch.setattr(supervisor, "TEARDOWN_S", 0.2)
    monkeypatch.setattr(supervisor, "descendants", lambda pid: [1])
    begin = time.monotonic()
    with supervisor.signals_held():
        supervision._end_output()
    assert 0.2 <= time.monotonic() - begin < 60 and not supervision._relay.ended


@pytest.mark.full
def test_ranks_that_reported_their_end_are_not_waited_for(start):
    job = start("said", grace=1000.0)
    job.send(signal.SIGTERM)  # comes too late, and must not give them the grace
    assert job.end() == 75
    assert "did not stop" not in job.output


@pytest.mark.parametrize(("behaviour", "code"), [("talks", 0), ("mute", 1)])
def test_launcher_code_0_is_not_trusted_if_ranks_vanished(start, behaviour, code):
    assert start(behaviour, wait=False).end() == code


SHELL = """
import os, sys
from pathlib import Path
from hpcdist.comm.launch import launchers, supervisor
folder, commands, kind, supervisor.STARTING_S = Path(sys.argv[1]), sys.argv[2], launchers.KINDS[sys.argv[3]], 0.0
for setting in sys.argv[4:]:
    name, _, value = setting.partition("=")
    setattr(supervisor, name, float(value))
with supervisor.signals_held() as mask:
    sys.exit(supervisor.Supervision(["sh", "-c", commands], os.environ, folder, 60.0, mask, kind=kind).run().code)
"""


def run_with_shell_launcher(folder, commands, kind, *settings):
    """Return the exit code of a job whose launcher, of ``kind``, is a shell that runs ``commands``."""
    line = [sys.executable, "-P", "-c", SHELL, str(folder), commands, kind, *settings]
    return subprocess.run(line, timeout=LIMIT_S, check=False).returncode


DEAF = "trap '' TERM INT HUP USR1; kill -{number} $PPID; while true; do sleep 0.05; done"


@pytest.mark.parametrize(("number", "code"), [("TERM", 75), ("HUP", 75), ("USR1", 75), ("INT", 130)])
@pytest.mark.full
def test_ranks_with_nothing_to_save_are_not_waited_for(number, code, tmp_path):
    """Such ranks may compile, or hang in the start of MPI, and answer no signal."""
    commands = "cd $HPCDIST_LAUNCH_DIR; echo $$ >pid-0; touch at-once-$$; " + DEAF.format(number=number)
    assert run_with_shell_launcher(tmp_path, commands, "mpirun") == code


def test_job_without_ranks_yet_ends_at_a_signal(tmp_path):
    assert run_with_shell_launcher(tmp_path, DEAF.format(number="USR1"), "mpirun", "STARTING_S=1000") == 75


@pytest.mark.full
def test_ranks_that_begin_after_a_signal_may_save(tmp_path):
    begin = "cd $HPCDIST_LAUNCH_DIR; echo $$ >pid-0; touch at-once-$$; trap : TERM; kill -TERM $PPID; sleep 0.2"
    saves = "; rm at-once-$$; trap 'exit 7' TERM; i=0; while [ $((i += 1)) -lt 60 ]; do sleep 0.05; done; exit 8"
    assert run_with_shell_launcher(tmp_path, begin + saves, "mpirun", "AT_ONCE_S=1") == 8, "it was killed"


@pytest.mark.parametrize("who", ["launcher", "ranks"])
def test_job_stopped_by_sigstop_saves_and_ends(who, tmp_path, capfd):
    stopped = "echo $$ >$HPCDIST_LAUNCH_DIR/pid-0; trap 'exit 75' TERM; kill -STOP $$; sleep 0.1; exit 9"
    (tmp_path / "rank.sh").write_text(stopped)
    commands = stopped if who == "launcher" else f"sh {tmp_path}/rank.sh; exit $?"
    assert run_with_shell_launcher(tmp_path, commands, "mpirun", "LOOK_S=0.1", "STOPPED_S=0.5") == 75
    stderr = capfd.readouterr().err
    assert "stopped processes:" in stderr and "continues them; in 0.5 s the job saves and ends" in stderr
    assert ("(the launcher)" in stderr) == (who == "launcher")


@cases(
    "kind, output, returned, code",
    ("srun", 75, 137, 75),
    ("srun", 78, 143, 78),
    ("mpirun", 75, 137, 137),
    ("mpirun", 1, 0, 1),
    ids=["srun killed the last ranks", "the first failure", "mpirun has killed", "mpirun lost it"],
)
def test_exit_code_comes_from_ranks_or_launcher_by_kind(kind, output, returned, code, tmp_path):
    assert run_with_shell_launcher(tmp_path, f"echo {output} >$HPCDIST_LAUNCH_DIR/ended; exit {returned}", kind) == code


@cases(
    "ranks, code, shown",
    ("echo 75 >ended", 75, False),
    ("echo 130 >ended", 130, False),
    (":", 75, True),
    ("echo 75 >ended; touch rank-1.txt", 75, False),
    ("echo 3 >ended", 3, True),
    ("echo 3 >ended; touch rank-1.txt", 3, False),
    ids=["stop", "Ctrl-C", "no reason", "stop and failure", "exit code without a text", "failure"],
)
def test_the_launcher_notice_is_printed_if_no_rank_reported_a_reason(ranks, code, shown, tmp_path, capfd):
    (tmp_path / "notice").write_text(notice(code))
    commands = f"cd $HPCDIST_LAUNCH_DIR; {ranks}; cat notice >&2; exit {code}"
    assert run_with_shell_launcher(tmp_path, commands, "mpirun") == code
    assert (NOTICE in capfd.readouterr().err) == shown


@pytest.mark.full
def test_launcher_that_hangs_after_its_ranks_is_ended(tmp_path):
    output = "trap 'exit 137' TERM; echo 78 >$HPCDIST_LAUNCH_DIR/ended; while true; do sleep 0.05; done"
    assert run_with_shell_launcher(tmp_path, output, "srun") == 78


@pytest.mark.parametrize(("kind", "code"), [("srun", 0), ("flux", 75)])
def test_exit_hooks_of_ranks_are_waited_for(kind, code, tmp_path):
    hook = f"trap 'exit 143' TERM; echo {code} >$HPCDIST_LAUNCH_DIR/ended; sleep 2.5; touch {tmp_path}/report"
    assert run_with_shell_launcher(tmp_path, f"{hook}; exit {code}", kind, "TEARDOWN_S=0.1") == code
    assert (tmp_path / "report").exists(), "the launcher was ended before"


@pytest.mark.parametrize(("number", "passed"), [("INT", "INT"), ("TERM", "USR1"), ("USR1", "USR1")])
def test_srun_gets_a_signal_that_it_passes_to_the_ranks(number, passed, tmp_path):
    """srun kills the ranks when it gets a SIGTERM."""
    traps = "; ".join(f"trap 'echo {name} >got; exit 7' {name}" for name in ("INT", "TERM", "USR1"))
    commands = f"cd {tmp_path}; {traps}; kill -{number} $PPID; while true; do sleep 0.05; done"
    code = run_with_shell_launcher(tmp_path, commands, "srun")
    assert (tmp_path / "got").read_text() == f"{passed}\n"
    assert code == (130 if number == "INT" else 7)


@pytest.fixture
def ulfm(mpi):
    try:
        mpirun.ulfm_options(mpi)
    except MissingCapabilityError as error:
        pytest.skip(str(error))


def test_exit_code_comes_from_the_surviving_ranks(start, ulfm):
    assert start("mortal", wait=False).end() == 0


def test_job_fails_if_all_ranks_were_killed(start, ulfm):
    job = start("mortal-all", wait=False)
    assert job.end() == 1
    assert "no rank was left" in job.output


def test_announced_pids_are_read_from_any_rank_name(tmp_path):
    supervision = object.__new__(supervisor.Supervision)
    supervision.launch_dir = tmp_path
    for name, pid in {"pid-0": 10, "pid-host.domain-7": 11, "pid-1.tmp": 12, ".pid-2.0123456789abcdef.new": 13}.items():
        (tmp_path / name).write_text(str(pid))
    assert sorted(supervision._announced_pids()) == [10, 11]


def test_signal_between_two_starts_is_not_lost():
    with supervisor.signals_held():
        assert supervisor.pause(0.0) is None
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)  # for ranks, and there are none
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        assert supervisor.pause(60.0) is signal.SIGTERM
        assert supervisor.pause(0.0) is None


@pytest.mark.full
def test_child_processes_of_a_rank_are_killed(start):
    assert start("parent", wait=False).end() == 0


def test_killing_the_supervisor_ends_the_ranks(start):
    job = start("sleeps")
    assert len(survivors(job.mark)) > 2  # the supervisor and two ranks at the least
    job.send(signal.SIGKILL)
    job.process.wait()
    until(lambda: not survivors(job.mark), "end of the ranks")


RUN = ["-P", "-m", "hpcdist", "run", "-n", "2"]
TRAIN = ["train", "--out", "run"]
SMALL = ["model.layers=1", "model.hidden=32", "model.heads=2", "data.context=32", "data.path=text.txt"]


@pytest.fixture
def training(tmp_path, mpi):
    """``training(*settings, options=())``: start `hpcdist run -n 2 train` on a small text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 500)
    jobs = []

    def begin(*settings, options=()):
        chosen = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
        jobs.append(Job([*RUN, *options, *TRAIN, *chosen], tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


@pytest.mark.full
def test_ctrl_c_saves_a_checkpoint_and_metrics(training, tmp_path):
    job = training("run.steps=1000000", "run.log_every_s=0.1")
    until(lambda: job.output.count("\nstep ") > 2, "steps", limit_s=120.0)
    job.send(signal.SIGINT)
    assert job.end() == 130, job.output
    assert "Traceback" not in job.output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")), "no checkpoint of the stop"
    with files.open_read(tmp_path / "run" / "metrics.h5") as metrics:
        losses = metrics["steps/loss"][...]
    assert len(losses) > 2 and np.isfinite(losses).all()


@pytest.mark.full
@pytest.mark.parametrize("options", [[], ["--restarts", "2"]], ids=["once", "restarts"])
def test_second_ctrl_c_prints_the_command_to_resume(training, options):
    """It kills the ranks. One of them makes the others wait, so no rank saves or prints the command itself."""
    job = training("run.steps=1000000", "checkpoint.every_steps=5", 'chaos.stall=["1@8:600"]', options=options)
    until(lambda: "hpcdist: chaos: " in job.output, "stall after the checkpoint", limit_s=120.0)
    job.send(signal.SIGINT)
    until(lambda: "Ctrl-C again kills them" in job.output, "first Ctrl-C")
    job.send(signal.SIGINT)
    assert job.end() == 130, job.output
    expected = r"\nhpcdist run: the newest checkpoint is run/checkpoints/step-5; resume with .* train .*--resume auto\n"
    assert re.search(expected, job.output), job.output
    assert "start 2" not in job.output


def ranks_of(job):
    """Return the process ids of the running ranks."""
    results = [line for line in survivors(job.mark) if f"{sys.executable}\\x00-P\\x00-m\\x00hpcdist\\x00train" in line]
    direct = [line for line in results if not any(name in line for name in ("mpirun", "prterun", "hydra"))]
    return [int(line.split()[0]) for line in direct]


# The real mpirun, whose process id one that was killed has had: its session is still there.
REUSED = """#!/bin/bash
mkdir "$TMPDIR/ompi.$$" && touch "$TMPDIR/ompi.$$/pmix.vm.tool" && exec "$REAL" "$@"
"""
START = """
import dataclasses, pathlib, sys
from hpcdist.cli.main import main
from hpcdist.comm.launch import mpirun
found = dataclasses.replace(mpirun.find(), path=pathlib.Path(sys.argv[1]))
mpirun.find = lambda *_: found
main(["run", "-n", "1", *sys.argv[2:]])
"""


def test_stale_session_of_a_killed_mpirun_is_tolerated(mpi, tmp_path):
    if mpi.vendor != mpirun.OPEN_MPI or not mpirun.session(mpi, tmp_path):
        pytest.skip("not an Open MPI 5 whose sessions are where it likes")
    exit_file.remove_segments(tmp_path)
    launcher, temporary = tmp_path / "bin" / "mpirun", tmp_path / "temporary"
    for folder in (launcher.parent, temporary):
        folder.mkdir()
    launcher.write_text(REUSED)
    launcher.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(temporary), "REAL": str(mpi.path)}
    done = run([sys.executable, "-P", "-c", START, str(launcher), "doctor"], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (stale,) = temporary.iterdir()
    assert [path.name for path in stale.iterdir()] == ["pmix.vm.tool"], "and the job has left nothing"


PORTS = """
import os, socket, sys, hpcdist
from hpcdist.comm.launch import environment
world = hpcdist.init()
hpcdist.allreduce(1.0)
for descriptor, address in environment.listening().items():
    if address in environment.listening(os.getppid()).values():
        continue  # a socket of the launcher, which the rank inherited
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        device = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\\0").decode()
    sys.stdout.write(f"open: {address}\\n" if device != "lo" else "on loopback\\n")
sys.stdout.write(f"rank {world.rank} done\\n")  # one write, which no output of the other rank splits
"""


@pytest.mark.parametrize("kind", ["run", "mpirun", pytest.param("survive", marks=pytest.mark.full)])
def test_ranks_on_one_host_listen_only_on_loopback(kind, mpi, tmp_path, request):
    file = tmp_path / "ports.py"
    file.write_text(PORTS)
    command, environment = [sys.executable, str(file)], dict(os.environ)
    if kind == "run":
        command = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "--", *command]
    else:
        settings, options = mpirun.settings(mpi), []
        if kind == "survive":  # as `hpcdist run --survive` starts the ranks of a training
            request.getfixturevalue("ulfm")
            settings |= mpirun.transports(mpi, surviving=True) | {exit_file.SURVIVE: "shrink"}
            options = mpirun.ulfm_options(mpi)
        command, environment = mpirun.command(mpi, 2, command, settings, options), environment | settings
    done = run(command, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert "open: " not in done.stdout, done.stdout
    assert [line for line in lines if line.startswith("rank")] == ["rank 0 done", "rank 1 done"]
    assert ("on loopback" in lines) == (kind == "survive"), lines


@pytest.mark.full
def test_restarted_job_can_be_stopped_while_it_starts(training, tmp_path):
    job = training("run.steps=1000000", "checkpoint.every_steps=5", options=["--restarts", "3"])
    latest = tmp_path / "run" / "checkpoints" / "latest"
    until(latest.exists, "checkpoint", limit_s=120.0)
    one, _ = ranks_of(job)
    os.kill(one, signal.SIGKILL)
    # A signal before its ranks are there would be one between two starts, after which no second one is made.
    until(lambda: "start 2 follows" in job.output and ranks_of(job), "second start")
    again = re.search(r"start 1 of at most 4 ended with .* start 2 follows at once, from (step-\d+)\n", job.output)
    assert again, job.output
    job.send(signal.SIGTERM)
    assert job.end() == 75, job.output
    if "nothing to save" in job.output:  # the signal came before the first step; a launcher may need seconds to end it
        newest = latest.read_text().strip()
        assert int(newest[5:]) >= int(again[1][5:]), job.output
        assert (latest.parent / newest / "manifest.json").exists(), job.output
    else:
        assert re.search(
            r"\nhpcdist run: stopped at \d+ of 1000000 steps, saved; go on with .* train .*--resume auto\n", job.output
        )
        assert f"resumed from run/checkpoints/{again[1]} " in job.output
        assert int(latest.read_text()[5:]) > int(again[1][5:])


def test_bad_recipe_returns_78_and_is_not_restarted(training):
    job = training("model.layrs=3", options=["--restarts", "3"])
    assert job.end() == 78, job.output
    assert "model.layrs" in job.output and "model.layers" in job.output and "start 2" not in job.output


def test_only_leftovers_of_killed_starts_are_removed(tmp_path, monkeypatch):
    """These are directories in the temporary folder, and shared memory of MPI whose names the ranks wrote there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["sleep", "60"])
    reference = lock.RunLock().identity
    owners = {
        "dead": {**reference, "pid": ended.pid, "started": lock._started(ended.pid)},
        "reused": {**reference, "started": "1"},  # its process id is another's now
        "mine": reference,
        "elsewhere": {**reference, "machine": "another", "pid": ended.pid},
    }
    ended.kill()
    ended.wait()
    for name, owner in owners.items():
        (tmp_path / f"hpcdist-run-{name}").mkdir()
        (tmp_path / f"hpcdist-run-{name}" / "owner.json").write_text(json.dumps(owner))
    (tmp_path / "hpcdist-run-unknown").mkdir()
    (tmp_path / "hpcdist-run-link").symlink_to(tmp_path / "hpcdist-run-dead")
    name = f"hpcdist-test-{uuid.uuid4().hex}"
    local_data, others, no_segment = (
        Path("/dev/shm", name) for name in (f"sm_segment.{name}", f"mpich_shm_{name}", name)
    )
    try:
        for path in (local_data, others, no_segment):
            path.write_bytes(b"x" * 4096)
        with local_data.open("r+b") as segment, no_segment.open("r+b") as data:
            monkeypatch.setenv(exit_file.LAUNCH_DIR, str(tmp_path / "hpcdist-run-dead"))
            with mmap.mmap(segment.fileno(), 4096), mmap.mmap(data.fileno(), 4096):
                exit_file.announce_segments()
        run_command._remove_abandoned()
        assert not local_data.exists() and others.exists() and no_segment.exists()
    finally:
        for path in (local_data, others, no_segment):
            path.unlink(missing_ok=True)
    left = sorted(path.name.removeprefix("hpcdist-run-") for path in tmp_path.iterdir())
    assert left == ["elsewhere", "link", "mine", "unknown"]


def test_launch_directory_records_its_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_command._launch_dir() as folder:
        assert json.loads((Path(folder) / "owner.json").read_text())["pid"] == os.getpid()
        run_command._remove_abandoned()
        assert Path(folder).exists()
    assert not list(tmp_path.iterdir())


def test_mpi_args_with_an_open_quotation_are_rejected(capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["run", "-n", "2", "--mpi-args", "-x 'A", "train"])
    stderr = capsys.readouterr().err
    assert leaving.value.code == USAGE
    assert "--mpi-args" in stderr and "No closing quotation" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("name", ["bench", "submit", "run", "grow", "nonsense"])
def test_run_rejects_commands_that_start_ranks_themselves(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main.main(["run", "-n", "2", name])
    reference = capsys.readouterr().err.partition("such commands are: ")[2].strip().split(", ")
    assert leaving.value.code == USAGE
    assert "train" in reference and name not in reference


@cases(
    "words, output",
    ("--restarts 2 train", "train ... --out DIR"),
    ("--restarts 2 doctor", "only with train"),
    ("--restarts 2 train --out x --nix", "--nix"),
    ("--survive shrink doctor", "only with train"),
    ("--spares 1 train", "--survive replace"),
    ("--spares 1 --survive shrink train", "--survive replace"),
)
def test_commands_that_cannot_restart_or_survive_are_rejected(words, output, capsys):
    code, _, err = call_command(capsys, "run", "-n", "2", *words.split())
    assert code == USAGE and output in err


def test_checkpoints_lists_complete_checkpoints_newest_first(tmp_path):
    for name in ("step-9", "step-10", "step-11.tmp", "step-12.abandoned", "step-x"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step-13").mkdir()
    assert list(run_command.checkpoints(tmp_path)) == ["step-10", "step-9"]
    assert run_command.checkpoints(tmp_path / "nowhere") == {}
