"""Guarded reading of small regular files (settings, records, figures): whole, up to a size limit.

A pipe in the place of a file blocks its reader, a device has no end, and a sparse file of a terabyte takes no more room
on the disk than an empty one. So a file is opened without blocking, checked to be regular, and read up to a limit.
"""

import errno
import json
import os
import stat
import struct
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import ConfigurationError, HpcdistError, StorageError, UsageError
from hpcdist.reporting import atomic

# Errors that reading a file leads to whose values have other types, shapes or sizes than expected (h5py raises some).
BROKEN_LIBRARY_ERRORS: Final = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError),
    struct.error,
)
# OSErrors for a file that is not regular or too large; libhdf5's errors for damaged content have no errno.
_FILE_ERRORS: Final = frozenset((errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ELOOP, errno.ENXIO))
FIGURES: Final = "one of its files is damaged, or of another program"
_MOST_LEVELS: Final = 64  # of tables and arrays in one another
_TOO_DEEP: Final = "its values are nested too deeply"
MOST_BYTES: Final = 16 << 20  # more than any file of settings, records or figures needs


class DamagedFileError(StorageError):
    """Damaged or foreign content of a file: another try will not help."""


def is_damage(error: BaseException) -> bool:
    """Whether ``error`` is due to a file's content or type, and not to a system that could not read it just now.

    A failing disk, a lost server, missing rights or memory leave the file intact: it must not be set aside for them.
    """
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _FILE_ERRORS
    return not isinstance(error, MemoryError)


def set_aside_damaged(path: Path, error: BaseException) -> tuple[bool, str]:
    """Set the record ``path`` aside where ``error``, of reading it, is due to its content (see `is_damage`).

    Return whether a new record may take its place, and what became of the old one, as the end of a message.
    """
    if not is_damage(error):
        return False, "; it stays as it is, and this start is not in it"
    aside = atomic.set_aside(path)
    return True, "" if aside is None else f"; it is now {aside.name}"


@contextmanager
def damage(path: str | os.PathLike[str], what: str = "is damaged") -> Iterator[None]:
    """Turn errors of reading a broken file inside the block into a DamagedFileError with ``path`` and ``what``.

    Errors of the system itself become a plain StorageError, see `is_damage`.
    """
    try:
        yield
    except HpcdistError:
        raise
    except BROKEN_LIBRARY_ERRORS as error:
        if not is_damage(error):
            raise StorageError(f"{path}: cannot be read: {str(error) or type(error).__name__}"[:1000]) from error
        raise DamagedFileError(f"{path}: {what}: {type(error).__name__}: {error}"[:1000]) from error


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of the file at ``path`` for reading. Raises OSError, also for what is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "it is not a regular file", os.fspath(path))
    return descriptor


def read(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return what is in the regular file at ``path``. Raises OSError, also where it has more than ``most_bytes``."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Allocate what the file needs, not what the limit allows.
        data = b"" if size > most_bytes else file.read(size + 1)
        if len(data) > size:  # files of /proc and /sys report 0 bytes, and a file may grow while it is read
            data += file.read(most_bytes + 1 - len(data))
            size = len(data)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most_bytes} are read", os.fspath(path))
    return data


def text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Return the UTF-8 text in the file at ``path``. Raises OSError as `read`, and UnicodeDecodeError."""
    return read(path, most_bytes).decode()


def toml(path: str | os.PathLike[str], most_bytes: int = 1 << 20) -> dict[str, Any]:
    """Return the tables of the TOML file at ``path``. Raises OSError as `read`, and ValueError for anything else."""
    return toml_of(text(path, most_bytes))


def settings(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a user's TOML file at ``path``, which messages call ``what``.

    Raises StorageError where it cannot be read, ConfigurationError for anything else than TOML.
    """
    try:
        return toml(path)
    except FileNotFoundError:
        raise StorageError(f"{what} {path}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{what} {path} is not valid TOML: {error}") from error


def toml_of(written: str) -> dict[str, Any]:
    """Return the tables of the TOML text ``written``. Raises ValueError, also for too deeply nested values."""
    try:
        tables = tomllib.loads(written.removeprefix("\ufeff"))  # a byte order mark, which some editors write
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level: list[Any] = [tables]  # level by level: tomllib reads dotted names of any depth, and its readers recurse
    for _ in range(_MOST_LEVELS):
        level = [
            value
            for outer in level
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, dict | list)
        ]
        if not level:
            return tables
    raise ValueError(_TOO_DEEP)


def json_value(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of the JSON file at ``path``. Raises OSError as `read`, and ValueError for anything else."""
    try:
        return json.loads(read(path, most_bytes))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def json_or_none(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of the JSON file at ``path``; None where it cannot be read, or holds no JSON."""
    try:
        return json_value(path, most_bytes)
    except (OSError, ValueError):
        return None


def json_objects(path: str | os.PathLike[str], most_bytes: int = 64 << 20) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of the file at ``path``, none where it is missing. Raises OSError as `read`.

    Lines of other programs, and lines torn by a crash, are skipped.
    """
    try:
        lines = read(path, most_bytes).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in lines:
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def save_all(files: Mapping[Path, str], *, force: bool) -> None:
    """Write ``files`` (path -> text), with their directories; files with the same content are replaced.

    Raises UsageError, before anything is written, if a file has another content and ``force`` is False; StorageError.
    """
    try:
        differing = [str(path) for path, text in files.items() if path.exists() and read(path) != text.encode()]
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be read: {error.strerror}") from error
    if differing and not force:
        raise UsageError(f"{', '.join(differing)}: exists with another content; --force replaces it")
    for path, text in files.items():
        atomic.save(path, text, parents=True)
