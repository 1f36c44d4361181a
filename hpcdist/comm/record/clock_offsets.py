"""Clock offsets between the hosts of a job, measured with messages.

One rank sends a request, the other replies with its clock. The reply is assumed to be read in the middle of the round
trip, so the error is at most half of that; the shortest of several rounds counts (F. Cristian, Probabilistic clock
synchronization, Distributed Computing 3, 1989). Quartzes drift apart by some 50 us a second at worst: offsets are
measured repeatedly and interpolated (`hpcdist.telemetry.trace.clock_correction`).
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import boot_id

ROUNDS: Final = 20
# Above this number of hosts, offsets are measured in two levels, so that no host measures more than about 2 sqrt(n).
FLAT: Final = 16
EVERY_S: Final = 600.0  # between two measurements
_TAG: Final = 4711


@dataclass(frozen=True)
class ClockReading:
    """Offset of a ``host``: its clock was ``offset_ns`` ahead of rank 0's when rank 0's clock showed ``t_ns``.

    ``rtt_ns`` is the round-trip time of the measurement: the error of the offset is at most half of that.
    """

    host: int
    t_ns: int
    offset_ns: int
    rtt_ns: int

    @property
    def bound_ns(self) -> int:
        """Bound of the error of the offset."""
        return (self.rtt_ns + 1) // 2


@dataclass(frozen=True)
class HostTable:
    """Hosts of a job: ``of_rank`` has the index of each rank's host; ``names`` and ``boots`` are by host.

    A boot id names a running kernel: all of its processes, also in containers, share one monotonic clock.
    """

    of_rank: tuple[int, ...]
    names: tuple[str, ...]
    boots: tuple[str, ...]


class HostClocks:
    """Measurement of the offsets of the hosts' monotonic clocks to that of rank 0. Construction is collective.

    ``boot`` (boot id), ``clock`` (in ns) and ``flat`` replace those of this host, and `FLAT`, in tests.
    """

    def __init__(
        self,
        comm: Communicator,
        boot: str | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        flat: int = FLAT,
    ) -> None:
        hosts = comm.allgather_object((boot_id() if boot is None else boot, os.uname().nodename))
        boots = list(dict.fromkeys(boot for boot, _ in hosts))  # in the order of their first ranks
        firsts = [next(rank for rank, (boot, _) in enumerate(hosts) if boot == first_boot) for first_boot in boots]
        names = tuple(hosts[rank][1] for rank in firsts)
        self.hosts = HostTable(tuple(boots.index(boot) for boot, _ in hosts), names, tuple(boots))
        leads = comm.rank in firsts
        self._leaders = comm.split(0 if leads else None, comm.rank, "clocks") if len(boots) > 1 else None
        self._is_first, self._clock, self._flat = comm.rank == 0, clock, flat
        self._measured = -math.inf

    def due(self, every_s: float = EVERY_S) -> bool:
        """Whether it is time for `measure` again: known on rank 0 only, which must tell the others (local)."""
        return self._is_first and time.monotonic() - self._measured >= every_s

    def measure(self, rounds: int = ROUNDS) -> tuple[ClockReading, ...]:
        """Return a reading for each host on rank 0, nothing on the others. Collective over the job.

        Ranks that are not the first of their host return at once.
        """
        self._measured = time.monotonic()
        if self._leaders is None:
            return (ClockReading(0, self._clock(), 0, 0),) if self._is_first else ()
        return measure_offsets(self._leaders, self._clock, rounds, self._flat)


def measure_offsets(
    comm: Communicator, clock: Callable[[], int], rounds: int = ROUNDS, flat: int = FLAT
) -> tuple[ClockReading, ...]:
    """Return how far the ``clock`` of each rank is ahead of that of rank 0, there alone. Collective over ``comm``.

    The ``host`` of a reading is the rank. Of more than ``flat`` ranks, rank 0 asks the first of each of about sqrt(n)
    groups, and those ask the rest of theirs at the same time: the bounds of both ways add up.
    """
    # Groups of `size` consecutive ranks, each led by its first, the head: ceil(sqrt(n)) ranks in ceil(sqrt(n)) groups.
    size = comm.size if comm.size <= flat else math.isqrt(comm.size - 1) + 1
    head = comm.rank - comm.rank % size
    heads = range(0, comm.size, size)
    members = range(head + 1, min(head + size, comm.size))
    if comm.rank != head:
        _answer(comm, head, clock, rounds)
        return ()
    if comm.rank:  # a head: first it is measured by rank 0, then it measures its group and sends the rows
        _answer(comm, 0, clock, rounds)
        own = np.array([_ask(comm, peer, clock, rounds) for peer in members], np.int64).reshape(-1)
        if own.size:
            comm.send(own, 0, _TAG)
        return ()
    readings = {0: ClockReading(0, clock(), 0, 0)}
    readings |= {peer: ClockReading(peer, *_ask(comm, peer, clock, rounds)) for peer in (*heads[1:], *members)}
    for first in heads[1:]:
        to_head, others = readings[first], range(first + 1, min(first + size, comm.size))
        rows = np.zeros((len(others), 3), np.int64)
        if rows.size:
            comm.recv(rows.reshape(-1), first, _TAG)
        for rank, (t_ns, offset_ns, rtt_ns) in zip(others, rows.tolist(), strict=True):
            # The head has measured against its own clock: subtracting its offset gives times of rank 0, offsets add
            # up, and so do the errors, hence the round trips.
            offset = to_head.offset_ns
            readings[rank] = ClockReading(rank, t_ns - offset, offset_ns + offset, rtt_ns + to_head.rtt_ns)
    return tuple(readings[rank] for rank in range(comm.size))


def _ask(comm: Communicator, peer: int, clock: Callable[[], int], rounds: int) -> tuple[int, int, int]:
    """Return (own clock, how far that of ``peer`` is ahead, round trip) of the shortest round."""
    answer = np.zeros(1, np.int64)
    best = (0, 0, -1)
    for _ in range(rounds):
        begin = clock()
        comm.send(answer, peer, _TAG)
        comm.recv(answer, peer, _TAG)
        took = clock() - begin
        if best[2] < 0 or 0 <= took < best[2]:  # negative: a wall clock was set back meanwhile
            middle = begin + took // 2
            best = (middle, int(answer[0]) - middle, took)
    return best


def _answer(comm: Communicator, peer: int, clock: Callable[[], int], rounds: int) -> None:
    answer = np.zeros(1, np.int64)
    for _ in range(rounds):
        comm.recv(answer, peer, _TAG)
        answer[0] = clock()
        comm.send(answer, peer, _TAG)
