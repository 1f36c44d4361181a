"""CUDA-aware MPI: a probe of the operations that take pointers to GPU memory, and its cache.

Child processes (`cuda_child`) send device memory and compare the received data: first on one rank, then on two ranks of
this node. A crash, an error, wrong data or a timeout count as no. If mpirun cannot start two ranks, collectives count
as no. Messages then count as yes if they passed on one rank and the library reports CUDA support.

`HPCDIST_CUDA_AWARE` overrides: ``yes`` and ``no`` skip the probe, ``auto`` (the default) probes.
"""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import MESSAGES, OPERATIONS
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting import user_cache

CACHE_FORMAT: Final = 1
CACHE_KIND: Final = "device_pointers"
# Includes variables of the loader: the same MPI library may run above a UCX with CUDA or without CUDA.
CACHE_SETTINGS: Final = ("MPICH_GPU", "I_MPI_OFFLOAD", "MV2_", "PSM2_", "PSM3_", "LD_")


def cache_key(library: str, launcher: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the cache key for an MPI ``library`` and its ``launcher``, or None if GPU or library is unknown. Local."""
    if not library:
        return None
    try:
        module = device.cupy()
        runtime = module.cuda.runtime
        name = runtime.getDeviceProperties(device.index())["name"]
        gpus = f"{device.count()} of {name.decode() if isinstance(name, bytes) else name}"
        driver = int(runtime.driverGetVersion())
    except (MissingCapabilityError, RuntimeError):  # cupy raises RuntimeError for errors of CUDA
        return None
    return {
        "mpi_library": library,
        "launcher": launcher,
        "gpus": gpus,
        "driver": driver,
        "cupy": str(module.__version__),
        "settings": user_cache.mpi_settings(environment, *CACHE_SETTINGS),
        "software": user_cache.software(),
    }


def cache_path(key: Mapping[str, Any]) -> Path:
    """Return the path of the cache file for ``key``. Raises StorageError without a home directory. Local."""
    return user_cache.directory(CACHE_KIND) / f"{user_cache.digest(key)}.json"


def read_cached(key: Mapping[str, Any]) -> tuple[list[str], str] | None:
    """Read a test result from the cache. Return (operations that accept GPU pointers, reason), or None."""
    try:
        path = cache_path(key)
        content = json.loads(user_cache.read(path))
        operations, reason, since = (content[name] for name in ("operations", "reason", "created_utc"))
        fits = content["format"] == CACHE_FORMAT and content["key"] == key and set(operations) <= set(OPERATIONS)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return (operations, f"{reason}; measured on {since} and cached in {path}") if fits else None


def write_cached(key: Mapping[str, Any], operations: Collection[str], reason: str) -> str:
    """Cache the ``operations`` that accept GPU pointers, and the ``reason``. Return an error message, or ""."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {
        "format": CACHE_FORMAT,
        "key": dict(key),
        "operations": sorted(operations),
        "reason": reason,
        "created_utc": now,
    }
    try:
        user_cache.write(cache_path(key), content)
    except OSError as error:
        return f"not cached: {error}"
    return ""


VARIABLE: Final = "HPCDIST_CUDA_AWARE"
ANSWERS: Final = ("yes", "no", "auto")
DEVICE_VARIABLE: Final = "HPCDIST_PROBE_DEVICE"  # for the child: the index of a GPU, or "cpu"
CHILD_LIMIT_S: Final = 60.0
BUDGET_S: Final = 120.0  # for all children of a probe, because a launcher may wait for ever for slots
END_LIMIT_S: Final = 5.0
MODULE: Final = "hpcdist.comm.mpi.cuda_child"
_ASK: Final = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\\0 \\n").replace("\\n", " "))
"""  # MPI is loaded, not started
# Variables of launchers: a child that keeps them would join, or wait for, the world of its parent.
_LAUNCHERS: Final = (
    "OMPI_COMM_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "PRTE_",
    "PALS_",
    "MPI_LOCAL",
    "HYDI_",
    "HYDRA_",
    "FLUX_",
    "SLURM_",
)
_LAUNCHERS_ALONE: Final = ("MPIEXEC_HOSTNAME", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_MCA_ess")

Run = Callable[[Sequence[str], Mapping[str, str], float], "ProbeOutcome"]  # words, environment, limit in seconds


@dataclass(frozen=True)
class DevicePointerSupport:
    """The MPI ``operations`` that accept pointers to GPU memory, and the ``reason`` for this result."""

    operations: frozenset[str]
    reason: str


@dataclass(frozen=True)
class ProbeOutcome:
    """Lines printed by a child process, and a text about its failure, or "" after success."""

    lines: tuple[str, ...]  # printed by the child
    end: str  # how the child failed, or "" after exit code 0


def requested_answer(environment: Mapping[str, str] = os.environ) -> str:
    """Return HPCDIST_CUDA_AWARE: "yes", "no" or "auto" (default). Raises ConfigurationError for another value."""
    answer = environment.get(VARIABLE, "auto")
    if answer not in ANSWERS:
        raise ConfigurationError(f"invalid value {VARIABLE}={answer}; choose one of {', '.join(ANSWERS)}")
    return answer


def detect(
    launch: LaunchEnvironment | None, environment: Mapping[str, str] = os.environ
) -> DevicePointerSupport | None:
    """Return the support of GPU pointers in MPI, or None if another rank of this node tests this. Local."""
    answer = requested_answer(environment)
    if answer == "yes":
        return DevicePointerSupport(frozenset(OPERATIONS), f"{VARIABLE}=yes")
    if answer == "no":
        return DevicePointerSupport(frozenset(), f"{VARIABLE}=no")
    if launch is None or launch.size == 1:
        return DevicePointerSupport(frozenset(), "there is only one rank, so nothing is sent")
    if launch.local_rank not in (None, 0):
        return None
    # The test forks, so MPI must not have started.
    return probe_cached(environment)


def agree(comm: Communicator, verdict: DevicePointerSupport | None) -> DevicePointerSupport:
    """Return the support of GPU pointers that all nodes have. ``verdict``: result of `detect`. Collective."""
    verdicts = [support for support in comm.allgather_object(verdict) if support is not None]
    operations = frozenset.intersection(*(support.operations for support in verdicts)) if verdicts else frozenset()
    # The reason of the most restrictive answer.
    least = min(
        verdicts,
        key=lambda support: len(support.operations),
        default=DevicePointerSupport(frozenset(), "no rank has probed"),
    )
    return DevicePointerSupport(operations, least.reason)


def probe_cached(
    environment: Mapping[str, str] = os.environ, renewed: bool = False, run: Run | None = None
) -> DevicePointerSupport:
    """Return the support of GPU pointers in MPI, from the cache or by `probe`. ``renewed``: ignore the cache. Local."""
    run = run or _run
    ends_at = time.monotonic() + BUDGET_S
    clean = stripped(environment)
    outcome = run([sys.executable, "-P", "-c", _ASK], clean, CHILD_LIMIT_S)
    pair = _two_rank_launch(environment)
    library = "" if outcome.end or not outcome.lines else outcome.lines[-1]
    key = cache_key(library, pair[0][0] if pair else "", clean)
    cached = read_cached(key) if key is not None and not renewed else None
    if cached is not None:
        return DevicePointerSupport(frozenset(cached[0]), cached[1])
    verdict = probe(environment, run=run, ends_at=ends_at)
    refused = write_cached(key, verdict.operations, verdict.reason) if key is not None else ""
    return replace(verdict, reason=f"{verdict.reason}; {refused}") if refused else verdict


def probe(
    environment: Mapping[str, str] = os.environ, on: str = "gpu", run: Run | None = None, ends_at: float | None = None
) -> DevicePointerSupport:
    """Test in child processes which MPI operations accept pointers to memory of ``on`` ("gpu" or "cpu"). Local.

    ``run``: function that runs a child process. ``ends_at``: time limit on the monotonic clock.
    """
    run = run or _run
    ends_at = time.monotonic() + BUDGET_S if ends_at is None else ends_at
    clean = stripped(environment) | {DEVICE_VARIABLE: str(device.index()) if on == "gpu" else "cpu"}
    alone, failures, notes = _try(run, [], clean, OPERATIONS, ends_at)
    if not alone:
        return DevicePointerSupport(frozenset(), f"in a world of one: {failures.get(MESSAGES, 'no operation passed')}")
    pair = _two_rank_launch(environment)
    together: list[str] = []
    started = False
    if pair is not None:
        together, more, seen = _try(run, pair[0], clean | pair[1], alone, ends_at)
        started, failures = "two" in seen, failures | more
    if not started:
        reason = failures.get(alone[0], "no mpirun was found")
        if "cuda" in notes and MESSAGES in alone:
            text = f"self-messages arrive and the library reports CUDA support; two ranks could not be tried ({reason})"
            return DevicePointerSupport(frozenset((MESSAGES,)), text)
        return DevicePointerSupport(
            frozenset(), f"two ranks could not be tried ({reason}); {VARIABLE}=yes if the site says so"
        )
    missing = "; ".join(f"{name}: {failures[name]}" for name in OPERATIONS if name in failures)
    return DevicePointerSupport(frozenset(together), f"tried between two ranks{'; ' + missing if missing else ''}")


def _try(
    run: Run, launch: Sequence[str], environment: Mapping[str, str], operations: Sequence[str], ends_at: float
) -> tuple[list[str], dict[str, str], set[str]]:
    # `launch` is the mpirun command for two ranks, or []. The third result contains "two" if two ranks ran.
    passed: list[str] = []
    failures: dict[str, str] = {}
    notes: set[str] = set()
    left = list(operations)
    while left:
        rest_s = ends_at - time.monotonic()
        if rest_s <= 0:
            return passed, failures | dict.fromkeys(left, f"not tried, {BUDGET_S:g} s were spent"), notes
        words = [*launch, sys.executable, "-P", "-m", MODULE, *left]
        outcome = run(words, environment, min(CHILD_LIMIT_S, rest_s))
        rows = _parse_rows(outcome.lines)
        notes |= {note for row in rows for note in row.get("notes", ())}
        passed += [row["passed"] for row in rows if "passed" in row]
        failures |= {row["failed"]: row["why"] for row in rows if "failed" in row}
        tried = {*passed, *failures}
        left = [name for name in left if name not in tried]
        if left:  # the child died in the first of them: try the rest in a new child
            failures[left.pop(0)] = outcome.end or "the child ended without a result"
        if not any("ready" in row for row in rows):  # it died before the first operation, as the next child would
            return passed, failures | dict.fromkeys(left, outcome.end), notes
    return passed, failures, notes


def _parse_rows(lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _two_rank_launch(environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    try:
        launcher = mpirun.find(environment)
    except MissingCapabilityError:
        return None
    local = ["-launcher", "fork"] if launcher.vendor in (mpirun.MPICH, mpirun.INTEL_MPI) else []
    return mpirun.command(launcher, 2, [], {}, local, {}), mpirun.settings(launcher, environment)


def stripped(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environment`` without the variables of this job's launcher, for child processes."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_LAUNCHERS) and name not in _LAUNCHERS_ALONE
    }


def _run(words: Sequence[str], environment: Mapping[str, str], limit_s: float) -> ProbeOutcome:
    child = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a line may end in the middle of a character
        env=dict(environment),
        start_new_session=True,  # so that all its processes can be ended with it
    )
    try:
        out, complaints = child.communicate(timeout=limit_s)
        end = _describe_end(child.returncode, complaints)
    except subprocess.TimeoutExpired:
        out = _kill_child(child)
        end = f"no end within {limit_s:.3g} s"
    return ProbeOutcome(tuple(out.splitlines()), end)


def _kill_child(child: "subprocess.Popen[str]") -> str:
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(child.pid, number)
        try:
            return child.communicate(timeout=END_LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def _describe_end(code: int, complaints: str) -> str:
    if code == 0:
        return ""
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"exit code {code}"
    last = (complaints.strip().splitlines() or [""])[-1][:200]
    return f"{name}{': ' + last if last else ''}"
