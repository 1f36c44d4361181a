"""Exchanges that go on while other layers are computed: sums of gradients, and parameters that are gathered ahead."""

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import nonblocking
from hpcdist.collectives.nonblocking import Handle
from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class Fetched:
    """Gathers that were started ahead: those that were there when they were waited for, those that were not.

    ``exposed_s`` is the time that starting and waiting took.
    """

    hits: int = 0
    misses: int = 0
    exposed_s: float = 0.0


class Overlap:
    """What is under way over the axis ``data``, by any key, and what of it the rank had to wait for.

    Construction is collective. ``kind`` is one of `nonblocking.KINDS`: with "thread" nothing has to be polled.
    """

    def __init__(self, data: Communicator, kind: str) -> None:
        self._progress = nonblocking.begin(data, kind)
        self.over = self._progress.own  # the communicator that sums: not ``data``, on which others may go on
        self.polls = kind == "poll"
        self._under_way: dict[Hashable, Handle] = {}
        self._exposed_s = self._busy_before_s = 0.0
        self._fetched = Fetched()

    def start(self, key: Hashable, gradients: Array, algorithm: str) -> None:
        """Begin to sum ``gradients`` in place. Collective over the axis, in the same order."""
        with self._exposed():
            self._under_way[key] = self._progress.iallreduce(gradients, algorithm)

    def start_sum(self, key: Hashable, gradients: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Begin to sum ``gradients`` in place, each rank its share. Collective over the axis, in the same order."""
        with self._exposed():
            self._under_way[key] = self._progress.ireduce_scatter(gradients, shares, algorithm)

    def wait(self, key: Hashable) -> None:
        """Return when the sum that was started under ``key`` is there."""
        with self._exposed():
            self._under_way.pop(key).wait()

    def start_gather(self, key: Hashable, parameters: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Begin to bring the shares of all ranks together. Collective over the axis, in the same order."""
        with self._fetching():
            self._under_way[key] = self._progress.iall_gather(parameters, shares, algorithm)

    def wait_gather(self, key: Hashable) -> None:
        """Return when what was gathered under ``key`` is there; count whether it was there already."""
        with self._fetching():
            handle = self._under_way.pop(key)
            if handle.test():
                self._fetched = replace(self._fetched, hits=self._fetched.hits + 1)
            else:
                self._fetched = replace(self._fetched, misses=self._fetched.misses + 1)
                handle.wait()

    def poll(self) -> None:
        """Move what is under way, without waiting (local)."""
        with self._exposed():
            self._progress.progress()

    def drain(self) -> None:
        """Return when nothing is under way (local): then ``over`` may be used by others.

        What was started is still to be waited for, each by its key.
        """
        with self._exposed():
            for handle in self._under_way.values():
                handle.wait()

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._exposed_s += time.perf_counter() - begun

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        before = self._exposed_s
        with self._exposed():
            yield
        self._fetched = replace(self._fetched, exposed_s=self._fetched.exposed_s + self._exposed_s - before)

    def taken(self) -> tuple[float, float]:
        """Return, since the last call, the time that this rank gave to what goes on beside, and that it took (local).

        The first is spent starting, polling and waiting. The second is the time in which the thread was at work,
        waiting for other ranks included; NaN without a thread: while nobody looks, nobody knows what moves.
        """
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        busy_s, before_s = self._progress.busy_s, self._busy_before_s
        self._busy_before_s = busy_s
        return exposed_s, math.nan if self.polls else busy_s - before_s

    def fetched(self) -> Fetched:
        """Return the gathers that were waited for since the last call (local)."""
        found, self._fetched = self._fetched, Fetched()
        return found

    def close(self) -> None:
        """Give the communicator, and the thread, back. Collective."""
        self._progress.close()
