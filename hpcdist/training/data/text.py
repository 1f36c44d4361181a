"""Text as bytes: one file, all files of a directory, or the source text of the Python standard library."""

import fcntl
import hashlib
import os
import platform
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpcdist.errors import DataError, StorageError
from hpcdist.reporting import atomic, regular
from hpcdist.training.data.samples import FileArray

SNIFFED_BYTES = 8192
# No part of the library: what others installed, and what only this machine made.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


def of_file(path: Path) -> tuple[FileArray, str]:
    """Return the bytes of a text file, and a description. Raises DataError."""
    return of_bytes(path), f"{path}"


def of_directory(path: Path) -> tuple[FileArray, str]:
    """Return the bytes of all text files in and below ``path``, hidden and binary ones left out. Raises DataError."""
    files = [name for name in _walk(path, set()) if not os.path.basename(name).startswith(".")]
    if not files:
        raise DataError(f"data.path = {path}: the directory holds no files; name a text file or a directory of them")
    return _concatenated(path, files), f"text files in {path}"


def of_standard_library() -> tuple[FileArray, str]:
    """Return the source text of the Python standard library on this machine. Raises DataError where it has none."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [name for name in _walk(root, LEFT_OUT) if name.endswith(".py")]
    if not files:
        raise DataError(f"{root} holds no source text of the Python standard library; set data.path to a text file")
    return _concatenated(root, files), f"{len(files)} files of the Python {platform.python_version()} standard library"


def of_bytes(path: Path) -> FileArray:
    """Return the bytes of a file. Raises DataError when it is empty or cannot be read."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"data.path = {path}: the file is empty")
        return FileArray(path, np.uint8, 0, (size,))
    except OSError as error:
        raise DataError(f"data.path = {path} cannot be read: {error.strerror or error}") from error


def _walk(root: Path, left_out: set[str]) -> list[str]:
    """Return the files below ``root`` by relative path, in an order that only their names decide.

    Sorted by a hash of the name, the tail is a fair sample of all files: it becomes the validation data.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    names = []
    for folder, below, files in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if name not in left_out and not name.startswith(".")]
        paths = (os.path.join(folder, name) for name in files)
        names += [os.path.relpath(path, root) for path in paths if os.path.isfile(path)]
    return sorted(names, key=lambda name: hashlib.blake2b(os.fsencode(name)).digest())


def _concatenated(root: Path, files: list[str]) -> FileArray:
    """Return the bytes of ``files`` one behind the other, in a file that the processes of a node share."""
    state = hashlib.blake2b(os.fsencode(root), digest_size=16)
    for name in files:
        status = (root / name).stat()
        state.update(os.fsencode(name) + b"\0" + f"{status.st_size} {status.st_mtime_ns}\0".encode())
    folder = cache_directory()
    target = folder / f"text-{state.hexdigest()}.bytes"
    try:
        if not target.exists():
            with _locked(target.with_suffix(".lock")):
                if not target.exists():  # another process may have been first
                    atomic.sweep(folder)
                    atomic.sweep(folder, 0.0, of=target.name)  # only who has the lock writes it
                    _write(target, (root / name for name in files))
    except OSError as error:
        raise StorageError(
            f"the text of {root} cannot be put together in {folder}: {error.strerror or error}; "
            "set HPCDIST_CACHE to a local directory with room for it"
        ) from error
    if target.stat().st_size == 0:
        raise DataError(f"data.path = {root}: the files of the directory hold no text")
    return of_bytes(target)


def _write(target: Path, files: Iterable[Path]) -> None:
    """Write the text among ``files`` to ``target``, which gets its name when it is complete."""
    with atomic.replacing(target) as out:
        for path in files:
            with _readable(path) as text:
                head = text.read(SNIFFED_BYTES)
                if b"\0" in head:
                    continue  # not text
                out.write(head)
                while block := text.read(1 << 20):
                    out.write(block)


@contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open(regular.open_regular(path), "rb")  # noqa: SIM115 - errors of opening are the file's own
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes of this node out; the system frees the lock of a process that dies."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def cache_directory() -> Path:
    """Return the directory of concatenated text: HPCDIST_CACHE, or one of this user's own on the local disk.

    Raises StorageError when somebody else could have put data there, or it cannot be created.
    """
    chosen = os.environ.get("HPCDIST_CACHE")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"hpcdist-data-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StorageError(f"{folder} cannot be created: {error.strerror}; set HPCDIST_CACHE to another") from error
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    if not chosen and not private:
        raise StorageError(
            f"{folder} is not a directory that only this user can write; remove it, or set HPCDIST_CACHE"
        )
    return folder
