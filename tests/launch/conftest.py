"""For tests that start mpirun themselves: every start has a time limit, and nothing survives it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hpcdist.comm import launcher, mpirun
from hpcdist.errors import MissingCapabilityError

Start = Callable[..., "subprocess.CompletedProcess[str]"]

# Variables that a launcher gave to this process would make its children believe to be its ranks.
_RANK_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANK_PREFIXES)}


def run_limited(
    line: Sequence[str], timeout: float, environment: Mapping[str, str], cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``line`` in a session of its own, output in one stream; kill all of it after ``timeout`` seconds and fail."""
    process = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # a launcher ends its ranks, which may be in sessions of their own
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"no end after {timeout:g} s: {' '.join(line)}\n{output}")
    return subprocess.CompletedProcess(line, process.returncode, output)


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
