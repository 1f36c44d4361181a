"""Where a result comes from: versions, machine and job, as flat strings for root attributes and reports."""

import datetime
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from hpcdist import __version__

PACKAGES: Final = ("numpy", "mpi4py", "h5py", "numba")
JOB: Final = ("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")


def provenance(
    *,
    mpi_library: str = "",
    hosts: Sequence[str] | None = None,
    anonymous: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return who, when and what as text; what is not known is left out, with the reason where there is one (local).

    ``hosts`` are the names of the nodes (default: this one); ``anonymous`` leaves them out, for results that are
    published. Keys are stable: ``created_utc``, ``git_commit``, ``numpy_version``, ...
    """
    found = {"created_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    found |= {f"{name}_version": version for name in PACKAGES if (version := _version(name))}
    found["hpcdist_version"] = __version__  # of a checkout, too, which is installed nowhere
    found["python_version"] = platform.python_version()
    found["git_commit"] = git_commit(Path(__file__).resolve().parents[1])
    found["platform"] = platform.platform()
    found["processor"] = processor()
    found["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if mpi_library:
        found["mpi_library"] = mpi_library.strip()
    if not anonymous:
        found["hosts"] = ",".join(hosts if hosts is not None else [socket.gethostname()])
    found |= {name.lower(): environment[name] for name in JOB if name in environment}
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def git_commit(package: Path) -> str:
    """Return the commit of the clone that ``package`` lies in, with "+changes" when it was edited, else why not.

    A clone counts only when the package lies directly in it: an installed wheel may lie in anybody's repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.parent:
            return "unknown: installed, not a clone"
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(package))
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except FileNotFoundError:
        return "unknown: git is not installed"
    except subprocess.SubprocessError:
        return "unknown: not a clone with a commit"


def processor() -> str:
    """Return the model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # not Linux
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
