"""User cache: small JSON files in ``$XDG_CACHE_HOME`` that keep measurements for later starts.

Cached content decides how a job runs, so files that another user can write are rejected.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import StorageError
from hpcdist.reporting import atomic
from hpcdist.reporting.machine import package_version

LARGEST_BYTES: Final = 1 << 18
# Prefixes of variables that change how the MPI library sends messages. Variables of its launcher (such as the working
# directory) are not included, because they differ from job to job.
MPI_SETTINGS: Final = (
    *(f"OMPI_MCA_{kind}" for kind in ("accelerator", "bml", "btl", "coll", "mtl", "op_", "pml", "smsc")),
    *("MPIR_CVAR_", "UCX_", "FI_"),
)
# Excluded from cache keys, because it differs from job to job (`hpcdist.comm.launch.mpirun`).
JOB_SETTINGS: Final = ("OMPI_MCA_btl_sm_backing_directory",)


def mpi_settings(environment: Mapping[str, str], *more: str) -> dict[str, str]:
    """Return the environment variables that change how MPI sends messages. ``more``: further prefixes of names."""
    begin = (*MPI_SETTINGS, *more)
    return {
        name: text for name, text in sorted(environment.items()) if name.startswith(begin) and name not in JOB_SETTINGS
    }


def software() -> dict[str, str]:
    """Return {package: version} for the packages whose versions affect stored measurements."""
    return {name: package_version(name, "not installed") for name in ("hpcdist", "mpi4py", "numpy")}


def directory(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache directory of a ``kind``: ``$XDG_CACHE_HOME/hpcdist/<kind>``, or ``~/.cache/hpcdist/<kind>``.

    ``environment``: environment variables. Raises StorageError if the user has no home directory.
    """
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hpcdist" / kind
    except RuntimeError as error:  # HOME is not set, and the user database has no entry
        raise StorageError(
            f"the cache directory for measurements is unknown ({error}); set HOME or XDG_CACHE_HOME to a directory"
        ) from error


def digest(key: Mapping[str, Any]) -> str:
    """Return a hash of the mapping ``key`` as a hexadecimal text. The hash is the same in every process."""
    return hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16).hexdigest()


def read(path: Path) -> str:
    """Return the text of the file ``path``. Raises OSError, or ValueError if another user can write the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                "the cache or state file of hpcdist is not a regular file, but a directory or special file; remove the "
                "directory or file"
            )
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise ValueError(
                f"another user could have written the cache or state file of hpcdist (owner {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):o}); remove the file, or run `chmod go-w` on your own file"
            )
        if status.st_size > LARGEST_BYTES:
            raise ValueError(
                f"the cache or state file of hpcdist has {status.st_size} bytes, expected at most {LARGEST_BYTES}; "
                "remove the file"
            )
        return file.read(LARGEST_BYTES).decode()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file ``path`` by ``content`` as JSON. Creates the parent directory. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write(path, json.dumps(content, indent=1), mode=0o600)
