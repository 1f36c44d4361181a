"""A snapshot on a disk of the node: written there first, copied out by a thread (local).

The file has no name and is kept for the next saves; a process that is killed leaves nothing behind. It is no checkpoint
and never waited to be safe on its disk: what counts is the copy in the shared directory.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hpcdist.arrays.filestore import begin_write_back
from hpcdist.checkpoint.manifest import BLOCK_BYTES
from hpcdist.checkpoint.sources import Source
from hpcdist.checkpoint.writers import Delivery
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import pwrite_all


class LocalFile:
    """As many bytes in ``directory`` as the state that this rank writes. In the place of `spare.Spare`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def fill(self, delivery: Delivery) -> list[Source]:
        """Write all that ``delivery`` brings, and return where it lies: the state may change from then on.

        On the writer of a group; the others `Delivery.bring` meanwhile. Raises StorageError.
        """
        try:
            self._reserve(sum(slot.nbytes for slot in delivery.slots))
            found: list[Source] = []
            start = 0
            for slot, source in zip(delivery.slots, delivery.sources(), strict=True):
                found.append(partial(self._blocks, start, slot.nbytes))
                for block in source():
                    pwrite_all(self._fd, block.data, start)
                    begin_write_back(self._fd, start, block.nbytes)
                    start += block.nbytes
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"checkpoint.local_directory = {str(self._directory)!r}: {error.strerror}; give a directory on a disk "
                "of each node that has room for what its ranks write"
            ) from error
        return found

    def _reserve(self, nbytes: int) -> None:
        if self._fd < 0:
            with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_size < nbytes:
            os.posix_fallocate(self._fd, 0, nbytes)

    def _blocks(self, start: int, nbytes: int) -> Iterator[np.ndarray]:
        memory = np.empty(min(nbytes, BLOCK_BYTES), np.uint8)
        for done in range(0, nbytes, BLOCK_BYTES):
            block = memory[: min(BLOCK_BYTES, nbytes - done)]
            view, at = block.data, start + done
            while view.nbytes:
                read = os.preadv(self._fd, [view], at)
                if not read:
                    raise StorageError(f"{self._directory}: the snapshot ends at byte {at}")
                view, at = view[read:], at + read
            yield block
