"""A file that grows by whole pieces while others read it: all of a piece gets there, or nothing of it."""

import errno
import os
from pathlib import Path
from typing import Final

from hpcdist.errors import StorageError

PENDING_BYTES: Final = 4 << 20  # of pieces that wait for the disk to have room again
_PROBE: Final = b" " * 4096


class Appended:
    """Appends to ``path`` from one thread. A new file begins with ``header``; ``cure`` completes every message.

    Raises StorageError where the file cannot be written, also by its constructor: a disk that is full now is told of
    now. What could not be written is kept, up to `PENDING_BYTES`, and goes before the next piece.
    """

    def __init__(self, path: Path, cure: str, header: bytes = b"") -> None:
        self.path, self._cure, self._header = path, cure, header
        self._pending: list[bytes] = []
        self._descriptor = -1
        try:
            self._open()
            if not header:
                self._write(_PROBE)
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(_PROBE))
        except OSError as error:
            self.close()
            raise self._failure(error) from error

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        if self._header and os.fstat(self._descriptor).st_size == 0:
            self._write(self._header)

    def append(self, piece: bytes) -> None:
        """Add ``piece`` with one write, which no reader sees half of for longer than that."""
        self._pending.append(piece)
        while len(self._pending) > 1 and sum(map(len, self._pending)) > PENDING_BYTES:
            del self._pending[0]
        try:
            if self._descriptor < 0 or os.fstat(self._descriptor).st_nlink == 0:  # somebody has removed it
                self._open()
            self._write(b"".join(self._pending))
        except OSError as error:
            raise self._failure(error) from error
        self._pending.clear()

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, data)
        if written < len(data):  # the disk or the quota is full: no half of a piece stays
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path} cannot be written: {error.strerror or error}; {self._cure}")

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
