"""Reductions of ranks that are threads: parts in rank order, and one that is complete when the last part came."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.comm.thread_deaths import Fate
from hpcdist.errors import CommunicationError

_UFUNC: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Round:
    """An iallreduce under way: ``parts`` fills up with what each of ``size`` ranks brings.

    ``until`` waits for a condition, under the deadline of the group; ``fate`` tells of deaths.
    """

    def __init__(
        self,
        parts: dict[int, Array],
        size: int,
        message: Array,
        op: str,
        until: Callable[[Callable[[], bool]], None],
        fate: Fate,
    ) -> None:
        self._parts, self._size, self._message, self._op, self._until = parts, size, message, op, until
        self._fate = fate

    def wait(self) -> None:
        """Return when the last part has come, with the result in the message."""
        self._until(lambda: len(self._parts) == self._size)
        self.test()

    def test(self) -> bool:
        """Whether the last part has come; then the result is in the message."""
        if len(self._parts) < self._size:
            self._fate.look_for_deaths(None, "an iallreduce")
            return False
        self._message[...] = combined([self._parts[rank] for rank in range(self._size)], self._message, self._op)
        return True


def combined(parts: Sequence[Array], message: Array, op: str) -> Array:
    """Return ``parts``, one of each rank and all like ``message``, reduced in rank order."""
    if any(part.shape != message.shape or part.dtype != message.dtype for part in parts):
        raise CommunicationError(f"the ranks brought buffers of {[(p.size, str(p.dtype)) for p in parts]}")
    total: Array = parts[0].copy()
    for part in parts[1:]:
        _UFUNC[op](total, part, out=total)
    return total
