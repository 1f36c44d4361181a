"""File-backed store for states that are larger than memory.

The file has no name: it is unlinked as soon as it is open, so that a process that is killed leaves nothing behind.
Its space is reserved at the start, so that a file system that is too small fails before the first step. Bytes move
between the file and the buffers of the caller (pread, pwrite) without the GIL and without a copy beside the kernel's.

Written pages stay in the page cache while memory is free, and are read from there. They belong to the kernel, not to
the process (they are not in its PSS), and the kernel drops clean pages when memory is short. It cannot drop dirty
pages: so each write starts their write-back at once (sync_file_range), without waiting for it.
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

    A file has no views: use `read`, `write`, `add`, `blocks` and `contents`, not ``range`` or ``view``. ``array`` is
    empty, on the device where its owner computes. ``what`` names the contents in errors. Raises StorageError, naming
    directory and bytes, where the space cannot be reserved.
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
        """Number of elements that are moved at a time, `BLOCK_BYTES` of them."""
        return BLOCK_BYTES // self.dtype.itemsize

    def range(self, wanted: Range) -> Array:
        """Return the empty view of an empty range; for any other range there is no view, and this asserts."""
        assert not wanted, f"{wanted} lies in a file: read it"
        return self.array

    def read(self, wanted: Range, out: Array) -> None:
        """Read ``wanted`` into ``out``, 1-D, on the host or a GPU. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)
        if backend.is_device(out):
            staging.to_device_in_blocks(out, lambda where, block: self._pread(block, start + where.start))
        else:
            self._pread(out, start)

    def write(self, wanted: Range, values: Array) -> None:
        """Write ``values``, 1-D, on the host or a GPU, to ``wanted``. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)
        if backend.is_device(values):
            staging.to_host_in_blocks(values, lambda where, block: self._pwrite(block, start + where.start))
        else:
            self._pwrite(values, start)

    def add(self, wanted: Range, values: Array) -> None:
        """Add ``values``, 1-D, on the host or a GPU, to ``wanted``. Raises StorageError."""
        if not wanted:
            return
        start = self._offset(wanted)

        # Read, add and write back block by block: never more than one block of the file is in memory.
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
        """Yield ``wanted`` in order, on the host; each block overwrites the one before in memory."""
        start = self._offset(wanted) if wanted else 0
        for where in cut(Range(0, wanted.size), self.block):
            held = self._buffer(where.size)
            self._pread(held, start + where.start)
            yield held

    def contents(self, wanted: Range) -> Array:
        """Return the array of a `Piece` of ``wanted``: here a `FileSlice`, which is read and written in blocks."""
        return FileSlice(self, wanted)  # type: ignore[return-value]

    def copy_from(self, other: FlatStore) -> None:
        """Copy from ``other``, a store in memory of the same layout and dtype, the elements that both hold."""
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
        """Move all bytes of ``array``, whose first element is element ``start`` of the file."""
        # preadv and pwrite may move fewer bytes than asked for (2 GiB at most): go on behind those.
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
    """Elements ``where`` of ``store``: stands in for a 1-D array of them in a `Piece`."""

    store: FileStore
    where: Range

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self.store.dtype

    @property
    def shape(self) -> tuple[int]:
        """Shape of the array that it stands in for."""
        return (self.where.size,)

    def read(self, part: Range, out: np.ndarray) -> None:
        """Read ``part``, counted from the beginning of the slice."""
        self.store.read(part.shift(self.where.start), out)

    def write(self, part: Range, values: np.ndarray) -> None:
        """Write ``part``, counted from the beginning of the slice."""
        self.store.write(part.shift(self.where.start), values)

    def copy(self) -> np.ndarray:
        """Return all elements, in memory."""
        values = np.empty(self.where.size, self.dtype)
        self.store.read(self.where, values)
        return values


def _reserved(directory: Path, nbytes: int, what: str) -> int:
    """Return the descriptor of a new unnamed file in ``directory`` of ``nbytes`` bytes, all of them reserved."""
    needs = f"{nbytes} bytes are needed there for the {what}"
    hint = "give zero.offload_directory a directory on a disk of this node that has them"
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = os.dup(
                file.fileno()
            )  # outlives the context manager; the name is gone already (O_TMPFILE, or unlinked)
    except OSError as error:
        raise StorageError(f"{directory} cannot be written ({error.strerror}), and {needs}; {hint}") from error
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)  # not a hole: a disk that fills up later cannot fail a write of a step
    except OSError as error:
        os.close(fd)
        space = os.statvfs(directory)
        free = f" ({space.f_bavail * space.f_frsize} are free)" if error.errno in _FULL else ""
        raise StorageError(f"{directory}: {error.strerror}: {needs}{free}; {hint}") from error
    return fd


def begin_write_back(fd: int, start: int, nbytes: int) -> None:
    """Start the write-back of the pages of a byte range, without waiting; does nothing where that is not possible."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _WRITE_BACK)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux's own; without the GIL, as all of ctypes
