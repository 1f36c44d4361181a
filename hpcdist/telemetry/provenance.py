"""Provenance of a result: versions, machine and job, as flat strings for root attributes and reports."""

import datetime
import math
import os
import platform
import pwd
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hpcdist import __version__
from hpcdist.reporting.machine import package_version, processor

PACKAGES: Final = ("numpy", "mpi4py", "h5py", "numba")
JOB_VARIABLES: Final = ("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")


def provenance(
    *,
    mpi_library: str = "",
    hosts: Sequence[str] | None = None,
    anonymous: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return a dict of texts that describe versions, machine and job. Unknown values are left out. Local."""
    # The keys are stable: created_utc, git_commit, numpy_version, ...
    values = {"created_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    values |= {f"{name}_version": version for name in PACKAGES if (version := package_version(name))}
    values["hpcdist_version"] = __version__  # also for a checkout that is not installed
    values["python_version"] = platform.python_version()
    values["git_commit"] = git_commit(Path(__file__).resolve().parents[1])
    values["platform"] = platform.platform()
    values["processor"] = processor()
    values["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if mpi_library:
        values["mpi_library"] = mpi_library.strip()
    if not anonymous:
        values["hosts"] = ",".join(hosts if hosts is not None else [socket.gethostname()])
    values |= {name.lower(): environment[name] for name in JOB_VARIABLES if name in environment}
    return values


def git_commit(package: Path) -> str:
    """Return the git commit of ``package``, with "+changes" if files were edited, or "unknown: " and a reason."""

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


JOB_ID_VARIABLES: Final = ("SLURM_JOB_ID", "PBS_JOBID")
# Labels, and the Slurm and PBS variables that provide them.
OWNER_VARIABLES: Final = {
    "user": ("SLURM_JOB_USER", "PBS_O_LOGNAME"),
    "account": ("SLURM_JOB_ACCOUNT", "PBS_ACCOUNT"),
    "partition": ("SLURM_JOB_PARTITION", "PBS_QUEUE"),
    "qos": ("SLURM_JOB_QOS",),
}


def job_number(environment: Mapping[str, str] = os.environ) -> str:
    """Return the job number of Slurm or PBS, or "" outside of a job. ``environment``: environment variables. Local."""
    return _first_set(JOB_ID_VARIABLES, environment)


def job_owner(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a dict with the user, account, partition and qos of the job. An unknown value is ""."""
    owner = {label: _first_set(names, environment) for label, names in OWNER_VARIABLES.items()}
    if not owner["user"]:
        try:
            owner["user"] = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # containers may know only the number
            owner["user"] = str(os.getuid())
    return owner


def _first_set(names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


SMAPS_ROLLUP: Final = Path("/proc/self/smaps_rollup")
_UNIT_BYTES: Final = 1024  # kB of /proc are KiB


def pss_bytes() -> float:
    """Return the proportional set size (PSS) of this process in bytes, or NaN if unknown. Local."""
    try:
        lines = SMAPS_ROLLUP.read_text().splitlines()
    except OSError:
        return math.nan
    fields = [line.split() for line in lines if line.startswith("Pss:")]
    return float(fields[0][1]) * _UNIT_BYTES if fields else math.nan
