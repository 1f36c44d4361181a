"""Atomic replacement of files: a reader sees the old content or the new one, never a part.

A file is written beside its place, under a new random name (``O_EXCL``), and renamed: whatever lies at the place, also
a symbolic link, is replaced and never followed. A writer that is killed in between leaves a file under the random name,
which `sweep` removes.
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
LEFT_S: Final = 3600.0  # an older temporary file belongs to a writer that was killed
_NAME: Final = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.ASCII | re.DOTALL)


def temporary_path(path: Path) -> Path:
    """Return a new random name beside ``path`` for the file that will replace it; no file is made."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}{SUFFIX}")


def create(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor for writing of the new file ``path``. Raises FileExistsError, also for a link; OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` at the end of the block, unless the block raises. Raises OSError.

    ``durable`` waits for the disk: the old content or the new one is there also after the machine fails meanwhile.
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
        discard(new)
        raise
    if durable:
        sync(path.parent)


def write(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace ``path`` by a file with ``content``, text as UTF-8. Raises OSError."""
    with replacing(path, mode=mode, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save(path: Path, content: str | bytes, cure: str = "", *, parents: bool = False) -> None:
    """Replace ``path`` as `write` does, its directory made with ``parents``. Raises StorageError, with the ``cure``."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}{cure and f'; {cure}'}") from error


def discard(path: Path) -> None:
    """Remove ``path`` if it exists; ignore failures, so that clean-up does not hide the first error (local)."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def set_aside(path: Path) -> Path | None:
    """Rename ``path`` to the first free ``path.damaged-N`` and return that; None where it cannot be renamed."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    try:
        path.rename(aside)
    except OSError:
        return None
    return aside


def own_directory(path: Path) -> None:
    """Make the directory ``path`` and its parents; a symbolic link there is removed, not followed. Raises OSError.

    Several processes may call it at the same time.
    """
    if path.is_symlink():
        with suppress(FileNotFoundError, IsADirectoryError):  # another process has replaced it
            path.unlink()
    path.mkdir(parents=True, exist_ok=True)


def sweep(directory: Path, older_s: float = LEFT_S, of: str = "") -> None:
    """Remove temporary files of killed writers in ``directory`` that are ``older_s`` seconds old; ignores failures.

    ``older_s = 0`` is for the only writer of the directory, or of the file named ``of``.
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
    """Wait until the entries of ``directory`` are on the disk (fsync). Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(file: Path) -> None:
    """Raise StorageError where ``file`` cannot be written, or replaced, in its folder (local)."""
    folder = file.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written" if folder.is_dir() else "is no directory"
        raise StorageError(f"{file}: cannot be written: {folder} {reason}")
