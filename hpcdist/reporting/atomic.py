"""Atomic replacement of files: a reader sees the old content or the new content, never a part of it.

New content is written to a temporary file in the target's directory, then renamed. A symbolic link is replaced,
never followed.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from hpcdist.errors import StorageError

SUFFIX: Final = ".new"
LEFT_S: Final = 3600.0  # a temporary file older than this belongs to a killed writer
_NAME: Final = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.ASCII | re.DOTALL)


def temporary_path(path: Path) -> Path:
    """Return a random path in the directory of ``path``, for a temporary file that will be renamed to ``path``."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}{SUFFIX}")


def create(path: Path, mode: int = 0o666) -> int:
    """Create ``path`` with permissions ``mode``. Return a write descriptor. Raises OSError if the file exists."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` if the block succeeds. ``durable``: also fsync it. Raises OSError."""
    new = temporary_path(path)
    descriptor = create(new, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        discard(new)
        raise
    if durable:
        sync(path.parent)


def write(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Atomically replace the file ``path`` with ``content``. Text is encoded as UTF-8. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save(path: Path, content: str | bytes, cure: str = "", *, parents: bool = False) -> None:
    """Replace ``path`` by ``content`` atomically. ``cure``: advice in the StorageError that is raised on failure."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}{cure and f'; {cure}'}") from error


def discard(path: Path) -> None:
    """Remove ``path`` if it exists. Ignores failures."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path | None:
    """Rename ``path`` to ``path.damaged-N`` with the lowest free N. Return the new path, or None if renaming fails."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    try:
        path.rename(aside)
    except OSError:
        return None
    return aside


def own_directory(path: Path) -> None:
    """Create the directory ``path``. If ``path`` is a symbolic link, remove the link first. Raises OSError."""
    if path.is_symlink():
        with suppress(FileNotFoundError, IsADirectoryError):  # another process has replaced it
            path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def sweep(directory: Path, older_s: float = LEFT_S, target_name: str = "") -> None:
    """Remove temporary files in ``directory`` that are at least ``older_s`` seconds old. Ignores failures.

    ``target_name``: name of the target whose temporary files are removed, or "" for all targets. ``older_s`` = 0 is
    unsafe while other processes write.
    """
    prefix = f".{target_name}." if target_name else "."  # of the temporary files to remove
    with suppress(OSError):
        for entry in list(os.scandir(directory)):
            if not (_NAME.fullmatch(entry.name) and entry.name.startswith(prefix)):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime >= older_s:
                with suppress(OSError):  # a directory, or another user's file
                    os.unlink(entry.path)


def sync(directory: Path) -> None:
    """Wait until the entries of ``directory`` are on disk (fsync). Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(file: Path) -> None:
    """Raise StorageError if ``file`` cannot be created or replaced in its directory."""
    folder = file.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "is not writable" if folder.is_dir() else "is not a directory"
        raise StorageError(f"{file} cannot be written, because its parent {folder} {reason}; choose another path")
