"""A file whose changes are kept in memory until they are committed.

libhdf5 does not survive a full disk: a failed write leaves open identifiers behind, and the process ends in a
segmentation fault at exit. So libhdf5 never writes to a disk here. It writes to an overlay, and the overlay is
committed with plain calls that fail cleanly: first what extends the file, where a full disk is met and undone, then
what changes it in place, which needs no new space (except on copy-on-write file systems).
"""

import io
import os
from pathlib import Path

PAGE_BYTES = 4096


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


class Overlay(io.RawIOBase):
    """The file at ``path`` (created when missing, if ``create``) as h5py's file-object driver wants it.

    Nothing reaches the disk before `commit`. After an exception, just `close`.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o666)
        self._original = self._size = os.fstat(self._fd).st_size
        self._valid = self._original  # bytes of the disk that still count: a truncation forgets what lay behind
        self._position = 0
        self._pages: dict[int, bytearray] = {}

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
            self._page(number)[inside : inside + take] = view[done : done + take]
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

    def commit(self) -> None:
        """Bring the changes to the disk. Raises OSError; the file is then as it was before."""
        before = -(-self._original // PAGE_BYTES)  # pages from here on need new space
        for number in range(self._valid // PAGE_BYTES, -(-min(self._original, self._size) // PAGE_BYTES)):
            self._page(number)  # cut off and grown again: zero, whatever the disk holds
        try:
            if self._size > self._original:
                os.ftruncate(self._fd, self._size)
            for number in sorted(self._pages):
                if number >= before:
                    self._put(number)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._original)
            raise
        for number in sorted(self._pages):
            if number < before:
                self._put(number)
        if self._size < self._original:
            os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        self._original = self._valid = self._size
        self._pages.clear()

    def _put(self, number: int) -> None:
        start = number * PAGE_BYTES
        pwrite_all(self._fd, memoryview(self._pages[number])[: max(0, self._size - start)], start)

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write to the disk at once, beside the overlay; only after `commit`. Raises OSError."""
        assert not self._pages, "commit first: pages in memory would overwrite this"
        pwrite_all(self._fd, data, offset)

    def fsync(self) -> None:
        """Wait until the file is on the disk. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Forget what was not committed and close the file."""
        if not self.closed:
            self._pages.clear()
            os.close(self._fd)
        super().close()
