"""A disk that fails on purpose: the file of one shard, in the middle of whose writing something happens (local)."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hpcdist.hdf5.overlay import Overlay

ERRORS: Final = {"fail": errno.EIO, "full": errno.ENOSPC, "fsync": errno.EIO}


class FailingFile(Overlay):
    """The new file at ``path``, whose writing ends as ``how`` says: fail, full, fsync, or kill.

    ``strikes`` is asked just before, and answers whether it happens; it does not return where it kills. Half of the
    bytes are written before, but for a write that fails as a whole. A file that has no second half fails at its fsync.
    """

    def __init__(self, path: Path, how: str, strikes: Callable[[], bool]) -> None:
        super().__init__(path, create=True)
        self._how, self._strikes = how, strikes

    def pwrite(self, data: memoryview, offset: int) -> None:
        """Write to the disk, up to the middle of the file."""
        middle = os.fstat(self._fd).st_size // 2
        if self._how != "fsync" and offset + data.nbytes > middle:
            if self._how != "fail":
                super().pwrite(data[: max(0, middle - offset)], offset)
            self._strike()
        super().pwrite(data, offset)

    def fsync(self) -> None:
        """Fail, or wait until the file is on the disk."""
        self._strike()
        super().fsync()

    def _strike(self) -> None:
        if self._strikes():
            number = ERRORS[self._how]
            raise OSError(number, os.strerror(number))
