"""Memory of a node in which each rank publishes what the others take, one turn after the other, without a barrier.

In a turn a rank writes into its own parts (`PublishedMemory.part`), calls `publish`, and, once `wait` has returned,
reads those of the others where they lie: n bytes are written once and read once, and between `publish` and `wait` a
rank can compute. All ranks make the same turns in the same order, and each waits for all in every turn.

There is no sign that a part was read. A rank may write a part again in the turn after next: it has waited then for the
turn between, which all published after they had read what was published before.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.collectives import segments
from hpcdist.collectives.node.flow import Counters
from hpcdist.comm.communicator import Communicator, SharedBlock
from hpcdist.errors import CommunicationError, MissingCapabilityError

_TURNS: Final = 0  # word of the counter


def part_bytes(nbytes: int) -> int:
    """Return the bytes to allocate for a part of ``nbytes``: a quarter more, so that rising loads seldom grow it."""
    return align_up(nbytes + nbytes // 4, ALIGN_BYTES)


class PublishedMemory:
    """Parts of each rank of ``comm``, by name, which it writes and all read. Collective over ``comm``, on one node.

    `grow` makes them. ``head`` are so many ``numbers`` of each rank beside them, int64. Where the ranks can share
    nothing, ``is_shared`` is false, and nothing else may be used.
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
        """Give each rank parts of at least so many bytes, the same on all ranks. Collective; what is there is lost.

        Raises MissingCapabilityError where there is no memory to share.
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
                f"the {self._comm.size} ranks of {self._comm.name} cannot share {total} bytes each: see the free "
                "memory and /dev/shm, or set communication.algorithm = 'native'"
            )
        segments.count_in_ledger(self._parts.views[self._comm.rank])

    def part(self, rank: int, name: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> np.ndarray:
        """Return the beginning of part ``name`` of ``rank`` as an array (local)."""
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        assert self._parts is not None and nbytes <= self._sizes[name], f"{nbytes} bytes of {name}: call `grow` before"
        start = self._starts[name]
        array: np.ndarray = self._parts.views[rank][start : start + nbytes].view(dtype).reshape(shape)
        return array

    def publish(self) -> None:
        """Let the others read what this rank has written in this turn (local).

        Raises CommunicationError after a wait that was given up.
        """
        if self._counters.given_up is not None:
            raise CommunicationError(
                f"an earlier exchange in the shared memory of {self._comm.name} was given up half-way, and its ranks "
                "are out of step; end the job"
            ) from self._counters.given_up
        self._turns += 1
        self._counters.publish(_TURNS, self._turns)

    def wait(self) -> None:
        """Return when all ranks have published this turn (local)."""
        self._counters.wait(_TURNS, self._turns)
