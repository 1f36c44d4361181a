"""Clock correction: map the clock of every host to rank 0's clock, by measured readings or by messages.

Offsets between readings are interpolated. Without readings, causality bounds the offset of two clocks: no message is
received before it was sent, and no member leaves a collective before the last has entered. Members are assumed to leave
a collective together.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from hpcdist.comm.record.clock_offsets import ClockReading
from hpcdist.telemetry.metrics.side_tables import ClockSession
from hpcdist.telemetry.trace.matching import MatchedCollective, Matches
from hpcdist.telemetry.trace.rank_log import NO_STEP, RankLog, RecordedCall

DRIFT_PPM: Final = 50  # assumed drift of a quartz with a single reading
MAX_PPM: Final = 500  # the fastest slew rate of the kernel
MILLION: Final = 1_000_000
MEASURED: Final = "measured"
MESSAGES: Final = "messages"
WALL: Final = "wall clocks"


class HostClock:
    """Clock of one host, compared with rank 0's clock by ``readings``. Without readings, the clocks count as equal."""

    def __init__(self, readings: Sequence[ClockReading] = (), source: str = MEASURED) -> None:
        self.source = source
        self._knots: list[ClockReading] = []
        for reading in sorted(readings, key=lambda candidate: candidate.t_ns):
            # Corrected times must not go back. Of two contradicting readings, the one with the shorter round trip
            # stays: drop the new one (break), or earlier ones until it is consistent (else).
            while self._knots and not self._follows(self._knots[-1], reading):
                if self._knots[-1].rtt_ns <= reading.rtt_ns:
                    break
                self._knots.pop()
            else:
                self._knots.append(reading)
        self._own = [knot.t_ns + knot.offset_ns for knot in self._knots]

    @staticmethod
    def _follows(before: ClockReading, after: ClockReading) -> bool:
        passed = after.t_ns - before.t_ns
        drifted = abs(after.offset_ns - before.offset_ns) - before.bound_ns - after.bound_ns
        ahead = passed > 0 and passed + after.offset_ns - before.offset_ns > 0
        return ahead and drifted * MILLION <= MAX_PPM * passed

    @property
    def readings(self) -> tuple[ClockReading, ...]:
        """Tuple of the clock readings from which the offset is interpolated, in order of time."""
        return tuple(self._knots)

    @property
    def drift_ppm(self) -> float | None:
        """Drift in ppm of this clock against rank 0's clock over all readings, or None if unknown."""
        if len(self._knots) < 2:
            return None
        first, last = self._knots[0], self._knots[-1]
        return (last.offset_ns - first.offset_ns) / (last.t_ns - first.t_ns) * MILLION

    def offset_ns(self, own_ns: int) -> int:
        """Return the offset (this clock minus rank 0's clock) in ns. ``own_ns``: time on this clock."""
        if not self._knots:
            return 0
        place = bisect_right(self._own, own_ns)  # number of earlier readings
        if len(self._knots) == 1:
            return self._knots[0].offset_ns
        nearest = min(max(place, 1), len(self._knots) - 1)
        a, b = self._knots[nearest - 1], self._knots[nearest]
        begin, rise, run = (
            self._own[nearest - 1],
            b.offset_ns - a.offset_ns,
            self._own[nearest] - self._own[nearest - 1],
        )
        if 0 < place < len(self._own):
            return a.offset_ns + (own_ns - begin) * rise // run
        # Outside of all readings: extrapolate the nearest drift, limited to the possible drift.
        limit = run * MAX_PPM // MILLION
        rise = max(-limit, min(limit, rise))
        knot, at = (a, begin) if place == 0 else (b, self._own[nearest])
        return knot.offset_ns + (own_ns - at) * rise // run

    def offset_at(self, reference_ns: int) -> int:
        """Return the offset (this clock minus rank 0's clock) in ns. ``reference_ns``: time on rank 0's clock."""
        if not self._knots:
            return 0
        nearest = min(self._knots, key=lambda knot: abs(knot.t_ns - reference_ns))
        return self.offset_ns(reference_ns + nearest.offset_ns)

    def reference_ns(self, own_ns: int) -> int:
        """Convert the time ``own_ns`` of this clock to rank 0's clock, in ns. The result never decreases."""
        return own_ns - self.offset_ns(own_ns)

    def bound_ns(self, own_ns: int) -> int | None:
        """Return the largest error of ``reference_ns(own_ns)`` in ns, or None if unknown."""
        if not self._knots:
            return 0
        if self.source == WALL:
            return None
        place = bisect_right(self._own, own_ns)
        if 0 < place < len(self._own):
            return max(self._knots[place - 1].bound_ns, self._knots[place].bound_ns)
        nearest = 0 if place == 0 else -1
        distance, bound = abs(own_ns - self._own[nearest]), self._knots[nearest].bound_ns
        if len(self._knots) == 1:
            return bound + distance * DRIFT_PPM // MILLION
        # The drift error is at most the sum of both bounds over the time between the readings.
        other = self._knots[1 if place == 0 else -2]
        run = abs(self._own[nearest] - self._own[1 if place == 0 else -2])
        return bound + min(distance * (bound + other.bound_ns) // run, distance * MAX_PPM // MILLION)


@dataclass(frozen=True)
class ClockCorrections:
    """Clock correction (`HostClock`) of each host. ``reference``: host of rank 0. ``notes``: remarks for the user."""

    reference: str
    clocks: Mapping[str, HostClock]
    notes: tuple[str, ...]


def find_corrections(
    logs: Mapping[int, RankLog], sessions: Sequence[ClockSession], matches: Matches
) -> ClockCorrections:
    """Return the clock corrections of all hosts. Local.

    Sources: clock readings in ``sessions``, else message times in ``matches``, else the wall clocks in ``logs``.
    """
    hosts = list(dict.fromkeys(logs[rank].host for rank in sorted(logs)))
    measured = _measured_clocks(hosts, sessions)
    if measured is not None:
        return measured
    reference = hosts[0]
    clocks = {reference: HostClock()}
    if len(hosts) == 1:
        return ClockCorrections(reference, clocks, ())
    inferred = _inferred_clocks(logs, matches, reference)
    walls = {log.host: log.wall_ns for log in logs.values()}
    for host in hosts[1:]:
        readings = inferred.get(host)
        if readings is not None:
            clocks[host] = readings
        else:
            clocks[host] = HostClock([ClockReading(0, 0, walls[reference] - walls[host], 0)], WALL)
    by_messages = sum(clock.source == MESSAGES for clock in clocks.values())
    notes = ["the metrics have no readings of these hosts' clocks: "]
    if by_messages:
        notes[0] += f"{by_messages} are taken from the ends of messages and collectives"
    if by_messages < len(hosts) - 1:
        notes[0] += f"{' and ' if by_messages else ''}{len(hosts) - 1 - by_messages} from unverified wall clocks"
    return ClockCorrections(reference, clocks, tuple(notes))


def _measured_clocks(hosts: Sequence[str], sessions: Sequence[ClockSession]) -> ClockCorrections | None:
    # None if a host has no readings.
    for last in reversed(sessions):
        if not last.hosts.of_rank or not set(hosts) <= set(last.hosts.boots):
            continue
        reference = last.hosts.boots[last.hosts.of_rank[0]]
        readings: dict[str, list[ClockReading]] = defaultdict(list)
        for session in sessions:
            if session.hosts.of_rank and session.hosts.boots[session.hosts.of_rank[0]] == reference:
                for reading in session.readings:
                    readings[session.hosts.boots[reading.host]].append(reading)
        if all(readings[host] for host in hosts if host != reference):
            clocks = {host: HostClock(readings[host]) for host in hosts if host != reference}
            return ClockCorrections(reference, {reference: HostClock(), **clocks}, ())
    return None


@dataclass
class _OffsetBounds:
    # Bounds of the offset by which a second clock is ahead of a first clock, from the messages of one step.
    at_ns: list[int] = field(default_factory=list)  # times of the first clock
    least_ns: list[int] = field(default_factory=list)
    most_ns: list[int] = field(default_factory=list)
    together_ns: list[int] = field(default_factory=list)  # offsets if both left a collective at the same time

    def reading(self) -> tuple[int, int, int] | None:
        # At ``time`` of the first clock, the second clock is ``offset`` ahead, with an error of at most width / 2.
        if not self.least_ns or not self.most_ns:
            return None
        # Bounds can contradict each other if clocks drift within the step: swap them.
        least, most = sorted((max(self.least_ns), min(self.most_ns)))
        guess = median_low(self.together_ns) if self.together_ns else (least + most) // 2
        offset = max(least, min(most, guess))
        return median_low(self.at_ns), offset, 2 * max(most - offset, offset - least)


def _inferred_clocks(logs: Mapping[int, RankLog], matches: Matches, reference: str) -> dict[str, HostClock]:
    host = {rank: log.host for rank, log in logs.items()}
    bounds: dict[tuple[str, str], dict[int, _OffsetBounds]] = defaultdict(lambda: defaultdict(_OffsetBounds))
    for message in matches.messages:
        send, receive = message.send, message.receive
        there, here = host[send.rank], host[receive.rank]
        if there != here and not receive.is_open:
            # Both orders of the clocks get the bound: offset <= took for one is -offset >= -took for the other.
            took = receive.end_ns - send.begin_ns
            ahead, behind = bounds[there, here][send.step], bounds[here, there][send.step]
            ahead.most_ns.append(took)
            ahead.at_ns.append(send.begin_ns)
            behind.least_ns.append(-took)
            behind.at_ns.append(receive.end_ns)
    for meeting in matches.meetings:
        _add_collective(meeting, host, bounds)
    clocks = {reference: HostClock()}
    waiting = [reference]
    while waiting:  # breadth first from the reference: each host by its offset to a host with a known clock
        near = waiting.pop(0)
        for (first, second), spans in bounds.items():
            if first != near or second in clocks:
                continue
            # Records outside of steps may be hours apart, with drift: use them only without steps.
            inside = [span for step, span in spans.items() if step != NO_STEP] or list(spans.values())
            readings = _readings(clocks[near], inside)
            if readings:
                clocks[second] = HostClock(readings, MESSAGES)
                waiting.append(second)
    del clocks[reference]
    return clocks


def _readings(near: HostClock, spans: Iterable[_OffsetBounds]) -> list[ClockReading]:
    readings = []
    for span in spans:
        reading = span.reading()
        if reading is not None:
            at, offset, width = reading
            bound = near.bound_ns(at) or 0
            readings.append(ClockReading(0, near.reference_ns(at), near.offset_ns(at) + offset, width + 2 * bound))
    return readings


def _add_collective(
    meeting: MatchedCollective, host: Mapping[int, str], bounds: Mapping[tuple[str, str], Mapping[int, _OffsetBounds]]
) -> None:
    # A collective bounds offsets only if every member waits for every other, and all have left.
    if meeting.root is not None or any(call.is_open for call in meeting.calls):
        return
    by_host: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in meeting.calls:
        by_host[host[call.rank]].append(call)
    names = list(by_host)
    ends = {name: min(call.end_ns for call in calls) for name, calls in by_host.items()}
    begins = {name: max(call.begin_ns for call in calls) for name, calls in by_host.items()}
    for other in names[1:]:
        for a, b in ((names[0], other), (other, names[0])):
            span = bounds[a, b][meeting.calls[0].step]
            # No member leaves before the last has entered: ends[b] >= begins[a] and ends[a] >= begins[b] on one clock.
            span.at_ns.append(ends[a])
            span.most_ns.append(ends[b] - begins[a])
            span.least_ns.append(begins[b] - ends[a])
            span.together_ns.append(ends[b] - ends[a])


@dataclass(frozen=True)
class CausalOrder:
    """Number of (cause, effect) pairs of communication calls, and number of pairs with an impossible recorded order."""

    pairs: int
    wrong: int
    most_ns: int  # largest time difference of a wrong pair
    beyond: int | None  # wrong pairs beyond the error bounds of both clocks; None: a bound is unknown

    def __str__(self) -> str:
        if not self.wrong:
            return f"all of {self.pairs} messages and collectives end after what they waited for"
        text = f"{self.wrong} of {self.pairs} messages and collectives end before what they waited for, "
        text += f"at most {self.most_ns / 1e3:.1f} us"
        if self.beyond is None:
            return f"{text}: the accuracy of the clocks is not known"
        return f"{text}: " + (
            f"{self.beyond} by more than the bound of the clocks" if self.beyond else "within the bound"
        )


def causal_order(matches: Matches, bounds_ns: Mapping[int, int | None]) -> CausalOrder:
    """Count the receives and collectives that end before the awaited call begins. Return a `CausalOrder`. Local.

    ``matches``: matched calls on one clock. ``bounds_ns``: dict {rank: largest error of the rank's times, or None}.
    """
    pairs = [(message.send, message.receive) for message in matches.messages if not message.receive.is_open]
    for meeting in matches.meetings:
        last = meeting.released_by()
        ended = [call for call in meeting.calls if not call.is_open and call is not last]
        if last is not None and ended:
            pairs.append((last, min(ended, key=lambda call: call.end_ns)))
    wrong = [(a, b, a.begin_ns - b.end_ns) for a, b in pairs if a.begin_ns > b.end_ns]
    largest_ns = max((by for _, _, by in wrong), default=0)
    bounds = [(bounds_ns[a.rank], bounds_ns[b.rank], by) for a, b, by in wrong]
    if any(x is None or y is None for x, y, _ in bounds):
        return CausalOrder(len(pairs), len(wrong), largest_ns, None)
    return CausalOrder(len(pairs), len(wrong), largest_ns, sum(by > (x or 0) + (y or 0) for x, y, by in bounds))
