"""Regular files of settings and figures, read whole up to a size.

A pipe in the place of a file blocks whoever opens it, a device has no end, and a sparse file of a terabyte takes no
more room on the disk than an empty one. So a file is opened without waiting, looked at, and read up to a limit.
"""

import errno
import json
import os
import stat
import struct
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hpcdist.errors import HpcdistError, StorageError

# What a file leads to whose values are of other types, shapes or sizes than those that were written (h5py raises some).
BROKEN_LIBRARY_ERRORS: Final = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError),
    struct.error,
)
# OSErrors of what is no regular file or too large; libhdf5 gives no number to what it finds in a file.
_FILE_ERRORS: Final = frozenset((errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ELOOP, errno.ENXIO))
FIGURES: Final = "one of its files is damaged, or of another program"
MOST_BYTES: Final = 16 << 20  # more than any file of settings, records or figures needs


class DamagedFileError(StorageError):
    """Content of a file that is not what was written there, or not ours: another try will not help."""


def is_damage(error: BaseException) -> bool:
    """Whether ``error`` comes from what a file holds, or is, and not from a system that could not read it just now.

    A failing disk, a lost server, missing rights or memory leave a file as it is: it must not lose its place for them.
    """
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _FILE_ERRORS
    return not isinstance(error, MemoryError)


@contextmanager
def damage(path: str | os.PathLike[str], what: str = "is damaged") -> Iterator[None]:
    """Turn whatever a broken file leads to inside into a DamagedFileError, which says ``what`` of ``path``.

    What the system could not read just now is a plain StorageError, see `is_damage`.
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
        # As much memory as the file needs, not as the limit allows.
        data = b"" if size > most_bytes else file.read(size + 1)
        if len(data) > size:  # a file of /proc or /sys says that it has 0 bytes; one may grow while it is read
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


def toml_of(written: str) -> dict[str, Any]:
    """Return the tables of TOML. Raises ValueError, also for brackets within brackets that Python cannot follow."""
    try:
        return tomllib.loads(written)
    except RecursionError:
        raise ValueError("its values lie too deep in one another") from None


def json_value(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of the JSON file at ``path``. Raises OSError as `read`, and ValueError for anything else."""
    try:
        return json.loads(read(path, most_bytes))
    except RecursionError:
        raise ValueError("its values lie too deep in one another") from None
