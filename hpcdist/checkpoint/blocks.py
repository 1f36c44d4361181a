"""Verified reading of the blocks of a checkpoint's shards, without libhdf5."""

import os
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Entry, Manifest
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import pread_all


class BlockReader:
    """Reads blocks of the shards in ``directory``, each verified against its digest. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, int] = {}

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, entry: Entry, block: int) -> np.ndarray:
        """Return the elements of a block of ``entry`` (read-only). Raises StorageError, naming file and tensor."""
        offset = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, entry.nbytes - offset)
        where = f"{self._directory.name}/{entry.file}: bytes {offset} to {offset + count} of {entry.name}"
        try:
            data = pread_all(self._fd(entry.file), count, entry.offset + offset)
        except OSError as error:
            raise StorageError(f"{where} cannot be read: {error.strerror}") from error
        if len(data) != count:
            raise StorageError(f"{where} are beyond the end of the file")
        if block >= len(entry.digests) or xxhash.xxh3_128_hexdigest(data) != entry.digests[block]:
            raise StorageError(f"{where} are damaged: the digest does not match")
        return np.frombuffer(data, dtype_of(entry.dtype))

    def _fd(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._directory / name, os.O_RDONLY)
        return self._open[name]


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
    blocks = [(entry, block) for entry in manifest.pieces for block in range(-(-entry.nbytes // BLOCK_BYTES))]
    with BlockReader(directory) as reader:
        for entry, block in blocks[share::of]:
            try:
                reader.read(entry, block)
            except StorageError as error:
                return str(error)
    return ""
