"""What the probe of `cuda_aware` found, kept for later starts: one JSON file for each MPI library, GPU and settings.

The name of a file is a hash of what the answer depends on; the whole of it stands inside, and is compared. Nothing here
ends a job: a file that cannot be used or written costs a probe.
"""

import datetime
import importlib.metadata
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from hpcdist.arrays import device
from hpcdist.comm import kept_files
from hpcdist.comm.handover import OPERATIONS
from hpcdist.errors import MissingCapabilityError

FORMAT: Final = 1
KIND: Final = "device_pointers"
PACKAGES: Final = ("hpcdist", "mpi4py", "numpy")
# Beside these, which libraries the loader finds: a UCX with CUDA and one without have the same MPI library above them.
SETTINGS: Final = (*kept_files.MPI_SETTINGS, "MPICH_GPU", "I_MPI_OFFLOAD", "MV2_", "PSM2_", "PSM3_", "LD_")


def key(library: str, launcher: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return what an answer depends on, for the current GPU; None where that cannot be found out (local).

    ``library`` is the MPI library's own version string, ``launcher`` the path of the mpirun that starts two ranks.
    """
    if not library:
        return None
    try:
        module = device.cupy()
        runtime = module.cuda.runtime
        name = runtime.getDeviceProperties(device.index())["name"]
        gpus = f"{device.count()} of {name.decode() if isinstance(name, bytes) else name}"
        driver = int(runtime.driverGetVersion())
    except (MissingCapabilityError, RuntimeError):  # what cupy raises for CUDA is a RuntimeError
        return None
    return {
        "mpi_library": library,
        "launcher": launcher,
        "gpus": gpus,
        "driver": driver,
        "cupy": str(module.__version__),
        "settings": {name: value for name, value in sorted(environment.items()) if name.startswith(SETTINGS)},
        "software": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def path_of(wanted: Mapping[str, Any]) -> Path:
    """Return the file for ``wanted``, as `key` returned it (local). Raises StorageError as `kept_files` does."""
    return kept_files.directory(KIND) / f"{kept_files.digest(wanted)}.json"


def read(wanted: Mapping[str, Any]) -> tuple[list[str], str] | None:
    """Return the operations and the reason that were kept for ``wanted``; None where no file can be used (local)."""
    try:
        path = path_of(wanted)
        content = json.loads(kept_files.read(path))
        operations, reason, since = (content[name] for name in ("operations", "reason", "created_utc"))
        fits = content["format"] == FORMAT and content["key"] == wanted and set(operations) <= set(OPERATIONS)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return (operations, f"{reason}; found on {since} and kept in {path}") if fits else None


def kept(wanted: Mapping[str, Any], operations: Collection[str], reason: str) -> str:
    """Write what was found for ``wanted``; return why it could not be, "" where it was (local)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {
        "format": FORMAT,
        "key": dict(wanted),
        "operations": sorted(operations),
        "reason": reason,
        "created_utc": now,
    }
    try:
        kept_files.write(path_of(wanted), content)
    except OSError as error:
        return f"not kept: {error}"
    return ""
