"""File-backed store for states that are larger than memory.

A killed process leaves no file, and a full file system fails before the first step. Each write starts its write-back at
once (sync_file_range), because the kernel can drop only clean pages.
"""

import ctypes
import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import StorageError

BLOCK_BYTES: Final = 1 << 20  # keeps the blocks of an update in a cache of a few megabytes (empirical)
_WRITE_BACK: Final = 2  # SYNC_FILE_RANGE_WRITE: start to write the dirty pages of the range, and return
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class FileStore(FlatStore):
    """1-D array of model tensors in a temporary file in ``directory``. Raises StorageError if file access fails."""

    # `range` returns no view: use `read` and `write`.
    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype,
        parts: Range | Sequence[Range] | None = None,
        *,
        directory: str | os.PathLike[str],
        what: str = "state",  # name of the data in error messages
        on: str = "cpu",
        category: str = "optimizer",
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(layout, dtype, parts, allocate=lambda _, kind: backend.empty(0, kind, on))
        self.directory, self._what = Path(directory), what
        self.nbytes = self.size * self.dtype.itemsize
        self._fd = _reserved(self.directory, self.nbytes, what)
        weakref.finalize(self, os.close, self._fd)
        self.read_bytes = self.written_bytes = 0  # totals
        self._category, self._ledger = category, ledger
        self._block: np.ndarray | None = None

    @property
    def block(self) -> int:
        """Maximum number of elements that one read or write of the file transfers."""
        return BLOCK_BYTES // self.dtype.itemsize

    def range(self, elements: Range) -> Array:
        assert not elements, f"{elements} lies in a file: read it"
        return self.array

    def read(self, elements: Range, out: Array) -> None:
        if not elements:
            return
        start = self._offset(elements)
        if backend.is_device(out):
            staging.to_device_in_blocks(out, lambda where, block: self._pread(block, start + where.start))
        else:
            self._pread(out, start)

    def write(self, elements: Range, values: Array) -> None:
        if not elements:
            return
        start = self._offset(elements)
        if backend.is_device(values):
            staging.to_host_in_blocks(values, lambda where, block: self._pwrite(block, start + where.start))
        else:
            self._pwrite(values, start)

    def add(self, elements: Range, values: Array) -> None:
        if not elements:
            return
        start = self._offset(elements)

        # Read, add and write back block by block: at most one block of the file is in memory.
        def into(where: Range, block: np.ndarray) -> None:
            held = self._buffer(where.size)
            self._pread(held, start + where.start)
            held += block
            self._pwrite(held, start + where.start)

        if backend.is_device(values):
            staging.to_host_in_blocks(values, into)
        else:
            for where in cut(Range(0, elements.size), self.block):
                into(where, values[where.slice])

    def blocks(self, elements: Range) -> Iterator[Array]:
        """Yield the elements of the range ``elements`` in blocks. Each block overwrites the block before it."""
        start = self._offset(elements) if elements else 0
        for where in cut(Range(0, elements.size), self.block):
            held = self._buffer(where.size)
            self._pread(held, start + where.start)
            yield held

    def contents(self, elements: Range) -> Array:
        return FileSlice(self, elements)  # type: ignore[return-value]

    def copy_from(self, other: FlatStore) -> None:
        for part in self.parts:
            for theirs in other.parts:
                common = part.intersect(theirs)
                self.write(common, other.range(common))

    def zero(self) -> None:
        for part in self.parts:
            for where in cut(part, self.block):
                held = self._buffer(where.size)
                held[...] = 0
                self.write(where, held)

    def forget(self) -> None:
        """Flush the file to the disk and drop it from the page cache, so that later reads come from the disk."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _buffer(self, size: int) -> np.ndarray:
        if self._block is None:
            self._block = np.empty(min(self.block, max(part.size for part in self.parts)), self.dtype)
            if self._ledger is not None:
                self._ledger.track(self._block, self._category)
        return self._block[:size]

    def _pread(self, out: np.ndarray, start: int) -> None:
        self._move("read", lambda view, at: os.preadv(self._fd, [view], at), out, start)
        self.read_bytes += out.nbytes

    def _pwrite(self, values: np.ndarray, start: int) -> None:
        self._move("written", lambda view, at: os.pwrite(self._fd, view, at), values, start)
        self.written_bytes += values.nbytes
        begin_write_back(self._fd, start * self.dtype.itemsize, values.nbytes)

    def _move(self, verb: str, move: Callable[[memoryview, int], int], array: np.ndarray, start: int) -> None:
        # preadv and pwrite may move fewer bytes than requested (2 GiB at most): continue after the moved bytes.
        view, at = array.view(np.uint8).data, start * self.dtype.itemsize
        while view.nbytes:
            try:
                moved = move(view, at)
            except OSError as error:
                raise StorageError(
                    f"{self.directory}: {view.nbytes} bytes of the {self._what} could not be {verb}: {error.strerror}; "
                    f"set zero.offload_directory to a disk with {self.nbytes} free bytes"
                ) from error
            if not moved:
                raise StorageError(
                    f"{self.directory}: the file of the {self._what} ends at byte {at}, but needs {self.nbytes} bytes; "
                    "check the disk and the file system"
                )
            view, at = view[moved:], at + moved


@dataclass(frozen=True)
class FileSlice:
    """Slice of a `FileStore`: a range of elements that are read from and written to the file on demand."""

    store: FileStore
    where: Range

    @property
    def dtype(self) -> np.dtype:
        return self.store.dtype

    @property
    def shape(self) -> tuple[int]:
        return (self.where.size,)

    def read(self, elements: Range, out: np.ndarray) -> None:
        """Copy the range ``elements`` of this slice to the array ``out``."""
        self.store.read(elements.shift(self.where.start), out)

    def write(self, elements: Range, values: np.ndarray) -> None:
        """Copy the array ``values`` to the range ``elements`` of this slice."""
        self.store.write(elements.shift(self.where.start), values)

    def copy(self) -> np.ndarray:
        """Return the elements of the slice as an array in memory."""
        values = np.empty(self.where.size, self.dtype)
        self.store.read(self.where, values)
        return values


def _reserved(directory: Path, nbytes: int, what: str) -> int:
    hint = f"set zero.offload_directory to a disk of this node with {nbytes} free bytes for the {what}"
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = os.dup(file.fileno())  # stays open after the context manager; the file has no name
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror}; {hint}") from error
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)  # not a sparse file: a later full disk cannot fail a write
    except OSError as error:
        os.close(fd)
        space = os.statvfs(directory)
        free = f" ({space.f_bavail * space.f_frsize} bytes are free)" if error.errno in _FULL else ""
        raise StorageError(f"{directory} cannot store {nbytes} bytes: {error.strerror}{free}; {hint}") from error
    return fd


def begin_write_back(fd: int, start: int, nbytes: int) -> None:
    """Start to write ``nbytes`` cached bytes of file descriptor ``fd``, from offset ``start``, to disk. Do not wait."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _WRITE_BACK)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; ctypes releases the GIL
