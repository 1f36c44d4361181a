"""Guarded reading of small regular files (settings, records, figures): whole, up to a size limit.

Reading a pipe can block, a device is endless, and a sparse file of a terabyte takes no room on disk.
"""

import errno
import json
import os
import stat
import struct
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import ConfigurationError, HpcdistError, StorageError, UsageError
from hpcdist.reporting import atomic

# Errors raised when a file's values have unexpected types, shapes or sizes (h5py raises some of them).
BROKEN_LIBRARY_ERRORS: Final = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError),
    struct.error,
)
# OSErrors for a file that is too large or not regular. Errors of libhdf5 for damaged content have no errno.
_FILE_ERRORS: Final = frozenset((errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ELOOP, errno.ENXIO))
FIGURES: Final = "one of its files is damaged, or of another program"
_MOST_LEVELS: Final = 64  # of nested tables and arrays
_TOO_DEEP: Final = "its values are nested too deeply"
MOST_BYTES: Final = 16 << 20  # more than any settings, record or figure file needs


class DamagedFileError(StorageError):
    """Error for a file whose content is damaged or has an unexpected format. A retry will not help."""


def is_damage(error: BaseException) -> bool:
    """Return True if ``error``, raised while reading a file, means that the content of the file is damaged."""
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _FILE_ERRORS
    return not isinstance(error, MemoryError)


def set_aside_damaged(path: Path, error: BaseException) -> tuple[bool, str]:
    """Rename the file ``path`` if ``error`` means damage. Return (True if damaged, text to append to a warning)."""
    if not is_damage(error):
        return False, "; it stays as it is, and this start is not in it"
    aside = atomic.set_aside(path)
    # The caller may now write a new file to ``path``.
    return True, "" if aside is None else f"; it is now {aside.name}"


@contextmanager
def damage(path: str | os.PathLike[str], message: str = "is damaged") -> Iterator[None]:
    """Context manager for reading ``path``. Raises DamagedFileError with ``message``, or StorageError if unreadable."""
    try:
        yield
    except HpcdistError:
        raise
    except BROKEN_LIBRARY_ERRORS as error:
        if not is_damage(error):
            raise StorageError(f"{path}: cannot be read: {str(error) or type(error).__name__}"[:1000]) from error
        raise DamagedFileError(f"{path}: {message}: {type(error).__name__}: {error}"[:1000]) from error


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open ``path`` for reading, and return the descriptor. Raises OSError if ``path`` is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "it is not a regular file", os.fspath(path))
    return descriptor


def read(path: str | os.PathLike[str], max_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError if it has more than ``max_bytes`` bytes."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Allocate the size of the file, not the limit.
        data = b"" if size > max_bytes else file.read(size + 1)
        if len(data) > size:  # files in /proc and /sys report 0 bytes, and a file may grow while it is read
            data += file.read(max_bytes + 1 - len(data))
            size = len(data)
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {max_bytes} are read", os.fspath(path))
    return data


def text(path: str | os.PathLike[str], max_bytes: int = MOST_BYTES) -> str:
    """Return the UTF-8 text of a regular file. Raises UnicodeDecodeError, or OSError if longer than ``max_bytes``."""
    return read(path, max_bytes).decode()


def toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of the TOML file ``path`` as a dict. Raises OSError, or ValueError if it is not TOML."""
    return toml_of(text(path, 1 << 20))


def settings(path: Path, file_kind: str) -> dict[str, Any]:
    """Return the TOML file ``path`` as a dict. ``file_kind``: noun in the StorageError or ConfigurationError."""
    try:
        return toml(path)
    except FileNotFoundError:
        raise StorageError(f"{file_kind} {path}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"{file_kind} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file_kind} {path} is not valid TOML: {error}") from error


def toml_of(toml_text: str) -> dict[str, Any]:
    """Return the content of ``toml_text`` as a dict. Raises ValueError if it is not TOML, or nested too deeply."""
    try:
        tables = tomllib.loads(toml_text.removeprefix("\ufeff"))  # some editors write a byte order mark
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level: list[Any] = [tables]  # not recursive: tomllib reads dotted names of any depth, and readers of tables recurse
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


def json_value(path: str | os.PathLike[str], max_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file. Raises OSError if longer than ``max_bytes``, and ValueError if not JSON."""
    try:
        return json.loads(read(path, max_bytes))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def json_or_none(path: str | os.PathLike[str]) -> Any:
    """Return the value in the JSON file ``path``, or None if the file is unreadable, not JSON, or too large."""
    try:
        return json_value(path)
    except (OSError, ValueError):
        return None


def json_objects(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield each line of ``path`` that is a JSON object, as a dict. Skips other lines. A missing file has no lines."""
    try:
        lines = read(path, 64 << 20).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in lines:
        if (value := json_object(line)) is not None:
            yield value


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in the text ``line`` as a dict, or None if the line is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def save_all(files: Mapping[Path, str], *, force: bool) -> None:
    """Write ``files``, {path: text}. Raises UsageError if a file exists with a different text, unless ``force``."""
    try:
        differing = [str(path) for path, text in files.items() if path.exists() and read(path) != text.encode()]
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be read: {error.strerror}") from error
    if differing and not force:
        raise UsageError(
            f"existing files have different content: {', '.join(differing)}; add --force to replace these files"
        )
    for path, text in files.items():
        atomic.save(path, text, parents=True)
