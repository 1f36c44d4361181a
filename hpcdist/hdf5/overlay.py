"""Overlay of a file: changes stay in memory until a journalled commit.

The commit uses plain system calls, because libhdf5 crashes at exit after a failed write. A full disk is detected before
any existing byte changes.
"""

import io
import os
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import xxhash

from hpcdist.arrays.filestore import begin_write_back
from hpcdist.reporting import atomic, regular

PAGE_BYTES = 4096
BEGIN_BYTES = 1 << 18  # smaller writes wait for `fsync`: starting the write-back would take as long as the write
JOURNAL = ".journal"  # suffix of the journal, next to the file
MAGIC = b"hpcdist journal\n"


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` to the file ``fd`` at byte ``offset``. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def pread_all(fd: int, count: int, offset: int) -> bytes:
    """Return ``count`` bytes of the file ``fd`` from byte ``offset`` on, or fewer at the file's end. Raises OSError."""
    parts = []
    while count and (part := os.pread(fd, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def journal_of(path: Path) -> Path:
    """Return the path of the redo journal of the file ``path``."""
    return path.with_name(path.name + JOURNAL)


def encode_journal(size: int, pages: Mapping[int, bytes | bytearray], before: Mapping[int, bytes]) -> bytes:
    """Return the redo journal of a commit as bytes. The commit sets the file to ``size`` bytes and replaces ``pages``.

    ``pages``, ``before``: {page number: content} after and before the commit.
    """
    numbers = sorted(pages)
    digests = [xxhash.xxh3_64_intdigest(before[number]) for number in numbers]
    head = MAGIC + struct.pack(f"<{len(numbers) + 2}q{len(numbers)}Q", size, len(numbers), *numbers, *digests)
    body = head + b"".join(pages[number] for number in numbers)
    return body + xxhash.xxh3_128_digest(body)


def read_journal(path: Path) -> tuple[int, dict[int, bytes]] | None:
    """Return (file size, {page number: content}) to finish an interrupted commit to ``path``, or None without one."""
    try:
        # A journal holds pages of the file and a few bytes per page; reject anything longer, and special files.
        data = regular.read(journal_of(path), 2 * path.stat().st_size + (1 << 20))
    except FileNotFoundError:
        return None
    body = data[:-16]
    if not body.startswith(MAGIC) or xxhash.xxh3_128_digest(body) != data[-16:]:
        return None
    size, count = struct.unpack_from("<2q", body, len(MAGIC))
    table = struct.unpack_from(f"<{count}q{count}Q", body, len(MAGIC) + 16)
    start = len(MAGIC) + 16 * (count + 1)  # after size and count (8 bytes each), then number and digest of each page
    pages = {n: body[start + k * PAGE_BYTES : start + (k + 1) * PAGE_BYTES] for k, n in enumerate(table[:count])}
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < size:
            return None
        for number, digest in zip(table[:count], table[count:], strict=True):
            on_disk = pread_all(file.fileno(), PAGE_BYTES, number * PAGE_BYTES)
            if xxhash.xxh3_64_intdigest(on_disk) != digest and on_disk != pages[number][: len(on_disk)]:
                return None
    return size, pages


class WriteBack(threading.Thread):
    """Thread that starts to write the bytes of the file ``fd`` to the disk, because the call blocks on a busy disk."""

    def __init__(self, fd: int) -> None:
        super().__init__(name="hpcdist write-back", daemon=True)
        self._fd = fd
        self._ranges = SimpleQueue[tuple[int, int] | None]()
        self.start()

    def begin(self, offset: int, nbytes: int) -> None:
        """Start to write ``nbytes`` bytes from byte ``offset``. Do not wait."""
        self._ranges.put((offset, nbytes))

    def run(self) -> None:
        while (part := self._ranges.get()) is not None:
            begin_write_back(self._fd, *part)

    def end(self) -> None:
        """Wait until the disk has received all requests, and end the thread."""
        self._ranges.put(None)
        self.join()


class Overlay(io.RawIOBase):
    """File object for h5py's driver "fileobj". Changes of the file ``path`` reach the disk only at `commit`."""

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False) -> None:
        # If `read_only`, the changes of an unfinished commit are visible, but not written. After an exception, only
        # `close` may be called.
        super().__init__()
        self.path = path
        mode = os.O_RDONLY if read_only else os.O_RDWR
        self._fd = os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        self._original = self._size = os.fstat(self._fd).st_size
        self._valid = self._original  # bytes on the disk that are still content: truncation invalidates later bytes
        self._position = 0
        self._failure: OSError | None = None  # error of a write, raised by `commit`
        self._pages: dict[int, bytearray] = {}
        self._write_back: WriteBack | None = None
        if not create:
            # Finish a commit that a killed writer left unfinished.
            self._recover(read_only)

    @classmethod
    def created(cls, path: Path) -> Self:
        """Create the file ``path``, which must not exist, and return its `Overlay`. Raises OSError."""
        return cls(path, create=True)

    def _recover(self, read_only: bool) -> None:
        waiting = read_journal(self.path)
        if waiting is not None:
            self._size, pages = waiting
            self._pages = {number: bytearray(page) for number, page in pages.items()}
            if not read_only:
                self._apply(list(pages))
                self._original = self._valid = self._size
                self._pages.clear()
        if not read_only:
            journal_of(self.path).unlink(missing_ok=True)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def _page(self, number: int) -> bytearray:
        page = self._pages.get(number)
        if page is None:
            page = bytearray(self._stored(number))
            page.extend(bytes(PAGE_BYTES - len(page)))
            self._pages[number] = page
        return page

    def _stored(self, number: int) -> bytes:
        start = number * PAGE_BYTES
        return pread_all(self._fd, max(0, min(PAGE_BYTES, self._valid - start)), start)

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        if self._failure is not None:
            raise self._failure
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        done = 0
        while done < count:
            number, inside = divmod(self._position + done, PAGE_BYTES)
            take = min(PAGE_BYTES - inside, count - done)
            page = self._pages.get(number) or self._stored(number).ljust(PAGE_BYTES, b"\0")
            view[done : done + take] = page[inside : inside + take]
            done += take
        self._position += count
        return count

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, inside = divmod(self._position + done, PAGE_BYTES)
            take = min(PAGE_BYTES - inside, len(view) - done)
            try:
                self._page(number)[inside : inside + take] = view[done : done + take]
            except OSError as error:  # raised by reading the rest of the page; libhdf5 may crash if a write fails
                self._failure = self._failure or error
            done += take
        self._position += done
        if done:  # an empty write does not extend the file
            self._size = max(self._size, self._position)
        return done

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        self._valid = min(self._valid, self._size)
        number, inside = divmod(self._size, PAGE_BYTES)
        for later in [page for page in self._pages if page > number]:
            del self._pages[later]
        if number in self._pages:
            self._pages[number][inside:] = bytes(PAGE_BYTES - inside)
        return self._size

    def commit(self, *, wait: bool = True) -> None:
        """Write the changes to the disk. If this raises OSError, the file is unchanged. ``wait``: also call `fsync`."""
        if self._failure is not None:
            raise self._failure
        before = -(-self._original // PAGE_BYTES)  # first page that needs new disk space
        # Truncated and regrown bytes are zero, whatever the disk holds: write their pages.
        for number in range(self._valid // PAGE_BYTES, -(-min(self._original, self._size) // PAGE_BYTES)):
            self._page(number)
        in_place = [number for number in sorted(self._pages) if number < before]
        try:
            # 1. Pages after the old end: nothing refers to them before the pages in place change, so truncating the
            # file undoes a failure. They must be on the disk before the journal.
            if self._size > self._original:
                os.ftruncate(self._fd, self._size)
            for number in sorted(self._pages):
                if number >= before:
                    self._put(number)
            if wait or in_place:
                os.fsync(self._fd)
            # 2. The journal of the pages in place. The commit is valid from the journal's fsync on.
            if in_place:
                self._write_journal({number: self._pages[number] for number in in_place})
        except OSError:
            with suppress(OSError):  # the first error is raised
                journal_of(self.path).unlink(missing_ok=True)
                os.ftruncate(self._fd, self._original)
            raise
        # 3. The pages in place; this needs no more disk space.
        if wait or in_place:
            self._apply(in_place)
            journal_of(self.path).unlink(missing_ok=True)
        self._original = self._valid = self._size
        self._pages.clear()

    def _write_journal(self, pages: Mapping[int, bytearray]) -> None:
        journal_of(self.path).unlink(missing_ok=True)  # also removes a symbolic link
        fd = atomic.create(journal_of(self.path))
        try:
            before = {number: pread_all(self._fd, PAGE_BYTES, number * PAGE_BYTES) for number in pages}
            pwrite_all(fd, encode_journal(self._size, pages, before), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _apply(self, numbers: list[int]) -> None:
        for number in numbers:
            self._put(number)
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def _put(self, number: int) -> None:
        start = number * PAGE_BYTES
        pwrite_all(self._fd, memoryview(self._pages[number])[: max(0, self._size - start)], start)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write ``data`` directly to the file at byte ``offset``. Call `commit` first. Raises OSError."""
        assert not self._pages, "commit first: pages in memory would overwrite this"
        pwrite_all(self._fd, data, offset)
        if data.nbytes >= BEGIN_BYTES:
            if self._write_back is None:
                self._write_back = WriteBack(self._fd)
            self._write_back.begin(offset, data.nbytes)

    def fsync(self) -> None:
        """Wait until the file is on the disk. Raises OSError."""
        self._end_write_back()
        os.fsync(self._fd)

    def _end_write_back(self) -> None:
        if self._write_back is not None:
            self._write_back.end()
            self._write_back = None

    def close(self) -> None:
        """Discard uncommitted changes and close the file."""
        if not self.closed:
            self._pages.clear()
            self._end_write_back()
            os.close(self._fd)
        super().close()
