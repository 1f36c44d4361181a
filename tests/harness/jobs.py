"""Jobs in separate processes: commands of hpcdist, programs under mpirun, and the files they leave.


Every wait has a time limit, and no process of a launcher survives it.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdist.batch import ledger
from hpcdist.cli import main
from hpcdist.comm.launch import exit_file, mpirun
from hpcdist.telemetry.metrics import step_metrics

LIMIT_S = 600.0  # of whatever a test waits for: generous, since only a hang may reach it
Completed = subprocess.CompletedProcess[str]

# Variables that a launcher gave to this process would make its children believe to be its ranks.
_RANK_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")

# How the jobs of each MPI are started: with the srun of Slurm, and with the launcher of its own.
SITES = {
    mpirun.OPEN_MPI: {
        "mpirun": "based_on = 'slurm-openmpi'\n",
        "srun": "based_on = 'slurm-openmpi'\n[launcher]\nkind = 'srun'\npmi = 'pmix'\n",
    },
    mpirun.MPICH: {"srun": "based_on = 'slurm-mpich'\n"},
}


def run(
    line: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    text: str | None = None,
    timeout: float = LIMIT_S,
    check: bool = False,
) -> Completed:
    """Run a program with ``text`` as its input. Return its exit code, stdout and stderr."""
    stdin = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    words = [*map(str, line)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=check, env=env, cwd=cwd, **stdin
    )  # type: ignore[call-overload]


def python(code: str, *words: object, **options: Any) -> Completed:
    """Run ``code`` in another interpreter, with the options of `run`."""
    return run([sys.executable, "-P", "-c", code, *words], **options)


def command(*words: object) -> list[str]:
    """Return the command line that starts hpcdist as a user does."""
    return [sys.executable, "-P", "-m", "hpcdist", *map(str, words)]


def hpcdist(*words: object, **options: Any) -> Completed:
    """Run a command of hpcdist in a separate process, with the options of `run`."""
    return run(command(*words), **options)


def settings(keys: Mapping[str, object]) -> list[str]:
    """Return recipe keys as command line options."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def figures(done: Completed, code: int = 0) -> Any:
    """Return the JSON in the last output line of a command that ended with ``code``."""
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def call_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a command of hpcdist in this process. Return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as leaving:
        main.main([*map(str, words)])
    streams = capsys.readouterr()
    code = leaving.value.code or 0
    assert isinstance(code, int)
    return code, streams.out, streams.err


def invoke_command(*words: object) -> Completed:
    """Run a command of hpcdist in this process, with the result of `hpcdist`."""
    streams = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as leaving, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        main.main([*map(str, words)])
    return subprocess.CompletedProcess(words, leaving.value.code or 0, *(stream.getvalue() for stream in streams))


def run_light_commands(heavy: Sequence[str], *commands: Sequence[str], cwd: Path | str | None = None) -> list[str]:
    """Run ``commands`` of hpcdist one after another in a new process, and return the printed lines.


    Asserts that each command succeeds, and that none of the modules ``heavy`` is loaded.
    """
    code = (
        "import sys\nfrom hpcdist.cli.main import main\n"
        f"for words in {[list(words) for words in commands]!r}:\n    try:\n        main(words)\n"
        "    except SystemExit as leaving:\n        assert not leaving.code, (words, leaving.code)\n"
        f"print('loaded:', *[name for name in {tuple(heavy)!r} if name in sys.modules])"
    )
    done = python(code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    *output, loaded = done.stdout.splitlines()
    assert loaded.strip() == "loaded:", loaded
    return output


def until(
    condition: Callable[[], Any],
    what: str = "answer",
    process: "subprocess.Popen[Any] | None" = None,
    log: Path | None = None,
    limit_s: float = LIMIT_S,
) -> Any:
    """Wait for a true value of ``condition`` while the process lives, and return it. A failure shows the log."""
    end = time.monotonic() + limit_s
    while not (answer := condition()):
        lines = log.read_text() if log is not None and log.exists() else ""
        assert process is None or process.poll() is None, f"it ended\n{lines}"
        assert time.monotonic() < end, f"no {what} within {limit_s:g} s\n{lines}"
        time.sleep(0.01)
    return answer


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without the variables of launchers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANK_PREFIXES)}


def run_limited(
    line: Sequence[str], timeout: float, environment: Mapping[str, str], cwd: Path | None = None, *, apart: bool = False
) -> Completed:
    """Run ``line`` in a new session. After ``timeout`` seconds kill all its processes and fail.


    stdout and stderr are one stream, unless ``apart`` is set.
    """
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        text=True,
        env=dict(environment),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # a launcher ends its ranks, which may be in sessions of their own
        try:
            output, errors = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        pytest.fail(f"no end after {timeout:g} s: {' '.join(line)}\n{output}\n{errors or ''}")
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


@contextmanager
def session(mpi: mpirun.Launcher) -> Iterator[dict[str, str]]:
    """Yield the variables for an isolated launch: its session and memory are separate, and are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hpcdist-test-", ignore_cleanup_errors=True) as folder:
        try:
            yield mpirun.session(mpi, Path(folder))
        finally:
            exit_file.remove_segments(Path(folder))


@dataclass(frozen=True)
class Ended:
    """The end of a job: exit code and output."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def start_checkpoints(run_dir: Path) -> list[str]:
    """Return the checkpoint from which each start of a run began."""
    return [entry.text("from") for entry in ledger.read(run_dir) if entry.event == ledger.BEGAN]


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is no checkpoint."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name)), default=0)


def is_running(text: object) -> bool:
    """Return True if the command line of a process contains ``text``."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have just ended
            if str(text) in (entry / "cmdline").read_text():
                return True
    return False


def have_same_bits(one: Path, two: Path) -> bool:
    """Return True if two runs have the same losses and the same parameters."""
    losses = [step_metrics.read(out / "metrics.h5").steps["loss"] for out in (one, two)]
    return np.array_equal(*losses) and tensors(one) == tensors(two)


def tensors(out: Path) -> bytes:
    """Return the parameters of a run, without the file header, which contains times."""
    path = Path(f"{out}.safetensors")
    if not path.exists():
        hpcdist("checkpoint", "export", out, path, check=True)
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]
