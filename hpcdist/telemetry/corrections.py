"""The clock of every host of a run: measured ones where the metrics have them, else from wall clocks and messages.

Without measurements, what is known of causes bounds the offset of two clocks: no message is received before it was
sent, and no member leaves a collective before the last has come. Within these bounds, members are taken to leave a
collective at the same time. That is known anew for every step, so drift does not add up.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from hpcdist.comm.clocks import Reading
from hpcdist.telemetry.clocks import Session
from hpcdist.telemetry.matching import Matches, Meeting
from hpcdist.telemetry.ranklog import NO_STEP, Call, RankLog
from hpcdist.telemetry.timebase import MESSAGES, WALL, HostClock


@dataclass(frozen=True)
class Corrections:
    """The clock of each host by `RankLog.host`; ``reference`` is that of rank 0. ``notes``: a sentence each."""

    reference: str
    clocks: Mapping[str, HostClock]
    notes: tuple[str, ...]


def find(logs: Mapping[int, RankLog], sessions: Sequence[Session], matches: Matches) -> Corrections:
    """Return the clocks of the hosts of ``logs``; ``matches`` are theirs, in their own clocks (local)."""
    hosts = list(dict.fromkeys(logs[rank].host for rank in sorted(logs)))
    measured = _measured(hosts, sessions)
    if measured is not None:
        return measured
    reference = hosts[0]
    clocks = {reference: HostClock()}
    if len(hosts) == 1:
        return Corrections(reference, clocks, ())
    inferred = _inferred(logs, matches, reference)
    walls = {log.host: log.wall_ns for log in logs.values()}
    for host in hosts[1:]:
        readings = inferred.get(host)
        if readings is not None:
            clocks[host] = readings
        else:
            clocks[host] = HostClock([Reading(0, 0, walls[reference] - walls[host], 0)], WALL)
    by_messages = sum(clock.source == MESSAGES for clock in clocks.values())
    notes = ["the metrics have no readings of these hosts' clocks: "]
    if by_messages:
        notes[0] += f"those of {by_messages} are taken from when messages and collectives ended"
    if by_messages < len(hosts) - 1:
        notes[0] += f"{' and ' if by_messages else ''}{len(hosts) - 1 - by_messages} by wall clocks, however they agree"
    return Corrections(reference, clocks, tuple(notes))


def _measured(hosts: Sequence[str], sessions: Sequence[Session]) -> Corrections | None:
    """Return the clocks by the readings of all starts of the run that were led from the same host."""
    for last in reversed(sessions):
        if not last.hosts.of_rank or not set(hosts) <= set(last.hosts.boots):
            continue
        reference = last.hosts.boots[last.hosts.of_rank[0]]
        readings: dict[str, list[Reading]] = defaultdict(list)
        for session in sessions:
            if session.hosts.of_rank and session.hosts.boots[session.hosts.of_rank[0]] == reference:
                for reading in session.readings:
                    readings[session.hosts.boots[reading.host]].append(reading)
        if all(readings[host] for host in hosts if host != reference):
            clocks = {host: HostClock(readings[host]) for host in hosts if host != reference}
            return Corrections(reference, {reference: HostClock(), **clocks}, ())
    return None


@dataclass
class _Span:
    """What is known of how far one clock is ahead of another about one time."""

    at_ns: list[int] = field(default_factory=list)  # of the one clock
    least_ns: list[int] = field(default_factory=list)
    most_ns: list[int] = field(default_factory=list)
    together_ns: list[int] = field(default_factory=list)  # where both are taken to do something at once

    def reading(self) -> tuple[int, int, int] | None:
        """Return (time of the one clock, how far the other is ahead, the width of what is possible)."""
        if not self.least_ns or not self.most_ns:
            return None
        least, most = sorted((max(self.least_ns), min(self.most_ns)))
        guess = median_low(self.together_ns) if self.together_ns else (least + most) // 2
        offset = max(least, min(most, guess))
        return median_low(self.at_ns), offset, 2 * max(most - offset, offset - least)


def _inferred(logs: Mapping[int, RankLog], matches: Matches, reference: str) -> dict[str, HostClock]:
    host = {rank: log.host for rank, log in logs.items()}
    known: dict[tuple[str, str], dict[int, _Span]] = defaultdict(lambda: defaultdict(_Span))
    for message in matches.messages:
        send, receive = message.send, message.receive
        there, here = host[send.rank], host[receive.rank]
        if there != here and not receive.is_open:
            took = receive.end_ns - send.begin_ns
            ahead, behind = known[there, here][send.step], known[here, there][send.step]
            ahead.most_ns.append(took)
            ahead.at_ns.append(send.begin_ns)
            behind.least_ns.append(-took)
            behind.at_ns.append(receive.end_ns)
    for meeting in matches.meetings:
        _add_meeting(meeting, host, known)
    clocks = {reference: HostClock()}
    waiting = [reference]
    while waiting:  # from the reference on, each host by one that is known
        near = waiting.pop(0)
        for (one, other), spans in known.items():
            if one != near or other in clocks:
                continue
            # What lies outside of steps may lie hours apart.
            inside = [span for step, span in spans.items() if step != NO_STEP] or list(spans.values())
            readings = _readings(clocks[near], inside)
            if readings:
                clocks[other] = HostClock(readings, MESSAGES)
                waiting.append(other)
    del clocks[reference]
    return clocks


def _readings(near: HostClock, spans: Iterable[_Span]) -> list[Reading]:
    found = []
    for span in spans:
        reading = span.reading()
        if reading is not None:
            at, offset, width = reading
            bound = near.bound_ns(at) or 0
            found.append(Reading(0, near.reference_ns(at), near.offset_ns(at) + offset, width + 2 * bound))
    return found


def _add_meeting(
    meeting: Meeting, host: Mapping[int, str], known: Mapping[tuple[str, str], Mapping[int, _Span]]
) -> None:
    if meeting.root is not None or any(call.is_open for call in meeting.calls):
        return
    by_host: dict[str, list[Call]] = defaultdict(list)
    for call in meeting.calls:
        by_host[host[call.rank]].append(call)
    names = list(by_host)
    ends = {name: min(call.end_ns for call in calls) for name, calls in by_host.items()}
    begins = {name: max(call.begin_ns for call in calls) for name, calls in by_host.items()}
    for other in names[1:]:
        for a, b in ((names[0], other), (other, names[0])):
            span = known[a, b][meeting.calls[0].step]
            span.at_ns.append(ends[a])
            span.most_ns.append(ends[b] - begins[a])
            span.least_ns.append(begins[b] - ends[a])
            span.together_ns.append(ends[b] - ends[a])


@dataclass(frozen=True)
class Order:
    """How causes and effects lie in one time: ``wrong`` of ``pairs`` are the wrong way round, by ``most_ns`` at most.

    ``beyond`` of them are so by more than the bounds of the clocks allow; None where these are not known.
    """

    pairs: int
    wrong: int
    most_ns: int
    beyond: int | None

    def __str__(self) -> str:
        if not self.wrong:
            return f"all of {self.pairs} messages and collectives end after what they waited for"
        text = f"{self.wrong} of {self.pairs} messages and collectives end before what they waited for, "
        text += f"at most {self.most_ns / 1e3:.1f} us"
        if self.beyond is None:
            return f"{text}: how well the clocks agree is not known"
        return f"{text}: " + (
            f"{self.beyond} by more than the bound of the clocks" if self.beyond else "within the bound"
        )


def order(matches: Matches, bounds_ns: Mapping[int, int | None]) -> Order:
    """Return how the ``matches``, now in one time, lie; ``bounds_ns`` are those of the ranks' clocks (local)."""
    pairs = [(one.send, one.receive) for one in matches.messages if not one.receive.is_open]
    for meeting in matches.meetings:
        last = meeting.released_by()
        ended = [call for call in meeting.calls if not call.is_open and call is not last]
        if last is not None and ended:
            pairs.append((last, min(ended, key=lambda call: call.end_ns)))
    wrong = [(a, b, a.begin_ns - b.end_ns) for a, b in pairs if a.begin_ns > b.end_ns]
    most = max((by for _, _, by in wrong), default=0)
    bounds = [(bounds_ns[a.rank], bounds_ns[b.rank], by) for a, b, by in wrong]
    if any(x is None or y is None for x, y, _ in bounds):
        return Order(len(pairs), len(wrong), most, None)
    return Order(len(pairs), len(wrong), most, sum(by > (x or 0) + (y or 0) for x, y, by in bounds))
