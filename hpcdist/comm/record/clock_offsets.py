"""Clock offsets between the hosts of a job, measured with messages.

The peer is assumed to read its clock in the middle of the round trip, so the error is at most half the round trip. The
shortest of several rounds counts (F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989).
Clocks drift apart by up to 50 us per second, so offsets are measured repeatedly and interpolated.
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
    """Measured offset of a host's clock to the clock of rank 0, with the round-trip time of the measurement."""

    host: int
    t_ns: int  # time of rank 0's clock
    offset_ns: int  # by which the host's clock was ahead of rank 0's clock
    rtt_ns: int  # round-trip time of the message

    @property
    def bound_ns(self) -> int:
        """Upper bound of the error of the offset, in nanoseconds."""
        return (self.rtt_ns + 1) // 2


@dataclass(frozen=True)
class HostTable:
    """Hosts of a job: names and kernel boot ids by host index, and the host index of each rank."""

    of_rank: tuple[int, ...]  # host index of each rank
    names: tuple[str, ...]  # by host index
    # boot ids by host: processes of one running kernel, also in containers, share a monotonic clock
    boots: tuple[str, ...]


class HostClocks:
    """Offsets of the clocks of all hosts to the clock of rank 0. Construction is collective over ``comm``."""

    def __init__(
        self,
        comm: Communicator,
        boot: str | None = None,
        clock: Callable[[], int] = time.monotonic_ns,  # returns nanoseconds
        flat: int = FLAT,
    ) -> None:
        # `boot` identifies this host, by default by the kernel's boot id.
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
        """Return True on rank 0 if the last `measure` is at least ``every_s`` seconds old, else False. Local."""
        return self._is_first and time.monotonic() - self._measured >= every_s

    def measure(self, rounds: int = ROUNDS) -> tuple[ClockReading, ...]:
        """Measure host clocks by ``rounds`` round trips. Return a reading per host on rank 0, else (). Collective."""
        self._measured = time.monotonic()
        if self._leaders is None:
            return (ClockReading(0, self._clock(), 0, 0),) if self._is_first else ()
        return measure_offsets(self._leaders, self._clock, rounds, self._flat)


def measure_offsets(
    comm: Communicator, clock: Callable[[], int], rounds: int = ROUNDS, flat: int = FLAT
) -> tuple[ClockReading, ...]:
    """Compare each rank's ``clock`` (in ns) with rank 0's. Return one reading per rank on rank 0, else (). Collective.

    ``rounds``: round trips per rank. With more than ``flat`` ranks, some ranks measure others on behalf of rank 0.
    """
    # The fastest of `rounds` round trips counts. If a rank is measured through a head, both error bounds add up.
    size = comm.size if comm.size <= flat else math.isqrt(comm.size - 1) + 1
    head = comm.rank - comm.rank % size
    heads = range(0, comm.size, size)
    members = range(head + 1, min(head + size, comm.size))
    if comm.rank != head:
        _answer(comm, head, clock, rounds)
        return ()
    if comm.rank:  # a head: rank 0 measures it, then it measures its group and sends the rows
        _answer(comm, 0, clock, rounds)
        group_rows = np.array([_ask(comm, peer, clock, rounds) for peer in members], np.int64).reshape(-1)
        if group_rows.size:
            comm.send(group_rows, 0, _TAG)
        return ()
    readings = {0: ClockReading(0, clock(), 0, 0)}
    readings |= {peer: ClockReading(peer, *_ask(comm, peer, clock, rounds)) for peer in (*heads[1:], *members)}
    for first in heads[1:]:
        to_head, others = readings[first], range(first + 1, min(first + size, comm.size))
        rows = np.zeros((len(others), 3), np.int64)
        if rows.size:
            comm.recv(rows.reshape(-1), first, _TAG)
        for rank, (t_ns, offset_ns, rtt_ns) in zip(others, rows.tolist(), strict=True):
            # The head has measured against its clock. Subtracting its offset gives times of rank 0. Offsets add up, and
            # so do the errors, and therefore the round trips.
            offset = to_head.offset_ns
            readings[rank] = ClockReading(rank, t_ns - offset, offset_ns + offset, rtt_ns + to_head.rtt_ns)
    return tuple(readings[rank] for rank in range(comm.size))


def _ask(comm: Communicator, peer: int, clock: Callable[[], int], rounds: int) -> tuple[int, int, int]:
    answer = np.zeros(1, np.int64)
    best = (0, 0, -1)
    for _ in range(rounds):
        begin = clock()
        comm.send(answer, peer, _TAG)
        comm.recv(answer, peer, _TAG)
        round_trip = clock() - begin
        if best[2] < 0 or 0 <= round_trip < best[2]:  # negative: a wall clock was set back meanwhile
            middle = begin + round_trip // 2
            best = (middle, int(answer[0]) - middle, round_trip)
    # local time, clock offset of `peer` and round-trip time of the fastest round, in ns
    return best


def _answer(comm: Communicator, peer: int, clock: Callable[[], int], rounds: int) -> None:
    answer = np.zeros(1, np.int64)
    for _ in range(rounds):
        comm.recv(answer, peer, _TAG)
        answer[0] = clock()
        comm.send(answer, peer, _TAG)
