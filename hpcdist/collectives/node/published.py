"""Node memory in which each rank publishes data for the other ranks, without a barrier.

In each round, a rank writes its arrays (`PublishedMemory.part`), calls `publish`, calls `wait`, and reads the arrays of
the other ranks. All ranks make the same rounds in the same order. An array may be overwritten two rounds later: by then
every rank has finished reading.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.collectives import segments
from hpcdist.collectives.node.flow import Counters
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError

_TURNS: Final = 0  # index of the counter word


def part_bytes(nbytes: int) -> int:
    """Return the bytes to allocate for ``nbytes`` bytes: 25 % more, so that growing sizes rarely reallocate."""
    return align_up(nbytes + nbytes // 4, ALIGN_BYTES)


class PublishedMemory:
    """Arrays in a node's shared memory: each rank writes its arrays and reads all arrays. Construction is collective.

    ``is_shared``: False if the ranks cannot share memory. ``head``: for each rank, an array of ``numbers`` int64
    values. `grow` allocates the other arrays.
    """

    def __init__(self, comm: Communicator, numbers: int) -> None:
        self._comm, self._turns = comm, 0
        self._counters = Counters(comm, 8 * numbers)
        self._parts: SharedBlock | None = None
        self._sizes: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self.is_shared = self._counters.is_shared
        self.head = [view[view.size - 8 * numbers :].view(np.int64) for view in self._counters.block.views]

    def grow(self, sizes: Mapping[str, int]) -> None:
        """Enlarge each named array to ``sizes[name]`` bytes or more. Its data is lost. Collective.

        All ranks pass equal sizes. Raises MissingCapabilityError if the memory cannot be shared.
        """
        short = {name: size for name, size in sizes.items() if size > self._sizes.get(name, 0)}
        if not short:
            return
        self._sizes |= {name: part_bytes(size) for name, size in short.items()}
        *starts, total = accumulate(self._sizes.values(), initial=0)
        self._starts = dict(zip(self._sizes, starts, strict=True))
        if self._parts is not None:
            self._parts.close()
        self._parts = self._comm.shared(total)
        if not self._parts.is_shared:
            raise MissingCapabilityError(
                f"the {self._comm.size} ranks of {self._comm.name} cannot share {total} bytes each: free "
                "memory or enlarge /dev/shm, or set communication.algorithm = 'native'"
            )
        segments.count_in_ledger(self._parts.views[self._comm.rank])

    def part(self, rank: int, name: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> np.ndarray:
        """Return the first elements of ``rank``'s array ``name``, in the given shape and dtype. Local."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        assert self._parts is not None and nbytes <= self._sizes[name], f"{nbytes} bytes of {name}: call `grow` first"
        start = self._starts[name]
        array: np.ndarray = self._parts.views[rank][start : start + nbytes].view(dtype).reshape(shape)
        return array

    def publish(self) -> None:
        """Make this rank's writes visible to all ranks. Raises CommunicationError if a `wait` was aborted. Local."""
        if self._counters.given_up is not None:
            raise CommunicationError(
                f"an earlier exchange in the shared memory of {self._comm.name} was aborted, so its ranks cannot "
                "continue; end the job"
            ) from self._counters.given_up
        self._turns += 1
        self._counters.publish(_TURNS, self._turns)

    def wait(self) -> None:
        """Wait until each rank has called `publish` at least as often as this rank. Local."""
        self._counters.wait(_TURNS, self._turns)
