"""MPI library checks: the library that mpi4py loads, the vendor of the launcher, and their match.

MPI_Init may abort on a login node, so nothing here initialises MPI: a child process queries the library.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import OPERATIONS
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.comm.mpi import cuda_aware
from hpcdist.comm.mpi.cuda_aware import CHILD_LIMIT_S
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting.units import counted

OK: Final = "OK"
WARN: Final = "WARN"
FAIL: Final = "FAIL"
WITHOUT_THREADS: Final = (
    "without it there is no progress thread for overlap; build MPI with --enable-mpi-thread-multiple"
)


@dataclass(frozen=True)
class Check:
    """Result of one check: a row in the report of `hpcdist doctor`."""

    name: str
    status: str
    found: str  # text about the result
    cure: str = ""  # advice, or ""


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that mpi4py loads: its version string, vendor, version number, and file path."""

    text: str
    vendor: str
    version: str
    path: str


# MPI is loaded, not started. The library's file is the file that the loader mapped, whatever name was requested.
_ASK = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
names = ("libmpi.so", "libmpich", "libmpi_abi", "libmpi_cray")
mapped = sorted(name for name in files if name.rsplit("/", 1)[-1].startswith(names))
print(json.dumps({"text": MPI.Get_library_version().strip("\\0 \\n"), "path": mapped[0] if mapped else ""}))
"""


def load_library() -> MpiLibrary:
    """Return the MPI library that mpi4py would use. Raises MissingCapabilityError if there is no MPI library."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MissingCapabilityError(
            f"loading the MPI library did not end within {CHILD_LIMIT_S:g} s; check the MPI installation with "
            "python -c 'from mpi4py import MPI'"
        ) from error
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise MissingCapabilityError(f"mpi4py cannot load an MPI library ({reason}); load the MPI module of mpi4py")
    answer = json.loads(child.stdout.splitlines()[-1])
    vendor, version = recognise_library(answer["text"])
    return MpiLibrary(answer["text"].splitlines()[0].strip(), vendor, version, answer["path"])


def recognise_library(text: str) -> tuple[str, str]:
    """Return (vendor, version) from ``text``, the result of MPI_Get_library_version, or ("unknown", "")."""
    words = text.replace(",", " ").split()
    for start, vendor in (("Open MPI", mpirun.OPEN_MPI), ("Intel(R) MPI", mpirun.INTEL_MPI), ("MPICH", mpirun.MPICH)):
        if text.startswith(start):
            return vendor, next((word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit()), "")
    return "unknown", ""


def check_library_and_launcher(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Check the MPI library and the launcher, and that both belong to the same MPI. Return a list of results."""
    checks: list[Check] = []
    loaded = started = None
    try:
        loaded = load_library()
        checks.append(Check("MPI library", OK, f"{short_version(loaded.text)} ({loaded.path or 'file unknown'})"))
    except MissingCapabilityError as error:
        cure = "install hpcdist[workstation], or load the site's MPI module (mpi4py finds it through LD_LIBRARY_PATH)"
        checks.append(Check("MPI library", FAIL, str(error), cure))
    try:
        started = mpirun.find(environment)
        checks.append(Check("launcher", OK, f"{started.vendor} {started.version} ({started.path})"))
        checks.append(Check("signals to stop", OK, mpirun.answer_to_signals(started)))
    except MissingCapabilityError as error:
        cure = "install hpcdist[workstation] or load the site's MPI module; under Slurm srun starts the ranks"
        checks.append(Check("launcher", WARN, str(error), cure))
    if loaded is not None and started is not None:
        checks.append(check_launcher_match(loaded, started))
    if second := mpirun.second_mpi(environment.get("LOADEDMODULES", "").split(":")):
        checks.append(Check("one MPI", WARN, second, mpirun.SECOND_MPI_CURE))
    return checks


def check_launcher_match(loaded: MpiLibrary, started: mpirun.Launcher) -> Check:
    """Check that launcher ``started`` and library ``loaded`` belong to one MPI. Otherwise each rank runs alone."""
    pairing = f"{started.vendor} {started.version} starts ranks that load {loaded.vendor} {loaded.version}"
    compatible = {mpirun.MPICH, mpirun.INTEL_MPI}  # they share a binary interface and a process manager
    if "unknown" in (loaded.vendor, started.vendor):
        return Check("launcher match", WARN, pairing, "verify it with `hpcdist doctor --launch`")
    if loaded.vendor != started.vendor and not {loaded.vendor, started.vendor} <= compatible:
        cure = (
            f"put the mpirun that belongs to {loaded.path or loaded.vendor} first on PATH, or load the other MPI module"
        )
        return Check("launcher match", FAIL, pairing, cure)
    if loaded.vendor == started.vendor and loaded.version.split(".")[0] != started.version.split(".")[0]:
        return Check("launcher match", WARN, pairing, "use the mpirun of the same installation")
    return Check("launcher match", OK, pairing)


def check_device_pointers(environment: Mapping[str, str] = os.environ) -> Check:
    """Check whether MPI accepts pointers to GPU memory. On a node with GPUs, this starts child processes."""
    name = "CUDA-aware MPI"
    try:
        answer = cuda_aware.requested_answer(environment)
    except ConfigurationError as error:
        return Check(name, FAIL, str(error), f"unset {cuda_aware.VARIABLE}")
    staged = "device buffers are staged through pinned memory of the host"
    if answer != "auto":
        used = "device pointers are handed to MPI, untested" if answer == "yes" else staged
        return Check(name, OK, f"{used} ({cuda_aware.VARIABLE}={answer})")
    try:
        usable = device.count()
    except MissingCapabilityError:
        usable = 0  # the GPU check reports the reason
    if not usable:
        return Check(name, OK, "not tried: no GPU is usable here")
    verdict = cuda_aware.probe_cached(environment, renewed=True)
    allowed = [operation for operation in OPERATIONS if operation in verdict.operations]
    used = f"device pointers are handed to MPI in {', '.join(allowed)}" if allowed else staged
    return Check(name, OK, f"{used}: {verdict.reason}")


def check_world(comm: Communicator, launch: LaunchEnvironment, library_text: str) -> list[Check]:
    """Check an allreduce and the thread level of the MPI world ``comm``. Return a list of results. Collective.

    ``launch``: variables of the launcher. ``library_text``: version string of the MPI library.
    """
    total = np.ones(1)
    comm.allreduce(total)
    nodes = comm.nodes()
    place = f"{counted(comm.size, 'rank')} on {counted(nodes.count, 'node')}"
    summary = f"{place}, announced by {launch.launcher}; {short_version(library_text)}"
    right = total[0] == comm.size
    arrived = Check(
        "world", OK if right else FAIL, summary if right else f"{summary}; but an allreduce gave {total[0]:g}"
    )
    if comm.supports("thread_multiple"):
        return [arrived, Check("thread level", OK, "MPI_THREAD_MULTIPLE")]
    return [arrived, Check("thread level", WARN, "below MPI_THREAD_MULTIPLE", WITHOUT_THREADS)]


def short_version(library_text: str) -> str:
    """Return the MPI version string ``library_text`` without the details of the package build."""
    return " ".join(library_text.split(", package")[0].split())
