"""For tests that start mpirun themselves: every start has a time limit, and nothing survives it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcdist
from hpcdist.comm import launcher, mpirun
from hpcdist.errors import MissingCapabilityError

JOB_S = 120.0  # generous: a loaded machine must not fail a test
Start = Callable[..., "subprocess.CompletedProcess[str]"]

# Variables that a launcher gave to this process would make its children believe to be its ranks.
_RANK_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANK_PREFIXES)}


def run_limited(
    line: Sequence[str], timeout: float, environment: Mapping[str, str], cwd: Path | None = None, *, apart: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run ``line`` in a session of its own; kill all of it after ``timeout`` seconds and fail.

    Output is one stream, unless ``apart`` keeps stderr for itself.
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


@pytest.fixture(scope="session")
def mpi() -> mpirun.Launcher:
    """The mpirun of this environment."""
    if launcher.announced() is not None:
        pytest.skip("launch tests start mpirun themselves, and this process is a rank already")
    try:
        return mpirun.find()
    except MissingCapabilityError as error:
        pytest.skip(str(error))


@pytest.fixture
def mpiexec(mpi: mpirun.Launcher) -> Start:
    """``mpiexec(ranks, [arguments of python], timeout=60, env={...}, cwd=None)`` -> the completed process."""

    def start(
        ranks: int,
        arguments: Sequence[str],
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        environment = clean_environment()
        added = mpirun.settings(mpi, environment) | dict(env or {})
        line = mpirun.command(mpi, ranks, [sys.executable, *arguments], added, environment=environment)
        return run_limited(line, timeout, environment | added, cwd)

    return start


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@pytest.fixture
def launch(mpi: mpirun.Launcher, tmp_path: Path) -> Callable[..., Ended]:
    """Write a program into a file and run it: ``launch(n, source, *arguments, options=(), **environment)``.

    ``options`` are those of the launcher itself.
    """

    def start(n: int, source: str, *arguments: str, options: Sequence[str] = (), **extra: str) -> Ended:
        program = tmp_path / "program.py"
        program.write_text(source)
        environment = clean_environment()
        # The program lies elsewhere: it must find the hpcdist under test.
        root = str(Path(hpcdist.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        added = mpirun.settings(mpi, environment) | {"PYTHONPATH": path} | extra
        line = mpirun.command(mpi, n, [sys.executable, str(program), *arguments], added, environment=environment)
        done = run_limited([line[0], *options, *line[1:]], JOB_S, environment | added, apart=True)
        return Ended(done.returncode, done.stdout, done.stderr)

    return start
