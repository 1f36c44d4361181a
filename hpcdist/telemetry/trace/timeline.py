"""Timeline of all ranks of a run on one clock, and its division into pieces with one activity each."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from hpcdist.comm.record.spans import Span
from hpcdist.telemetry.trace.clock_correction import CausalOrder, ClockCorrections, HostClock, causal_order
from hpcdist.telemetry.trace.matching import MESSAGES, MatchedCollective, MatchedMessage, Matches
from hpcdist.telemetry.trace.rank_log import RankLog, RecordedCall

BETWEEN: Final = "between operations"  # name of pieces without a span
NO_SOURCE_LINE: Final = 1 << 62


@dataclass(frozen=True)
class TimelinePiece:
    """A time interval of a rank with one activity, such as an operation or a communication call."""

    rank: int
    phase: str
    name: str  # operation ("REDUCE"), or a communication call in it ("REDUCE: send")
    begin_ns: int
    end_ns: int
    by: int = -1  # rank that the call waited for, else this rank; -1: no matched call
    since_ns: int = 0  # time at which rank ``by`` began its call

    @property
    def waited_ns(self) -> int:
        """Time in ns that the rank spent waiting for another rank during this interval."""
        return max(0, min(self.since_ns, self.end_ns) - self.begin_ns) if self.by not in (-1, self.rank) else 0


@dataclass(frozen=True)
class RunTimeline:
    """Timeline of all ranks in some steps, on one clock."""

    lines: Mapping[int, RankLog]  # log of each rank
    steps: tuple[int, ...]
    matches: Matches  # sends with their receives, and collectives
    order: CausalOrder
    bounds_ns: Mapping[int, int | None]  # largest error of each rank's times, or None if unknown

    @cached_property
    def begin_ns(self) -> int:
        """Earliest begin time of any step, span or call in the timeline, in ns."""
        begins = []
        for line in self.lines.values():
            begins += [begin for begin, _ in line.steps.values()]
            begins += [span.begin_ns for span in line.spans]
            begins += [call.begin_ns for call in line.calls]
        return min(begins, default=0)


def build(
    logs: Mapping[int, RankLog],
    steps: Sequence[int],
    matches: Matches,
    corrections: ClockCorrections,
    *,
    tail: bool = False,
) -> RunTimeline:
    """Return the timeline of ``steps`` from the ranks' ``logs``. ``corrections`` convert times to rank 0's clock."""
    # With ``tail``, activities after the last of ``steps`` are included.
    lines: dict[int, RankLog] = {}
    bounds: dict[int, int | None] = {}
    moved: dict[int, RecordedCall] = {}  # corrected call by the id of the call in the log
    for rank, log in logs.items():
        clock = corrections.clocks[log.host]
        begin, end = _window(log, steps, tail=tail)
        lines[rank] = _line(log, clock, begin, end, steps, moved)
        bounds[rank] = clock.bound_ns(end if end < NO_SOURCE_LINE else max(begin, _last(log)))
    messages = []
    for message in matches.messages:
        send, receive = moved.get(id(message.send)), moved.get(id(message.receive))
        if send is not None and receive is not None:
            messages.append(MatchedMessage(send, receive))
    meetings = []
    for meeting in matches.meetings:
        there = tuple(moved[id(call)] for call in meeting.calls if id(call) in moved)
        if len(there) == len(meeting.calls):
            meetings.append(replace(meeting, calls=there))
    moved_matches = Matches(tuple(messages), tuple(meetings), _unmatched(lines, messages))
    return RunTimeline(lines, tuple(steps), moved_matches, causal_order(moved_matches, bounds), bounds)


def _unmatched(lines: Mapping[int, RankLog], messages: Sequence[MatchedMessage]) -> int:
    met = {id(call) for message in messages for call in (message.send, message.receive)}
    message_calls = (call for line in lines.values() for call in line.calls if call.op in MESSAGES and not call.is_open)
    return sum(id(call) not in met for call in message_calls)


def _window(log: RankLog, steps: Sequence[int], *, tail: bool) -> tuple[int, int]:
    there = [log.steps[step] for step in steps if step in log.steps]
    if not there:
        return -NO_SOURCE_LINE, NO_SOURCE_LINE
    return there[0][0], NO_SOURCE_LINE if tail else there[-1][1]


def _last(log: RankLog) -> int:
    return max([span.end_ns for span in log.spans[-1:]] + [call.end_ns for call in log.calls[-1:]], default=0)


def _line(
    log: RankLog, clock: HostClock, begin: int, end: int, steps: Sequence[int], moved: dict[int, RecordedCall]
) -> RankLog:
    at = clock.reference_ns
    spans = [
        replace(span, begin_ns=at(span.begin_ns), end_ns=at(span.end_ns))
        for span in log.spans
        if span.begin_ns < end and span.end_ns > begin
    ]
    calls = []
    for call in log.calls:
        if call.begin_ns < end and (call.end_ns > begin or call.begin_ns >= begin):
            new = replace(call, begin_ns=at(call.begin_ns), end_ns=at(call.end_ns))
            moved[id(call)] = new
            calls.append(new)
    corrected_steps = {step: (at(log.steps[step][0]), at(log.steps[step][1])) for step in steps if step in log.steps}
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))
    return replace(log, spans=tuple(spans), calls=tuple(calls), steps=corrected_steps)


def pieces(timeline: RunTimeline) -> dict[int, list[TimelinePiece]]:
    """Return a dict {rank: list of consecutive time intervals}. Each interval has one operation or blocking call."""
    causes = _causes(timeline)
    by_rank = {}
    for rank, line in timeline.lines.items():
        if line.steps:
            begins, ends = zip(*line.steps.values(), strict=True)
            leaves = flatten(rank, line.spans, min(begins), max(ends))
            by_rank[rank] = _cut(leaves, line.calls, causes)
    return by_rank


def _causes(timeline: RunTimeline) -> dict[int, tuple[int, int]]:
    # Map id(call) to (rank, begin time) of the call that it waited for, or else of the call itself.
    causes: dict[int, tuple[int, int]] = {}
    for meeting in timeline.matches.meetings:
        last = meeting.released_by()
        for call in meeting.calls:
            late = last is not None and last.begin_ns > call.begin_ns
            causes[id(call)] = (last.rank, last.begin_ns) if last is not None and late else (call.rank, call.begin_ns)
    for message in timeline.matches.messages:
        send, receive = message.send, message.receive
        causes[id(receive)] = max((send.begin_ns, send.rank), (receive.begin_ns, receive.rank))[::-1]
        # A large message is sent when its receive is posted (rendezvous). A send that ended earlier did not wait.
        if send.op != "sendrecv" and send.begin_ns < receive.begin_ns <= send.end_ns:
            causes[id(send)] = (receive.rank, receive.begin_ns)
    return causes


def flatten(rank: int, spans: Sequence[Span], begin_ns: int, end_ns: int) -> list[TimelinePiece]:
    """Divide the time from ``begin_ns`` to ``end_ns`` of ``rank`` into a list of consecutive intervals. Local.

    The ``spans`` may be nested. Each interval has the name of the innermost span that covers the interval.
    """
    flat: list[TimelinePiece] = []
    stack: list[Span] = []
    at = begin_ns

    def advance(to: int) -> None:
        nonlocal at
        to = min(to, end_ns)
        if to > at:
            phase, name = (stack[-1].phase, stack[-1].name) if stack else ("other", BETWEEN)
            flat.append(TimelinePiece(rank, phase, name, at, to))
            at = to

    for span in sorted(spans, key=lambda candidate: (candidate.begin_ns, -candidate.end_ns)):
        while stack and stack[-1].end_ns <= span.begin_ns:
            advance(stack[-1].end_ns)
            stack.pop()
        advance(span.begin_ns)
        stack.append(span)
    while stack:
        advance(stack[-1].end_ns)
        stack.pop()
    advance(end_ns)
    return flat


def _cut(
    leaves: Sequence[TimelinePiece], calls: Sequence[RecordedCall], causes: Mapping[int, tuple[int, int]]
) -> list[TimelinePiece]:
    # Split the timeline of a rank where calls begin and end. ``causes``: result of `_causes`.
    ends = sorted(
        (call for call in outermost(calls) if id(call) in causes or not call.is_asynchronous), key=lambda c: c.end_ns
    )
    times = [call.end_ns for call in ends]
    parts: list[TimelinePiece] = []
    for leaf in leaves:
        at = leaf.begin_ns
        for call in ends[bisect_right(times, leaf.begin_ns) : bisect_right(times, leaf.end_ns)]:
            waits = leaf.phase == "communication"
            if call.end_ns <= at or (call.is_asynchronous and not waits):
                continue
            if call.begin_ns > at:
                parts.append(replace(leaf, begin_ns=at, end_ns=call.begin_ns))
                at = call.begin_ns
            by, since = causes.get(id(call), (-1, 0))
            phase = "communication" if leaf.phase in ("compute", "update") else leaf.phase
            name = f"{leaf.name}: {call.op}"
            parts.append(TimelinePiece(leaf.rank, phase, name, at, call.end_ns, by, since))
            at = call.end_ns
        if at < leaf.end_ns:
            parts.append(replace(leaf, begin_ns=at))
    return parts


def outermost(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return a list of the calls that no other call of the same thread encloses in time. Local."""
    outer: list[RecordedCall] = []
    until = -NO_SOURCE_LINE
    for call in sorted(calls, key=lambda candidate: (candidate.begin_ns, -candidate.end_ns)):
        if call.is_asynchronous or call.is_open:
            outer.append(call)
        elif call.end_ns > until:
            outer.append(call)
            until = call.end_ns
    return outer


def in_step(pieces_of_rank: Sequence[TimelinePiece], begin_ns: int, end_ns: int) -> list[TimelinePiece]:
    """Return a list of the rank's intervals, cut to the time from ``begin_ns`` to ``end_ns``. Local."""
    starts = [piece.begin_ns for piece in pieces_of_rank]
    first = max(0, bisect_right(starts, begin_ns) - 1)
    inside = []
    for piece in pieces_of_rank[first : bisect_left(starts, end_ns)]:
        begin, end = max(piece.begin_ns, begin_ns), min(piece.end_ns, end_ns)
        if end > begin:
            inside.append(
                piece if (begin, end) == (piece.begin_ns, piece.end_ns) else replace(piece, begin_ns=begin, end_ns=end)
            )
    return inside


def hosts(timeline: RunTimeline) -> dict[str, list[int]]:
    """Return a dict {host: list of the ranks on this host} of ``timeline``. Local."""
    ranks_by_host: dict[str, list[int]] = defaultdict(list)
    for rank, line in sorted(timeline.lines.items()):
        ranks_by_host[line.host].append(rank)
    return dict(ranks_by_host)


def select(timeline: RunTimeline, ranks: Collection[int]) -> RunTimeline:
    """Return a timeline of only ``ranks``, with the messages and collectives between these ranks. Local."""
    lines = {rank: line for rank, line in timeline.lines.items() if rank in ranks}
    messages = tuple(m for m in timeline.matches.messages if m.send.rank in lines and m.receive.rank in lines)
    meetings: list[MatchedCollective] = []
    for meeting in timeline.matches.meetings:
        calls = tuple(call for call in meeting.calls if call.rank in lines)
        if len(calls) > 1:
            meetings.append(replace(meeting, calls=calls))
    return replace(
        timeline, lines=lines, matches=replace(timeline.matches, messages=messages, meetings=tuple(meetings))
    )
