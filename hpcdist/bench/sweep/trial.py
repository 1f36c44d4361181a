"""Run one trial: a whole training as `hpcdist run` starts it, in a session of its own and under a time limit."""

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
from hpcdist.errors import OK as DONE
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets, files

OK: Final = "ok"
FAILED: Final = "failed"
GRACE_S: Final = 5.0  # what the ranks get to stop after the time limit
TEARDOWN_S: Final = 10.0  # and `hpcdist run` to end what is left of them
TAIL_BYTES: Final = 4000
METRICS: Final = "hpcdist.metrics"
PHASES: Final = ("compute_s", "communication_s", "update_s")
PER_RANK: Final = ("step_s", *PHASES, "sent_bytes")
COMMON: Final = ("loss", "tokens")
ITERATION: Final = "iteration"  # the sample that numbers the others: the optimizer steps that were completed

_PR_SET_PDEATHSIG: Final = 1
_ANSWERED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # by whoever runs a trial
# The line of a traceback, or of our own words, that says what went wrong.
_SAID: Final = re.compile(r"^(?:\[rank \d+\] )?((?:Error: |(?:\w+\.)*\w*(?:Error|Exception)\b).*\S)\s*$", re.MULTILINE)

# (trial, recipe file, run directory) -> the command line of the trial
Command = Callable[[SweepTrial, Path, Path], list[str]]


class TrialSample(NamedTuple):
    """Raw figures: (iteration, rank), or (iteration,) where they are common to all ranks."""

    values: np.ndarray
    units: str
    meaning: str


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial. ``summary`` and ``samples`` are empty unless ``status`` is "ok"; then ``reason`` is."""

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
    """Return the command line that trains ``recipe`` on the ranks of ``trial``, with ``options`` of `hpcdist run`."""
    ranks = str(trial.ranks)
    launcher = [sys.executable, "-P", "-m", "hpcdist", "run", "-n", ranks, "--grace", f"{GRACE_S:g}", *options]
    return [*launcher, "train", str(recipe), "--out", str(out), "--json"]


def run(trial: SweepTrial, folder: Path, limit_s: float, line: Command, environment: Mapping[str, str]) -> TrialOutcome:
    """Run ``trial`` with its files in the empty ``folder`` and return how it ended (local).

    A trial that fails, or takes longer than ``limit_s``, is an outcome; an exception is one of this process, and ends
    the trial.
    """
    recipe, out, stderr = folder / "recipe.toml", folder / "run", folder / "stderr"
    recipe.write_text(trial.recipe, encoding="utf-8")
    started_utc, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with (folder / "stdout").open("wb") as to_stdout, stderr.open("wb") as to_stderr:
        # While this process forks, Python's own hooks run, and an exception that a signal raises there is lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ANSWERED)
        try:
            process = subprocess.Popen(
                line(trial, recipe, out),
                stdin=subprocess.DEVNULL,
                stdout=to_stdout,
                stderr=to_stderr,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=_with_parent(before),  # single-threaded here: a function between fork and exec is safe
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            ended = _wait(process, limit_s)
        except BaseException:
            _end(process)
            raise
    wall_s = time.monotonic() - start
    if not ended:
        reason = f"no end within {limit_s:g} s"
    elif process.returncode != DONE:
        reason = f"exit code {process.returncode}"
    else:
        return _successful(folder, TrialOutcome(OK, started_utc, wall_s, DONE))
    tail = _tail(stderr)
    errors = _SAID.findall(tail)
    reason += f": {errors[-1].removeprefix('Error: ')}" if errors else ""
    return TrialOutcome(FAILED, started_utc, wall_s, process.returncode, reason, tail)


def _with_parent(mask: "set[signal.Signals | int]") -> Callable[[], None]:
    """Return what a child calls to answer signals again, and to be told to stop, should this process be killed."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait for the end and return whether it came in time; ends the process when it did not."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return False
    return True


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have `hpcdist run` stop the ranks; kill it when even that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S + TEARDOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its launcher is told by the kernel, and ends the ranks
        process.wait()


def _successful(folder: Path, outcome: TrialOutcome) -> TrialOutcome:
    """Return ``outcome`` with what the training measured; a failure when that cannot be read."""
    try:
        summary = json.loads((folder / "stdout").read_text(encoding="utf-8").strip().splitlines()[-1])
        samples, mpi_library = _measured(folder / "run" / "metrics.h5")
    except (IndexError, ValueError, StorageError, KeyError) as error:
        reason = f"it ended well, but its summary or metrics cannot be read: {error!r}"
        return replace(outcome, status=FAILED, reason=reason, stderr_tail=_tail(folder / "stderr"))
    return replace(outcome, summary=summary, samples=samples, mpi_library=mpi_library)


def _measured(path: Path) -> tuple[dict[str, TrialSample], str]:
    """Return the raw samples of a metrics file, and the MPI library that made them."""
    with files.open_read(path, METRICS) as file:
        rows = datasets.read(file, "steps")
        attributes = {name: file["steps"][name].attrs for name in rows}
        samples = {
            copied: TrialSample(rows[name], str(attributes[name]["units"]), str(attributes[name]["long_name"]))
            for name, copied in {"step": ITERATION, **{name: name for name in (*PER_RANK, *COMMON)}}.items()
        }
        library = str(file.attrs.get("mpi_library", ""))
    return samples, library


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        # NUL ends a string in HDF5; launchers are known to print some.
        return file.read().decode(errors="replace").replace("\0", "")
