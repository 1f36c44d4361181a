"""File-backed store for states that are larger than memory.

The file has no name: it is unlinked as soon as it is open, so that a process that is killed leaves nothing behind.
Its space is reserved at the start, so that a file system that is too small is met before the first step. Bytes go
between the file and the buffers of the caller (pread, pwrite) without the GIL and without a copy beside the kernel's.

What is written stays in the page cache while memory is free, and is read from there. Such pages belong to the kernel,
not to the process (its PSS has none of them), and the kernel drops clean ones when memory is short. Dirty ones it
cannot drop: so each write asks at once that its pages go to the disk (sync_file_range), without waiting for it.
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
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import StorageError

BLOCK_BYTES: Final = 1 << 20  # the blocks of an update then stay in a cache of a few megabytes (empirical)
_WRITE_BACK: Final = 2  # SYNC_FILE_RANGE_WRITE: begin to write the dirty pages of the range, and return
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class FileStore(FlatStore):
    """A `FlatStore` that holds ``parts`` in a file in ``directory``; zero at first.

    There are no views of it, so it has `read`, `write`, `add`, `blocks` and `contents`, and no ``range`` or ``view``;
    ``array`` is empty, on the side where its owner computes. ``what`` names the contents in errors. Raises
    StorageError, naming directory and bytes, where the space cannot be had.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: np.dtype,
        parts: Range | Sequence[Range] | None = None,
        *,
        directory: str | os.PathLike[str],
        what: str = "state",
        on: str = "cpu",
        category: str = "optimizer",
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(layout, dtype, parts, allocate=lambda _, kind: backend.empty(0, kind, on))
        self.directory, self._what = Path(directory), what
        self.nbytes = self.size * self.dtype.itemsize
        self._fd = _reserved(self.directory, self.nbytes, what)
        weakref.finalize(self, os.close, self._fd)
        self.read_bytes = self.written_bytes = 0  # so far
        self._category, self._ledger = category, ledger
        self._block: np.ndarray | None = None

    @property
    def block(self) -> int:
        """Number of elements that are moved at a time."""
        return BLOCK_BYTES // self.dtype.itemsize

    def range(self, wanted: Range) -> Array:
        """Return a view of nothing; where something is wanted, a file has no views."""
        assert not wanted, f"{wanted} lies in a file: read it"
        return self.array

    def read(self, wanted: Range, out: Array) -> None:
        """Read ``wanted`` into ``out``, 1-D, on either side of the bus. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)
        if backend.is_device(out):
            staging.to_device_in_blocks(out, lambda where, block: self._pread(block, start + where.start))
        else:
            self._pread(out, start)

    def write(self, wanted: Range, values: Array) -> None:
        """Write ``values``, 1-D, on either side of the bus, at ``wanted``. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)
        if backend.is_device(values):
            staging.to_host_in_blocks(values, lambda where, block: self._pwrite(block, start + where.start))
        else:
            self._pwrite(values, start)

    def add(self, wanted: Range, values: Array) -> None:
        """Add ``values``, 1-D, on either side of the bus, to what is at ``wanted``. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)

        def into(where: Range, block: np.ndarray) -> None:
            held = self._buffer(where.size)
            self._pread(held, start + where.start)
            held += block
            self._pwrite(held, start + where.start)

        if backend.is_device(values):
            staging.to_host_in_blocks(values, into)
        else:
            for where in cut(Range(0, wanted.size), self.block):
                into(where, values[where.slice])

    def blocks(self, wanted: Range) -> Iterator[Array]:
        """Yield ``wanted`` in order, on the host: each block lies in the same memory as the one before."""
        start = self._offset(wanted) if wanted else 0
        for where in cut(Range(0, wanted.size), self.block):
            held = self._buffer(where.size)
            self._pread(held, start + where.start)
            yield held

    def contents(self, wanted: Range) -> Array:
        """Return what a `Piece` of ``wanted`` holds: a `Stretch`, which is read and written in blocks."""
        return FileSlice(self, wanted)  # type: ignore[return-value]

    def copy_from(self, other: FlatStore) -> None:
        """Take over what ``other``, of the same layout and dtype and in memory, holds of these parts."""
        for part in self.parts:
            for theirs in other.parts:
                common = part.intersect(theirs)
                self.write(common, other.range(common))

    def zero(self) -> None:
        """Set every element, padding included, to zero."""
        for part in self.parts:
            for where in cut(part, self.block):
                held = self._buffer(where.size)
                held[...] = 0
                self.write(where, held)

    def forget(self) -> None:
        """Wait until all is on the disk, and drop it from the page cache: the next read comes from the disk."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _buffer(self, size: int) -> np.ndarray:
        """Return the first ``size`` elements of the one block of memory that the store has, for one thread."""
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
        """Move the bytes of ``array``, however many the kernel takes at a time."""
        view, at = array.view(np.uint8).data, start * self.dtype.itemsize
        while view.nbytes:
            try:
                moved = move(view, at)
            except OSError as error:
                raise StorageError(
                    f"{self.directory}: {view.nbytes} bytes of the {self._what} could not be {verb}: {error.strerror}; "
                    f"{self.nbytes} bytes are kept there: give zero.offload_directory a disk that has them"
                ) from error
            if not moved:
                raise StorageError(f"{self.directory}: the file of the {self._what} ends at byte {at} of {self.nbytes}")
            view, at = view[moved:], at + moved


@dataclass(frozen=True)
class FileSlice:
    """Elements ``where`` of ``store``, in the place of a 1-D array that would hold them."""

    store: FileStore
    where: Range

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self.store.dtype

    @property
    def shape(self) -> tuple[int]:
        """That of the array."""
        return (self.where.size,)

    def read(self, part: Range, out: np.ndarray) -> None:
        """Read ``part``, counted from the beginning of the stretch."""
        self.store.read(part.shift(self.where.start), out)

    def write(self, part: Range, values: np.ndarray) -> None:
        """Write ``part``, counted from the beginning of the stretch."""
        self.store.write(part.shift(self.where.start), values)

    def copy(self) -> np.ndarray:
        """Return all of it in memory."""
        found = np.empty(self.where.size, self.dtype)
        self.store.read(self.where, found)
        return found


def _reserved(directory: Path, nbytes: int, what: str) -> int:
    """Return the descriptor of a new file without a name in ``directory``, whose ``nbytes`` bytes are reserved."""
    needs = f"{nbytes} bytes are needed there for the {what}"
    hint = "give zero.offload_directory a directory on a disk of this node that has them"
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = os.dup(file.fileno())
    except OSError as error:
        raise StorageError(f"{directory} cannot be written ({error.strerror}), and {needs}; {hint}") from error
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        space = os.statvfs(directory)
        free = f" ({space.f_bavail * space.f_frsize} are free)" if error.errno in _FULL else ""
        raise StorageError(f"{directory}: {error.strerror}: {needs}{free}; {hint}") from error
    return fd


def begin_write_back(fd: int, start: int, nbytes: int) -> None:
    """Ask the kernel to write the pages of a range to the disk now, without waiting; no matter where it cannot."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _WRITE_BACK)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux's own; without the GIL, as all of ctypes
