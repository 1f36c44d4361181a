"""Overlay of a file: changes are kept in memory until they are committed.

libhdf5 does not survive a full disk: a failed write leaves open identifiers behind, and the process ends in a
segmentation fault at exit. So libhdf5 never writes to a disk here. It writes to an overlay, and the overlay is
committed with plain calls that fail cleanly: first what extends the file, then a journal of what changes it in place,
then the changes themselves. A full disk is met before the first byte is changed, and undone. A writer that is killed
in between leaves its journal behind: the next one completes the work, and readers look through the journal until
then.
"""

import io
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import xxhash

from hpcdist.arrays.filestore import begin_write_back
from hpcdist.reporting import atomic, regular

PAGE_BYTES = 4096
BEGIN_BYTES = 1 << 18  # what is less waits for `fsync`: to ask the disk for it takes as long as to write it
JOURNAL = ".journal"  # the file beside, whose name ends so
MAGIC = b"hpcdist journal\n"


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def pread_all(fd: int, count: int, offset: int) -> bytes:
    """Read ``count`` bytes at ``offset``, fewer only at the end of the file. Raises OSError."""
    parts = []
    while count and (part := os.pread(fd, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def journal_of(path: Path) -> Path:
    """Return where the journal of the file at ``path`` lies while there is one."""
    return path.with_name(path.name + JOURNAL)


def encode_journal(size: int, pages: Mapping[int, bytes | bytearray], before: Mapping[int, bytes]) -> bytes:
    """Return the journal of a commit that sets the file to ``size`` bytes and changes ``pages``, by number.

    ``before`` is what they hold on the disk.
    """
    numbers = sorted(pages)
    digests = [xxhash.xxh3_64_intdigest(before[number]) for number in numbers]
    head = MAGIC + struct.pack(f"<{len(numbers) + 2}q{len(numbers)}Q", size, len(numbers), *numbers, *digests)
    body = head + b"".join(pages[number] for number in numbers)
    return body + xxhash.xxh3_128_digest(body)


def read_journal(path: Path) -> tuple[int, dict[int, bytes]] | None:
    """Return ``(size, pages)`` of the commit that the file at ``path`` is waiting for; None when there is none.

    A journal that was not finished counts for nothing: nothing of its commit had been changed yet. Nor does one whose
    file holds something else than before or after the commit: it had this name, or this content, at another time.
    """
    try:
        # Pages of the file and a few bytes for each; what is no file, or holds more, is no journal of it.
        data = regular.read(journal_of(path), 2 * path.stat().st_size + (1 << 20))
    except FileNotFoundError:
        return None
    body = data[:-16]
    if not body.startswith(MAGIC) or xxhash.xxh3_128_digest(body) != data[-16:]:
        return None
    size, count = struct.unpack_from("<2q", body, len(MAGIC))
    table = struct.unpack_from(f"<{count}q{count}Q", body, len(MAGIC) + 16)
    start = len(MAGIC) + 16 * (count + 1)
    pages = {n: body[start + k * PAGE_BYTES : start + (k + 1) * PAGE_BYTES] for k, n in enumerate(table[:count])}
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < size:
            return None
        for number, digest in zip(table[:count], table[count:], strict=True):
            found = pread_all(file.fileno(), PAGE_BYTES, number * PAGE_BYTES)
            if xxhash.xxh3_64_intdigest(found) != digest and found != pages[number][: len(found)]:
                return None
    return size, pages


class Overlay(io.RawIOBase):
    """The file at ``path`` (created when missing, if ``create``) as h5py's file-object driver wants it.

    Nothing reaches the disk before `commit`, but for a commit that an earlier writer could not finish. After an
    exception, just `close`.
    """

    def __init__(self, path: Path, *, create: bool = False, read_only: bool = False) -> None:
        super().__init__()
        self._path = path
        mode = os.O_RDONLY if read_only else os.O_RDWR
        self._fd = os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        self._original = self._size = os.fstat(self._fd).st_size
        self._valid = self._original  # bytes of the disk that still count: a truncation forgets what lay behind
        self._position = 0
        self._failure: OSError | None = None  # of a write, which `commit` raises
        self._pages: dict[int, bytearray] = {}
        if not create:
            self._recover(read_only)

    @classmethod
    def created(cls, path: Path) -> Self:
        """Make the file, which must not exist. Raises OSError."""
        return cls(path, create=True)

    @classmethod
    def reading(cls, path: Path) -> Self:
        """Return the file as it will be once the commit in its journal is complete; the disk stays as it is."""
        return cls(path, read_only=True)

    def _recover(self, read_only: bool) -> None:
        """Look through the journal that a killed writer left; unless ``read_only``, complete its work."""
        waiting = read_journal(self._path)
        if waiting is not None:
            self._size, pages = waiting
            self._pages = {number: bytearray(page) for number, page in pages.items()}
            if not read_only:
                self._apply(list(pages))
                self._original = self._valid = self._size
                self._pages.clear()
        if not read_only:
            journal_of(self._path).unlink(missing_ok=True)

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set and return the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def _page(self, number: int) -> bytearray:
        """Return a page for writing, read from the disk at first."""
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
        """Fill ``buffer`` from the position on."""
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
        """Take ``data`` at the position."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, inside = divmod(self._position + done, PAGE_BYTES)
            take = min(PAGE_BYTES - inside, len(view) - done)
            try:
                self._page(number)[inside : inside + take] = view[done : done + take]
            except OSError as error:  # reading the rest of the page; libhdf5 may crash where a write fails
                self._failure = self._failure or error
            done += take
        self._position += done
        self._size = max(self._size, self._position)
        return done

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file."""
        self._size = self._position if size is None else size
        self._valid = min(self._valid, self._size)
        number, inside = divmod(self._size, PAGE_BYTES)
        for later in [page for page in self._pages if page > number]:
            del self._pages[later]
        if number in self._pages:
            self._pages[number][inside:] = bytes(PAGE_BYTES - inside)
        return self._size

    def commit(self, *, wait: bool = True) -> None:
        """Bring the changes to the disk. Raises OSError; the file is then as it was before.

        Without ``wait`` a new file is only given to the kernel: it is safe after `fsync`.
        """
        if self._failure is not None:
            raise self._failure
        before = -(-self._original // PAGE_BYTES)  # pages from here on need new space
        for number in range(self._valid // PAGE_BYTES, -(-min(self._original, self._size) // PAGE_BYTES)):
            self._page(number)  # cut off and grown again: zero, whatever the disk holds
        in_place = [number for number in sorted(self._pages) if number < before]
        try:
            if self._size > self._original:
                os.ftruncate(self._fd, self._size)
            for number in sorted(self._pages):
                if number >= before:
                    self._put(number)
            if wait or in_place:
                os.fsync(self._fd)
            if in_place:
                self._write_journal({number: self._pages[number] for number in in_place})
        except OSError:
            journal_of(self._path).unlink(missing_ok=True)
            os.ftruncate(self._fd, self._original)
            raise
        if wait or in_place:
            self._apply(in_place)
            journal_of(self._path).unlink(missing_ok=True)
        self._original = self._valid = self._size
        self._pages.clear()

    def _write_journal(self, pages: Mapping[int, bytearray]) -> None:
        journal_of(self._path).unlink(missing_ok=True)  # or a link that would be followed
        fd = atomic.create(journal_of(self._path))
        try:
            before = {number: pread_all(self._fd, PAGE_BYTES, number * PAGE_BYTES) for number in pages}
            pwrite_all(fd, encode_journal(self._size, pages, before), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _apply(self, numbers: list[int]) -> None:
        """Change pages in place and set the size; again, it does the same."""
        for number in numbers:
            self._put(number)
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def _put(self, number: int) -> None:
        start = number * PAGE_BYTES
        pwrite_all(self._fd, memoryview(self._pages[number])[: max(0, self._size - start)], start)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write to the disk at once, beside the overlay; only after `commit`. Raises OSError.

        The disk begins with it while the caller prepares what comes next.
        """
        assert not self._pages, "commit first: pages in memory would overwrite this"
        pwrite_all(self._fd, data, offset)
        if data.nbytes >= BEGIN_BYTES:
            begin_write_back(self._fd, offset, data.nbytes)

    def fsync(self) -> None:
        """Wait until the file is on the disk. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Forget what was not committed and close the file."""
        if not self.closed:
            self._pages.clear()
            os.close(self._fd)
        super().close()
