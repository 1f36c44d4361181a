"""What launch tests share: a job of real ranks under the mpirun of this environment, always with a time limit."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcdist

TRACES = ("OMPI_", "PMIX_", "PMI_", "HPCDIST_")
LIMIT_S = 120  # generous: a loaded machine must not fail a test


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def command_line(n: int, arguments: list[str]) -> list[str]:
    """Return the command that starts ``n`` ranks of ``arguments`` with the MPI that belongs to this Python."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun in this environment")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
    flags = ["--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"] if "Open MPI" in version else []
    return [mpirun, *flags, "-n", str(n), *arguments]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without a launcher's traces, in which the hpcdist under test can be imported."""
    # A launcher's variables of the session that runs the tests would make the ranks join that one's world.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(TRACES)}
    path = os.pathsep.join(filter(None, [str(Path(hpcdist.__file__).parents[1]), kept.get("PYTHONPATH", "")]))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **root, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **extra}


def run_job(n: int, arguments: list[str], extra: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Ended:
    """Run ``n`` ranks of ``python arguments`` to their end; a job past ``limit_s`` is ended and fails the test."""
    job = subprocess.Popen(
        command_line(n, [sys.executable, *arguments]),
        env=environment(extra or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)  # the launcher ends its ranks; killed at once, it would leave them behind
        try:
            stdout, stderr = job.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            job.kill()
            stdout, stderr = job.communicate(timeout=20)
        pytest.fail(f"the job did not end within {limit_s} s\n{stdout}\n{stderr}")
    return Ended(job.returncode, stdout, stderr)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    """Write a program into a file and run it: ``launch(n, source, *arguments, **environment)``."""

    def start(n: int, source: str, *arguments: str, **extra: str) -> Ended:
        program = tmp_path / "program.py"
        program.write_text(source)
        return run_job(n, [str(program), *arguments], extra)

    return start
