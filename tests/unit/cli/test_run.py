"""`hpcdist run` before it starts ranks: rejected commands, and the error that is shown last."""

import os
import signal
import subprocess
import sys
import time

import pytest

from harness import jobs
from harness.jobs import LIMIT_S, call_command
from harness.marks import cases
from hpcdist.cli import main
from hpcdist.cli import run as run_command
from hpcdist.comm.launch import launchers, mpirun

# A launcher with one rank that knows nothing of hpcdist, run by the supervisor.
SUPERVISED = """
import os, sys
from pathlib import Path
from hpcdist.comm.launch import supervisor
supervisor.STARTING_S = 0.0
rank = "trap 'exit 5' TERM; : >$HPCDIST_LAUNCH_DIR/ready; while :; do sleep 0.05; done"
launcher = f'OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 bash -c "{rank}" & wait $!'.replace("$HPC", "\\\\$HPC")
with supervisor.signals_held() as mask:
    line, folder = ["bash", "-c", launcher], Path(sys.argv[1])
    outcome = supervisor.Supervision(line, dict(os.environ), folder, 60.0, mask, foreign=sys.argv[2] == "foreign").run()
sys.exit(outcome.code)
"""


class StartedError(Exception):
    """Raised if a launcher would have been started."""


@pytest.fixture
def no_launcher(monkeypatch, tmp_path):
    """A launcher that is found, but must not be started."""

    def raise_started(self):
        raise StartedError

    monkeypatch.setattr(mpirun, "find", lambda environment: mpirun.Launcher(tmp_path, mpirun.OPEN_MPI, "5.0.8"))
    monkeypatch.setattr(mpirun, "_why_no_ulfm", lambda launcher: "")
    monkeypatch.setattr(launchers.MpirunStarter, "check", raise_started)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_launcher")
@cases(
    "before, variables, message",
    ([], {}, "hpcdist run: the ranks use 3 of 8 cores; --cpus-per-task 2 gives each 2 threads\n"),
    (["--cpus-per-task", "1"], {}, ""),
    (["--mpi-args=-x A"], {}, ""),
    ([], {"OMP_NUM_THREADS": "1"}, ""),
    ([], {"SLURM_JOB_ID": "7"}, ""),
)
def test_idle_cores_are_reported_without_a_choice(before, variables, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name in ("OMP_NUM_THREADS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launchers.MpirunStarter, "check", lambda self: None)
    monkeypatch.setattr(run_command._Launch, "run", lambda *_: 0)
    with pytest.raises(SystemExit):
        main.main(["run", "-n", "3", *before, "--", "python", "a.py"])
    assert capsys.readouterr().err == message


@pytest.mark.usefixtures("no_launcher")
@cases(
    "before, after, code, message",
    ([], ["--set", "parallel.pipelin=2"], 78, "the nearest known is 'parallel.pipeline'"),
    ([], ["--set", "data.path=/no/such"], 78, "data.path = /no/such: there is no such file or directory"),
    ([], ["--set", "parallel.data=4"], 78, "but the world has 3 ranks"),
    ([], ["--set", "run.global_batch=2"], 78, "with 3 data ranks: each needs at least one sample"),
    ([], ["--time-limit", "5:00"], 2, "--time-limit"),
    ([], ["--frob"], 2, "No such option"),
    (["--survive", "shrink"], ["--set", "parallel.strategy=gossip"], 78, "with --survive"),
    (["--python", "python3"], ["--set", "parallel.data=4"], 78, "but the world has 3 ranks"),
)
def test_invalid_training_starts_no_rank(before, after, code, message, capsys):
    code, _, err = call_command(capsys, "run", "-n", "3", *before, "train", *after)
    assert code == code and message in err


@pytest.mark.usefixtures("no_launcher")
@cases(
    "before, after",
    ([], []),
    (["--mpi-args", "-n 4"], ["--set", "parallel.data=4"]),  # the launcher's options decide the number of ranks
    (["--survive", "shrink"], ["--set", "parallel.data=4"]),  # the degree is adapted to the ranks
    (["--python", "python3"], ["--set", "data.path=/no/such"]),  # the file may exist in the container
    (["--python", "python3"], ["no/such/recipe.toml"]),
)
def test_checks_that_need_ranks_are_left_to_the_ranks(before, after):
    with pytest.raises(StartedError):
        main.main(["run", "-n", "3", *before, "train", *after])


def test_check_imports_no_modules_that_start_threads(tmp_path):
    program = (
        "import sys\nfrom hpcdist.cli import run\n"
        "run.check_training(['train'], 2, None, 0, elsewhere=False)\n"
        "print(*[name for name in ('numpy', 'mpi4py', 'h5py', 'numba') if name in sys.modules])"
    )
    done = jobs.run([sys.executable, "-c", program], check=True)
    assert done.stdout.strip() == "", "the process must have no threads, because it forks to start the launcher"


@pytest.mark.parametrize("arguments", [["train", "no/such/recipe.toml"], ["tune", "--frob"]])
def test_error_before_the_start_is_shown_by_the_launcher(arguments, tmp_path, monkeypatch, capsys):
    for name, value in (("SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("HPCDIST_FAILURE_DIR", str(tmp_path))
    assert call_command(capsys, *arguments)[2] == ""
    assert "Error: " in (tmp_path / "rank-0.txt").read_text()
    monkeypatch.setenv("HPCDIST_FAILURE_DIR", str(tmp_path / "on-another-host"))
    assert "Error: " in call_command(capsys, *arguments)[2]
    assert os.listdir(tmp_path) == ["rank-0.txt"]


@pytest.mark.usefixtures("no_launcher")
@cases(
    "arguments, words",
    (["--", "python", "train.py", "--lr", "3"], [sys.executable, "train.py", "--lr", "3"]),
    (["python3", "-m", "module"], [sys.executable, "-m", "module"]),
    (["--python", "apptainer exec my.sif python3", "python", "a b.py"], "apptainer exec my.sif python3 'a b.py'"),
    (["--", "env", "-i"], ["env", "-i"]),
    (["--out", "/tmp/it", "--resume", "auto", "--", "env"], ["HPCDIST_RUN_DIR=/tmp/it", "HPCDIST_RESUME=auto"]),
    (["--energy", "--", "env"], ["HPCDIST_ENERGY=1"]),
)
def test_program_is_started_unchanged(arguments, words, capsys):
    code, line, _ = call_command(capsys, "run", "-n", "3", "--dry-run", *arguments)
    assert code == 0
    assert (words if isinstance(words, str) else " ".join(words)) in line
    assert "-m hpcdist" not in line


@pytest.mark.usefixtures("no_launcher")
@cases(
    "arguments, message",
    (["--survive", "shrink", "python", "train.py"], "--survive shrink works only with train, not with python"),
    (["--restarts", "2", "python", "train.py"], "add --out DIR"),
    (["--resume", "auto", "python", "train.py"], "add --out DIR"),
    (["--energy", "train"], "--energy is for scripts: train always measures energy"),
    (["--out", "it", "train"], "--out must follow train, an hpcdist command; write: train ... --out"),
    (["trian"], "'trian' is neither a program nor a command to run on ranks"),
    (["submit"], "'submit' is neither a program nor a command to run on ranks"),
)
def test_options_unsupported_for_programs_are_rejected(arguments, message, capsys):
    code, _, err = call_command(capsys, "run", "-n", "3", *arguments)
    assert code == 2 and message in err


@pytest.mark.parametrize(("kind", "code"), [("foreign", 5), ("own", 128 + signal.SIGUSR1)])
@pytest.mark.full
def test_program_without_announcement_receives_signals(kind, code, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(tmp_path), kind])
    try:
        until = time.monotonic() + LIMIT_S
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == code
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("cause", ["rank-2.txt", "run/recorder/rank-00002.failed"])
def test_first_failure_is_shown_last(cause, tmp_path, capsys):
    (tmp_path / "run/recorder").mkdir(parents=True)
    texts = {"rank-0.txt": (30, "an echo"), cause: (20, "the cause"), "run/recorder/rank-00001.failed": (9, "old")}
    for name, (time_ns, text) in texts.items():
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, ns=(time_ns, time_ns))
    run_command._show_first_failure(tmp_path, str(tmp_path / "run"), began_ns=10)
    shown = capsys.readouterr().err
    assert "the first failure (of 2 that failed):\nthe cause" in shown
    assert shown.index("another failure:\nan echo") < shown.index("the cause") and "old" not in shown


def test_identical_failures_are_shown_once(tmp_path, capsys):
    for rank in (0, 1, 2):
        text = f"[rank {rank}] rank {rank} failed: exit code 1\n[rank {rank}] ValueError: {'alone' * (rank == 2)}\n"
        (tmp_path / f"rank-{rank}.txt").write_text(text)
        os.utime(tmp_path / f"rank-{rank}.txt", ns=(20 + rank, 20 + rank))
    run_command._show_first_failure(tmp_path, "", began_ns=10)
    shown = capsys.readouterr().err
    assert shown.count("ValueError") == 2 and shown.count("ValueError: alone") == 1
    assert "the first failure (of 3 that failed), and 1 more like it:\n[rank 0] rank 0 failed" in shown
