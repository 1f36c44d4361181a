"""Files of a fixed size that a process writes through memory, so that what it wrote outlives it."""

import mmap
import os
from pathlib import Path

from hpcdist.errors import StorageError


def create(path: Path, size: int, what: str, cure: str) -> mmap.mmap:
    """Make ``path`` anew and map it (local). Raises StorageError, which names ``what`` needs it and the ``cure``.

    The whole size is allocated at once, because a write into a hole of a mapping on a full disk would be a SIGBUS.
    """
    try:
        path.unlink(missing_ok=True)  # truncating would be a SIGBUS for whoever still maps the old file
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{what} needs {size} bytes at {path}: {error}; {cure}") from error
