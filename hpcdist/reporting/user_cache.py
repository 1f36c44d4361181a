"""User cache: small files that one start keeps for later ones, below XDG_CACHE_HOME.

What is read decides what a job does, so a file that is no regular file, that somebody else could have written, or
that is too large is not read. A file appears whole or not at all, and only its owner can write it.
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
# Variables that change what the MPI library does with a message. Those of its launcher, such as the working directory,
# differ from job to job.
MPI_SETTINGS: Final = (
    *(f"OMPI_MCA_{kind}" for kind in ("accelerator", "bml", "btl", "coll", "mtl", "op_", "pml", "smsc")),
    *("MPIR_CVAR_", "UCX_", "FI_"),
)


def directory(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where files of ``kind`` are: hpcdist/``kind`` in XDG_CACHE_HOME, by default in ~/.cache (local).

    Raises StorageError for a user without a home directory.
    """
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hpcdist" / kind
    except RuntimeError as error:  # HOME is not set, and no entry of the user's says where it is
        raise StorageError(
            f"measurements have no place to be kept ({error}): set HOME, or XDG_CACHE_HOME to a directory"
        ) from error


def digest(key: Mapping[str, Any]) -> str:
    """Return a name for ``key``, the same in every process (local)."""
    return hashlib.blake2b(json.dumps(dict(key), sort_keys=True).encode(), digest_size=16).hexdigest()


def read(path: Path) -> str:
    """Return what is in a regular file that nobody but this user, or root, can write (local).

    Raises OSError, and ValueError with the reason why the file is not read.
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
    """Write ``content`` as JSON in the place of what was there, and the directory before (local). Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write(path, json.dumps(content, indent=1), mode=0o600)
