"""User cache: small JSON files below XDG_CACHE_HOME that keep measurements for later starts.

Their content decides how a job runs, so a file that is not regular, that another user could have written, or that is
too large is not read. Files are replaced atomically, and only their owner can write them.
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

LARGEST_BYTES: Final = 1 << 18
# Prefixes of variables that change how the MPI library sends messages. Those of its launcher (the working directory,
# ...) differ from job to job and are not among them.
MPI_SETTINGS: Final = (
    *(f"OMPI_MCA_{kind}" for kind in ("accelerator", "bml", "btl", "coll", "mtl", "op_", "pml", "smsc")),
    *("MPIR_CVAR_", "UCX_", "FI_"),
)
# Differ from job to job, so they are no part of a key (`hpcdist.comm.launch.mpirun`).
JOB_SETTINGS: Final = ("OMPI_MCA_btl_sm_backing_directory",)


def mpi_settings(environment: Mapping[str, str], *more: str) -> dict[str, str]:
    """Return the variables of ``environment`` that change what MPI does, and those that begin with one of ``more``."""
    begin = (*MPI_SETTINGS, *more)
    return {
        name: text for name, text in sorted(environment.items()) if name.startswith(begin) and name not in JOB_SETTINGS
    }


def directory(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of files of ``kind``: hpcdist/``kind`` in XDG_CACHE_HOME, by default ~/.cache (local).

    Raises StorageError for a user without a home directory.
    """
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hpcdist" / kind
    except RuntimeError as error:  # HOME is not set, and the user database has no entry
        raise StorageError(
            f"measurements have no place to be kept ({error}): set HOME, or XDG_CACHE_HOME to a directory"
        ) from error


def digest(key: Mapping[str, Any]) -> str:
    """Return a hash of ``key`` for a file name, the same in every process (local)."""
    return hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16).hexdigest()


def read(path: Path) -> str:
    """Return the text of a regular file that only this user, or root, can write (local).

    Raises OSError, and ValueError with the reason where the file is not trusted.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise ValueError("somebody else could have written it; remove it, or take the permission away")
        if status.st_size > LARGEST_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, more than {LARGEST_BYTES}")
        return file.read(LARGEST_BYTES).decode()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``content`` as JSON; its directory is made (local). Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write(path, json.dumps(content, indent=1), mode=0o600)
