"""Read blocks of a checkpoint's shards and verify their digests, without libhdf5.

A block passes through a small buffer that stays in the cache of a core: pread into it, digest, copy to its place.
Each byte crosses the memory bus twice, as in a plain pread, and the digest costs no crossing of its own. Reading
straight into the place is slower: the kernel then writes to memory that is in no cache, and the digest brings it
back.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES, Manifest, StoredPiece
from hpcdist.errors import StorageError
from hpcdist.reporting.regular import open_regular

READ_BYTES: Final = 1 << 19  # read, digested and copied at a time: it stays in the cache of a core (empirical)
MAX_OPEN_FILES: Final = 64  # files; a rank that restores from thousands of shards must not run out of descriptors

BlockConsumer = Callable[[int, np.ndarray], None]  # gets the number of the first element in the entry, and elements


class DamagedError(StorageError):
    """Bytes of a checkpoint cannot be read, or are not those that were written: another checkpoint may be whole."""


class BlockReader:
    """Reads blocks of the shards in ``directory``, each verified against its digest. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, int] = OrderedDict()  # the one used last at the end
        self._memory = np.empty(READ_BYTES, np.uint8)

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, entry: StoredPiece, block: int, take: BlockConsumer | None = None) -> int:
        """Read and verify a block of ``entry``; return its bytes. ``take`` gets its elements in small parts, in order.

        A part is to be copied before the call returns. Raises DamagedError, naming file and tensor; what was taken is
        then worth nothing.
        """
        offset = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, entry.nbytes - offset)
        where = f"{self._directory.name}/{entry.file}: bytes {offset} to {offset + count} of {entry.name}"
        try:
            found, digest = self._pass(entry, offset, count, take)
        except OSError as error:
            raise DamagedError(f"{where} cannot be read: {error.strerror}") from error
        if found != count:
            raise DamagedError(f"{where} are beyond the end of the file")
        if block >= len(entry.digests) or digest != entry.digests[block]:
            raise DamagedError(f"{where} are damaged: the digest does not match")
        return count

    def digest_of(self, name: str, parts: Iterable[Range]) -> tuple[int, str]:
        """Return how many bytes ``parts`` of the file ``name`` are, and their digest. Raises OSError."""
        fd, digest, count = self._fd(name), xxhash.xxh3_128(), 0
        for part in (part for whole in parts for part in cut(whole, READ_BYTES)):
            view = self._memory.data[: part.size]
            read = _read_fully(fd, view, part.start)
            digest.update(view[:read])
            count += read
        return count, digest.hexdigest()

    def _pass(self, entry: StoredPiece, offset: int, count: int, take: BlockConsumer | None) -> tuple[int, str]:
        """Let ``count`` bytes of ``entry`` pass through the memory; return how many there were, and their digest."""
        fd, digest = self._fd(entry.file), xxhash.xxh3_128()
        elements = self._memory.view(dtype_of(entry.dtype))
        itemsize, view = elements.itemsize, self._memory.data
        begin, done = entry.offset + offset, 0
        size = (READ_BYTES - begin % READ_BYTES) // itemsize * itemsize or READ_BYTES  # then from page to page
        while done < count:
            size = min(size, count - done)
            part = view[:size]
            read = os.preadv(fd, [part], begin + done)
            if read < size:
                read += _read_fully(fd, part[read:], begin + done + read)
            if read < size:
                return done + read, ""
            digest.update(part)
            if take is not None:
                take((offset + done) // itemsize, elements[: size // itemsize])
            done, size = done + size, READ_BYTES
        return count, digest.hexdigest()

    def _fd(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = open_regular(self._directory / name)
        self._open.move_to_end(name)
        return self._open[name]


def _read_fully(fd: int, view: memoryview, start: int) -> int:
    """Fill ``view`` from the byte ``start`` on; return how many bytes there were."""
    done = 0
    while done < len(view) and (read := os.preadv(fd, [view[done:]], start + done)):
        done += read
    return done


def size_mismatch(directory: Path, manifest: Manifest) -> str:
    """Return which shard is missing or has another size than when it was written, or "" when all are right."""
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes, the manifest says {size}"
    return ""


def first_damage(directory: Path, manifest: Manifest, share: int = 0, of: int = 1) -> str:
    """Return which bytes of the shards are damaged, or "" when none are.

    Every ``of``-th block from ``share`` on is read, so that ranks can divide the reading.
    """
    with BlockReader(directory) as reader:
        blocks = ((entry, block) for entry in manifest.pieces for block in range(-(-entry.nbytes // BLOCK_BYTES)))
        for number, (entry, block) in enumerate(blocks):
            if number % of != share:
                continue
            try:
                reader.read(entry, block)
            except StorageError as error:
                return str(error)
    return ""
