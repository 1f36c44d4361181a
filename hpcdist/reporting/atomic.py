"""Atomic replacement of files: each takes its place whole or not at all.

A file is written beside its place, under a random name that nothing has yet (``O_EXCL``), and renamed: whatever lies
at the place, be it a link, is replaced and never followed. A writer that is killed in between leaves a file of that
name, which `sweep` removes.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

SUFFIX: Final = ".new"
LEFT_S: Final = 3600.0  # what is older belongs to a writer that was killed
_NAME: Final = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.ASCII | re.DOTALL)


def temporary_path(path: Path) -> Path:
    """Return a new name beside ``path`` for what is to take its place; nothing is made."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}{SUFFIX}")


def create(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor for writing of the new file ``path``. Raises FileExistsError, also for a link; OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of ``path`` at the end, unless something is raised. Raises OSError.

    ``durable`` waits for the disk: the old content or the new one is there even where the machine fails meanwhile.
    """
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
        with suppress(OSError):  # where the directory is gone or closed to us: the first error says so
            new.unlink()
        raise
    if durable:
        sync(path.parent)


def write(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Let ``path`` hold ``content``, text as UTF-8, in the place of what was there. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def set_aside(path: Path) -> Path | None:
    """Rename what lies at ``path`` to the first free ``.damaged-N`` and return that; None where it cannot be."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    try:
        path.rename(aside)
    except OSError:
        return None
    return aside


def own_directory(path: Path) -> None:
    """Make the directory ``path``, and those above; a link in its place is removed, not followed. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def sweep(directory: Path, older_s: float = LEFT_S, of: str = "") -> None:
    """Remove what killed writers left in ``directory``, if it is ``older_s`` seconds old; failure is no matter.

    Zero is for whoever alone writes there, or alone writes the file named ``of``.
    """
    prefix = f".{of}." if of else "."
    with suppress(OSError):
        for entry in list(os.scandir(directory)):
            if not (_NAME.fullmatch(entry.name) and entry.name.startswith(prefix)):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime >= older_s:
                with suppress(OSError):  # a directory, or not ours
                    os.unlink(entry.path)


def sync(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
