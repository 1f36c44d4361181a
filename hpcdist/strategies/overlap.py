"""Reductions of gradients that go on while the backward of earlier layers is computed."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import nonblocking
from hpcdist.collectives.nonblocking import Handle
from hpcdist.comm.communicator import Communicator


class Overlap:
    """What is under way over the axis ``data``, by range, and what of it the rank had to wait for.

    Construction is collective. ``kind`` is one of `nonblocking.KINDS`: with "thread" nothing has to be polled.
    """

    def __init__(self, data: Communicator, kind: str) -> None:
        self._progress = nonblocking.begin(data, kind)
        self.over = self._progress.own  # the communicator that sums: not ``data``, on which others may go on
        self.polls = kind == "poll"
        self._under_way: dict[Range, Handle] = {}
        self._exposed_s = self._busy_before_s = 0.0

    def start(self, part: Range, gradients: Array, algorithm: str) -> None:
        """Begin to sum ``gradients``, those of ``part``, in place. Collective over the axis, in the same order."""
        with self._exposed():
            self._under_way[part] = self._progress.iallreduce(gradients, algorithm)

    def wait(self, part: Range) -> None:
        """Return when the sum of ``part`` is there."""
        with self._exposed():
            self._under_way.pop(part).wait()

    def poll(self) -> None:
        """Move what is under way, without waiting (local)."""
        with self._exposed():
            self._progress.progress()

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._exposed_s += time.perf_counter() - begun

    def taken(self) -> tuple[float, float]:
        """Return, since the last call, the time that this rank gave to reductions, and that they took (local).

        The first is spent starting, polling and waiting. The second is the time in which the thread was at work,
        waiting for other ranks included; NaN without a thread: while nobody looks, nobody knows what moves.
        """
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        busy_s, before_s = self._progress.busy_s, self._busy_before_s
        self._busy_before_s = busy_s
        return exposed_s, math.nan if self.polls else busy_s - before_s

    def close(self) -> None:
        """Give the communicator, and the thread, back. Collective."""
        self._progress.close()
