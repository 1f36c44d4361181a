"""Small files of the kernel under /sys and /proc, read fast: a sampler reads dozens of them ten times a second."""

import os
from pathlib import Path
from typing import Final

SIZE: Final = 1 << 16


def text(path: str | Path) -> str:
    """Return what the file says now (local). Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(handle, SIZE)]
        while parts[-1]:
            parts.append(os.read(handle, SIZE))
    finally:
        os.close(handle)
    return b"".join(parts).decode(errors="replace")


def reason(path: str | Path, error: Exception) -> str:
    """Return why ``path`` could not be read, and what the site can do where its permissions forbid it."""
    if isinstance(error, PermissionError):
        return f"{path} may be read by root only; ask the site to let users read it (chmod a+r {path})"
    return f"{path} cannot be read: {error}"
