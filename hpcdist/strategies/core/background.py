"""Collectives of an exchange that run in the background while the rank computes."""

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import nonblocking
from hpcdist.collectives.progress import Handle
from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class PrefetchCounts:
    """Numbers of prefetched gathers that were complete when needed (hits) or still in flight (misses)."""

    hits: int = 0
    misses: int = 0
    exposed_s: float = 0.0  # seconds that the rank spent to start the gathers and to wait for them


class BackgroundCollectives:
    """Collectives that run in the background over the data axis. All data ranks must start them in the same order."""

    # ``kind``: method of making progress, one of `nonblocking.KINDS`, such as "poll". Methods that start a collective
    # take a ``key``, an identifier for the later `wait` or `wait_gather`.

    def __init__(self, data: Communicator, kind: str) -> None:
        self._progress = nonblocking.begin(data, kind)
        self.over = self._progress.duplicate  # communicator of the collectives, a duplicate of ``data``
        self.polls = kind == "poll"  # with a thread, nothing has to be polled
        self._in_flight: dict[Hashable, Handle] = {}
        self._exposed_s = self._busy_before_s = 0.0
        self._fetched = PrefetchCounts()

    def start(self, key: Hashable, gradients: Array, algorithm: str) -> None:
        """Start to allreduce ``gradients`` in place with ``algorithm``. ``key``: identifier of this call for `wait`."""
        with self._exposed():
            self._in_flight[key] = self._progress.iallreduce(gradients, algorithm)

    def start_sum(self, key: Hashable, gradients: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Start to reduce-scatter ``gradients`` in place with ``algorithm``: rank r gets its range of the sum.

        ``shares[r]``: range of rank r. ``key``: identifier of this call for `wait`.
        """
        with self._exposed():
            self._in_flight[key] = self._progress.ireduce_scatter(gradients, shares, algorithm)

    def wait(self, key: Hashable) -> None:
        """Wait for the collective that was started with ``key``."""
        with self._exposed():
            self._in_flight.pop(key).wait()

    def start_gather(self, key: Hashable, parameters: Array, shares: Sequence[Range], algorithm: str) -> None:
        """Start to all-gather ``parameters`` in place with ``algorithm``: rank r sends ``shares[r]``.

        ``key``: identifier of this call for `wait_gather`.
        """
        with self._fetching():
            self._in_flight[key] = self._progress.iall_gather(parameters, shares, algorithm)

    def wait_gather(self, key: Hashable) -> None:
        """Wait for the gather that was started with ``key``, and count a hit or a miss."""
        with self._fetching():
            handle = self._in_flight.pop(key)
            if handle.test():
                self._fetched = replace(self._fetched, hits=self._fetched.hits + 1)
            else:
                self._fetched = replace(self._fetched, misses=self._fetched.misses + 1)
                handle.wait()

    def poll(self) -> None:
        """Make progress on the collectives in flight, without waiting."""
        with self._exposed():
            self._progress.progress()

    def drain(self) -> None:
        """Wait until all collectives in flight are complete. The caller must still call `wait` for each key."""
        with self._exposed():
            for handle in self._in_flight.values():
                handle.wait()

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._exposed_s += time.perf_counter() - start

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        before = self._exposed_s
        with self._exposed():
            yield
        self._fetched = replace(self._fetched, exposed_s=self._fetched.exposed_s + self._exposed_s - before)

    def taken(self) -> tuple[float, float]:
        """Return seconds since the last call: (spent by the caller, spent by the background thread). Local."""
        # Exposed: the caller started, polled or waited. Busy: the thread worked or waited for ranks; NaN without a
        # thread.
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        busy_s, before_s = self._progress.busy_s, self._busy_before_s
        self._busy_before_s = busy_s
        return exposed_s, math.nan if self.polls else busy_s - before_s

    def fetched(self) -> PrefetchCounts:
        """Return the `PrefetchCounts` (hits and misses) of prefetched gathers since the last call."""
        counts, self._fetched = self._fetched, PrefetchCounts()
        return counts

    def close(self) -> None:
        """End the background thread, and free its communicator. Collective over the data axis."""
        self._progress.close()
