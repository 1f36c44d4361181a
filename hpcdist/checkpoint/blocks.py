"""Verified reading of the blocks of a checkpoint's shards, without libhdf5."""

import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Entry, Manifest
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import open_regular

READ_BYTES: Final = 1 << 20  # read and digested at a time: it is then still in the cache (empirical)
MOST_OPEN: Final = 64  # files; a rank that restores from thousands of shards must not run out of descriptors


class BlockReader:
    """Reads blocks of the shards in ``directory``, each verified against its digest. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, int] = OrderedDict()  # the one used last at the end

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, entry: Entry, block: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return the elements of a block of ``entry``: in ``out``, contiguous and as long as the block, where given.

        Raises StorageError, naming file and tensor; ``out`` is then undefined.
        """
        offset = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, entry.nbytes - offset)
        dtype = dtype_of(entry.dtype)
        data = np.empty(count // dtype.itemsize, dtype) if out is None else out
        where = f"{self._directory.name}/{entry.file}: bytes {offset} to {offset + count} of {entry.name}"
        digest = xxhash.xxh3_128()
        try:
            found = _read(self._fd(entry.file), data.view(np.uint8).data, entry.offset + offset, digest)
        except OSError as error:
            raise StorageError(f"{where} cannot be read: {error.strerror}") from error
        if found != count:
            raise StorageError(f"{where} are beyond the end of the file")
        if block >= len(entry.digests) or digest.hexdigest() != entry.digests[block]:
            raise StorageError(f"{where} are damaged: the digest does not match")
        return data

    def _fd(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = open_regular(self._directory / name)
        self._open.move_to_end(name)
        return self._open[name]


def _read(fd: int, view: memoryview, start: int, digest: xxhash.xxh3_128) -> int:
    """Fill ``view`` from the byte ``start`` on, taking the digest; return how many bytes there were."""
    done = 0
    while done < len(view):
        read = os.preadv(fd, [view[done : done + READ_BYTES]], start + done)
        if not read:
            break
        digest.update(view[done : done + read])
        done += read
    return done


def problem(directory: Path, manifest: Manifest, share: int = 0, of: int = 1) -> str:
    """Return why the shards cannot be used, or "" when they can.

    All sizes are checked; of the digests, every ``of``-th from ``share`` on, so that ranks can divide the reading.
    """
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes, the manifest says {size}"
    memory = np.empty(0, np.uint8)
    with BlockReader(directory) as reader:
        blocks = ((entry, block) for entry in manifest.pieces for block in range(-(-entry.nbytes // BLOCK_BYTES)))
        for number, (entry, block) in enumerate(blocks):
            if number % of != share:
                continue
            nbytes = min(BLOCK_BYTES, entry.nbytes - block * BLOCK_BYTES)
            if memory.nbytes < nbytes:
                memory = np.empty(min(BLOCK_BYTES, max(nbytes, 2 * memory.nbytes)), np.uint8)
            try:
                reader.read(entry, block, memory[:nbytes])
            except StorageError as error:
                return str(error)
    return ""
