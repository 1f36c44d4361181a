"""Execution of one trial: a training by `hpcdist run`, in a new session and with a time limit."""

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.comm.launch.supervisor import PR_SET_PDEATHSIG
from hpcdist.constants import METRICS_FILE, RECIPE_FILE
from hpcdist.errors import OK as EXIT_OK
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets, files

OK: Final = "ok"
FAILED: Final = "failed"
GRACE_S: Final = 5.0  # time for the ranks to stop after the time limit
TEARDOWN_S: Final = 10.0  # additional time for `hpcdist run` to kill the remaining ranks
TAIL_BYTES: Final = 4000  # of stderr, kept for a failed trial
PHASES: Final = ("compute_s", "communication_s", "update_s")
ITERATION: Final = "iteration"  # sample with the number of completed optimizer steps, from the metrics column "step"
_COLUMNS: Final = ("step_s", *PHASES, "sent_bytes", "loss", "tokens")  # of the metrics file

_BLOCKED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the caller may handle these signals
# The line of a traceback, or of an error message of hpcdist, that names the error.
_ERROR: Final = re.compile(r"^(?:\[rank \d+\] )?((?:Error: |(?:\w+\.)*\w*(?:Error|Exception)\b).*\S)\s*$", re.MULTILINE)

Command = Callable[[SweepTrial, Path, Path], list[str]]  # (trial, recipe file, run directory) -> command line


class TrialSample(NamedTuple):
    """Samples of one quantity: an array (iteration, rank), or (iteration,) if the values are equal on all ranks."""

    values: np.ndarray
    units: str
    meaning: str


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial run. A success sets ``summary`` and ``samples``. A failure sets ``reason``."""

    status: str
    started_utc: str
    wall_s: float
    exit_code: int
    reason: str = ""
    stderr_tail: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, TrialSample] = field(default_factory=dict)
    mpi_library: str = ""


def command(trial: SweepTrial, recipe: Path, out: Path, options: Sequence[str] = ()) -> list[str]:
    """Return an ``hpcdist run`` command line for ``trial``. ``recipe``: recipe file. ``out``: run directory."""
    launcher = [sys.executable, "-P", "-m", "hpcdist", "run", "-n", str(trial.ranks), "--grace", f"{GRACE_S:g}"]
    return [*launcher, *options, "train", str(recipe), "--out", str(out), "--json"]


def run(
    trial: SweepTrial, folder: Path, limit_s: float, command_line: Command, environment: Mapping[str, str]
) -> TrialOutcome:
    """Run ``trial`` as a subprocess in the empty directory ``folder``, and return its result. Local.

    ``limit_s``: time limit in seconds. ``command_line``: function that builds the command, like `command`.
    ``environment``: environment variables of the subprocess.
    """
    libc = ctypes.CDLL(None)

    def prepare_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # the child gets SIGTERM when this process dies
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    recipe, out, stderr = folder / RECIPE_FILE, folder / "run", folder / "stderr"
    recipe.write_text(trial.recipe, encoding="utf-8")
    started_utc, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with (folder / "stdout").open("wb") as to_stdout, stderr.open("wb") as to_stderr:
        # Python runs hooks while it forks. An exception that a signal handler raises in a hook is lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            process = subprocess.Popen(
                command_line(trial, recipe, out),
                stdin=subprocess.DEVNULL,
                stdout=to_stdout,
                stderr=to_stderr,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=prepare_child,  # safe between fork and exec: this process has a single thread
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            has_ended = _wait(process, limit_s)
        except BaseException:
            _end(process)
            raise
    wall_s = time.monotonic() - start
    if has_ended and process.returncode == EXIT_OK:
        return _with_measurements(TrialOutcome(OK, started_utc, wall_s, EXIT_OK), folder)
    reason = f"exit code {process.returncode}" if has_ended else f"timed out after {limit_s:g} s"
    tail = _tail(stderr)
    if errors := _ERROR.findall(tail):
        reason += f": {errors[-1].removeprefix('Error: ')}"
    return TrialOutcome(FAILED, started_utc, wall_s, process.returncode, reason, tail)


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return False
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)  # `hpcdist run` then stops the ranks
    try:
        process.wait(GRACE_S + TEARDOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then signals the launcher, which ends the ranks
        process.wait()


def _with_measurements(outcome: TrialOutcome, folder: Path) -> TrialOutcome:
    try:
        summary = json.loads((folder / "stdout").read_text(encoding="utf-8").strip().splitlines()[-1])
        with files.open_read(folder / "run" / METRICS_FILE, "hpcdist.metrics") as file:
            rows, group = datasets.read(file, "steps"), file["steps"]
            samples = {}
            for column in ("step", *_COLUMNS):
                units, meaning = (str(group[column].attrs[name]) for name in ("units", "long_name"))
                samples[ITERATION if column == "step" else column] = TrialSample(rows[column], units, meaning)
            library = str(file.attrs.get("mpi_library", ""))
    except (IndexError, ValueError, StorageError, KeyError) as error:
        reason = f"the training succeeded, but its summary or metrics cannot be read: {error!r}"
        return replace(outcome, status=FAILED, reason=reason, stderr_tail=_tail(folder / "stderr"))
    return replace(outcome, summary=summary, samples=samples, mpi_library=library)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        # NUL ends a text in HDF5, and some launchers print NUL.
        return file.read().decode(errors="replace").replace("\0", "")
