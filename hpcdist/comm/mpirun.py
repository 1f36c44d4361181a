"""The launcher that belongs to this environment, and what it needs to start ranks here (no MPI is started).

The virtual environment's own mpirun comes first: PATH may hold that of another MPI, which would start N singletons.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.errors import MissingCapabilityError

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
INTEL_MPI: Final = "Intel MPI"
NAMES: Final = ("mpirun", "mpiexec")
VERSION_LIMIT_S: Final = 20.0

_VENDORS = (
    (re.compile(r"\(Open MPI\) (\S+)|\(OpenRTE\) (\S+)|\(PRRTE\) (\S+)"), OPEN_MPI),
    (re.compile(r"Intel\(R\) MPI Library.*?Version (\S+)", re.DOTALL), INTEL_MPI),
    (re.compile(r"HYDRA build details:\s+Version:\s+(\S+)"), MPICH),
)
# Where a resource manager owns the cores, neither its binding nor its count of slots is overruled.
_RESOURCE_MANAGERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Launcher:
    """An mpirun: where it is, whose it is ("unknown" where it does not say), and its version."""

    path: Path
    vendor: str
    version: str


def find(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the mpirun beside this Python, else the first on PATH. Raises MissingCapabilityError without any."""
    path = candidates(environment)
    if not path:
        raise MissingCapabilityError(
            f"no mpirun beside {sys.executable} and none on PATH; install hpcdist[workstation], or load the site's MPI "
            "module and build mpi4py against it"
        )
    return identify(path[0])


def candidates(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return every mpirun or mpiexec that could be meant, the one to use first."""
    folders = [str(Path(sys.executable).parent), *environment.get("PATH", "").split(os.pathsep)]
    found = [shutil.which(name, path=folder) for folder in folders if folder for name in NAMES]
    return list(dict.fromkeys(Path(path) for path in found if path))


def identify(path: Path) -> Launcher:
    """Ask ``path`` whose it is."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=VERSION_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"{path} --version did not run ({error}); repair or remove this MPI") from error
    return Launcher(path, *recognise(done.stdout + done.stderr))


def recognise(text: str) -> tuple[str, str]:
    """Return vendor and version from what ``mpirun --version`` or an MPI library says of itself."""
    for pattern, vendor in _VENDORS:
        match = pattern.search(text)
        if match:
            return vendor, next(group for group in match.groups() if group)
    return "unknown", ""


def command(
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    settings: Mapping[str, str],
    extra: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return the command line that starts ``program`` on ``ranks`` ranks with ``settings`` in their environment.

    ``extra`` are options of the launcher itself, placed last so that they win.
    """
    line = [str(launcher.path)]
    if launcher.vendor == OPEN_MPI:
        # The UCX one-sided component of the wheels complains at every start; windows work without it.
        line += ["--mca", "osc", "^ucx"]
        if not any(name in environment for name in _RESOURCE_MANAGERS):
            line += ["--bind-to", "none", "--oversubscribe"]
        for name in settings:
            line += ["-x", name]  # Open MPI passes the environment to ranks on this host only
    return [*line, "-n", str(ranks), *extra, *program]


def per_node(launcher: Launcher, ranks: int | None) -> list[str]:
    """Return the options that put ``ranks`` ranks on each node; none for None.

    Open MPI then does not bind: it would give each rank one core, whatever the number of its threads.
    """
    if ranks is None:
        return []
    if launcher.vendor == OPEN_MPI:
        return ["--map-by", f"ppr:{ranks}:node", "--bind-to", "none"]
    return ["-ppn", str(ranks)]


def settings(launcher: Launcher, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to add for the launcher and its ranks: one thread a rank, and root where we are root."""
    added = {name: "1" for name in _THREAD_VARIABLES if name not in environment}
    if launcher.vendor == OPEN_MPI and os.geteuid() == 0:
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return added
