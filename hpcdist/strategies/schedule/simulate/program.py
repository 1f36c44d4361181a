"""The simulated program: operation lists as arrays, and the loop that finds when everything in them happens.

`StepCosts` has the seconds of passes, messages and collectives, given or measured; `Program` the entries that they make
of a step, `run` their `Times`. Every rank has a row of entries, which it takes one after the other:

    WORK    its seconds pass
    SEND    its seconds pass, then a message leaves; the sender goes on at once
    RECV    waits until its message is there, then its seconds pass
    JOIN    takes part in a meeting, and goes on at once
    AWAIT   waits for the end of a meeting that all of its members have joined
    MEET    joins a meeting and waits for its end

A meeting is a collective. A link, from one rank to another, carries one message after the other in the order in which
they were sent: each takes it for its transfer, and arrives so many seconds of latency later. Likewise an axis holds
one meeting after the other.

No rank ever has a choice, and who uses a link or an axis uses it in its own order; so the times that come out do not
depend on the order in which the loop tries the ranks. It takes O(entries), and O(ranks) for each meeting.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.arrays.jit import jit
from hpcdist.errors import ScheduleError, UsageError
from hpcdist.strategies.schedule.operations import Kind, Operation


@dataclass(frozen=True)
class Rate:
    """Duration of a transfer: ``seconds``, and the bytes at ``bytes_per_s``."""

    seconds: float = 0.0
    bytes_per_s: float = math.inf

    def of(self, nbytes: float) -> float:
        """Return the seconds that ``nbytes`` take."""
        return self.seconds + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class LinkCost:
    """Cost of a message between two ranks: it takes the link for ``carries``, and arrives ``latency_s`` later."""

    latency_s: float = 0.0
    carries: Rate = field(default_factory=Rate)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds and bytes of one micro-batch, each a sequence by unit of the model.

    ``backward_s`` is that of a joint backward; where it is split, ``input_s`` and ``weight_s`` take its place.
    ``message_bytes`` is the input of a unit, and its gradient; ``kept_bytes`` what a unit keeps from its forward for
    its backward, ``held_bytes`` what it keeps from a BACKWARD_INPUT to its BACKWARD_WEIGHT. Empty: not known, and
    counted as nothing. ``links`` are those between two ranks, by (from, to), that differ from ``link``. ``exchange``
    has the kinds of operations that take time beside the passes: of the bytes of their range, or unit, whose elements
    are ``element_bytes`` each.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    message_bytes: Sequence[float] = ()
    kept_bytes: Sequence[float] = ()
    held_bytes: Sequence[float] = ()
    link: LinkCost = LinkCost()
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    exchange: Mapping[Kind, Rate] = field(default_factory=dict)
    element_bytes: int = 4
    unit_sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        rows = {name: getattr(self, name) for name in ("forward_s", "backward_s", "input_s", "weight_s")}
        for name, row in rows.items():
            if len(row) != len(self.forward_s):
                raise UsageError(f"costs: {name} has {len(row)} units, forward_s {len(self.forward_s)}; give one each")
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in row):
                raise UsageError(f"costs: {name} = {list(row)}; seconds are finite and not negative")

    @classmethod
    def equal(
        cls, units: int, forward_s: float, input_s: float, weight_s: float, *, link: LinkCost | None = None
    ) -> "StepCosts":
        """Return the costs of ``units`` that are all alike, whose joint backward takes as long as the two parts."""
        return cls(
            forward_s=[forward_s] * units,
            backward_s=[input_s + weight_s] * units,
            input_s=[input_s] * units,
            weight_s=[weight_s] * units,
            link=link or LinkCost(),
        )

    def travel_s(self, source: int, target: int, unit: int) -> tuple[float, float]:
        """Return the seconds that the input of ``unit``, or its gradient, takes the link, and its latency."""
        link = self.links.get((source, target), self.link)
        return link.carries.of(self.message_bytes[unit] if self.message_bytes else 0.0), link.latency_s

    def exchange_s(self, op: Operation) -> float:
        """Return the seconds of an operation of the exchange; 0 for kinds without a rate."""
        rate = self.exchange.get(op.kind)
        if rate is None:
            return 0.0
        if op.range is not None:
            return rate.of(op.range.size * self.element_bytes)
        of_unit = self.unit_sizes[op.unit] if 0 <= op.unit < len(self.unit_sizes) else 0
        return rate.of(of_unit * self.element_bytes)


# Codes of entries. JOIN comes to a meeting and goes on, AWAIT waits for its end, MEET does both.
WORK, SEND, RECV, JOIN, AWAIT, MEET = range(6)
FORWARD, BACKWARD, INPUT, WEIGHT, AGAIN = range(5)  # what WORK it is: AGAIN is a forward that is computed once more
OTHER: Final = -1

LINK_S, LATENCY_S = range(2)  # columns of a message: on its link, and behind it
JOINED, BY = range(2)  # of a meeting: how many members are there, and the entry of the last
LATEST_S, OVER_S = range(2)  # of a meeting: when the last came, and its end


@dataclass(frozen=True)
class Program:
    """Entries of all ranks, row behind row; those of rank r are ``starts[r]:starts[r + 1]``."""

    starts: np.ndarray  # (ranks + 1,)
    code: np.ndarray  # (entries,), int8
    target: np.ndarray  # (entries,), number of the message or of the meeting, -1 for WORK
    seconds: np.ndarray  # (entries,)
    work: np.ndarray  # (entries,), int8: FORWARD, ..., AGAIN, or OTHER
    microbatch: np.ndarray  # (entries,), -1 where there is none
    chunk: np.ndarray  # (entries,), the number of the chunk in the model, -1 where there is none
    links: np.ndarray  # (messages,), which link each of them takes
    travel_s: np.ndarray  # (messages, 2): LINK_S and LATENCY_S
    members: np.ndarray  # (meetings,), how many ranks each of them has
    axes: np.ndarray  # (meetings,), where it is held
    lasts_s: np.ndarray  # (meetings,)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.starts) - 1

    def row(self, rank: int) -> slice:
        """Return the slice of the entries of ``rank``."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def rank_of(self, entry: int) -> int:
        """Return the rank that has ``entry``."""
        return int(np.searchsorted(self.starts, entry, side="right")) - 1


@dataclass(frozen=True)
class Times:
    """Begin and end of the entries: a RECV, AWAIT or MEET begins when its rank comes there.

    ``cause`` is the entry that an entry waited for: a SEND, or who joined a meeting last; -1 where it waited for none
    but the one before it on its rank. ``before`` is, for one of these that found its link or its axis taken, who had
    taken it, else -1.
    """

    begin_s: np.ndarray  # (entries,)
    end_s: np.ndarray  # (entries,)
    cause: np.ndarray  # (entries,)
    before: np.ndarray  # (entries,)
    arrival_s: np.ndarray  # (messages,)


def run(program: Program) -> Times:
    """Return the times of all entries of ``program`` (local). Raises ScheduleError where it never ends."""
    entries = len(program.code)
    begin_s, end_s = np.full(entries, -1.0), np.full(entries, -1.0)
    cause, before = np.full(entries, -1, np.int64), np.full(entries, -1, np.int64)
    arrival_s = np.full(len(program.links), -1.0)
    at = program.starts[:-1].copy()
    rows = program.starts, program.code, program.target, program.seconds
    messages = program.links, program.travel_s
    meetings = program.members, program.axes, program.lasts_s
    _run(rows, messages, meetings, at, (begin_s, end_s, cause, before, arrival_s))
    stuck = np.flatnonzero(at < program.starts[1:])
    if stuck.size:
        rank = int(stuck[0])
        raise ScheduleError(
            f"rank {rank} waits for ever at entry {at[rank] - program.starts[rank]} of its {len(at)}-rank schedule, "
            f"and so do ranks {stuck.tolist()}: a message that is never sent, or a circle; verify the lists first"
        )
    return Times(begin_s, end_s, cause, before, arrival_s)


@jit
def _run(
    rows: tuple[np.ndarray, ...],
    messages: tuple[np.ndarray, ...],
    meetings: tuple[np.ndarray, ...],
    at: np.ndarray,
    times: tuple[np.ndarray, ...],
) -> None:
    """Advance ``at`` to the end of every row, or to where nothing moves; fill ``times`` on the way."""
    starts, code, target, seconds = rows
    links, travel_s = messages
    members, axes, lasts_s = meetings
    begin_s, end_s, cause, before, arrival_s = times
    ranks = len(starts) - 1
    link_count, axis_count = links.max() + 1 if len(links) else 0, axes.max() + 1 if len(axes) else 0
    now = np.zeros(ranks)
    waiting, sender = np.full(len(links), -1), np.full(len(links), -1)  # rank that waits for the message; its entry
    taken_s, last = np.zeros(link_count), np.full(link_count, -1)
    met, met_s = np.zeros((len(axes), 2), np.int64), np.full((len(axes), 2), -1.0)
    held_s, holder = np.zeros(axis_count), np.full(axis_count, -1)
    stuck_in = np.full(ranks, -1)  # meeting that a rank waits for
    ready, count = np.arange(ranks)[::-1].copy(), ranks
    while count:
        count -= 1
        rank = ready[count]
        i = at[rank]
        while i < starts[rank + 1]:
            what, which = code[i], target[i]
            if begin_s[i] < 0:
                begin_s[i] = now[rank]
                if what in (JOIN, MEET) and _join(
                    i, which, now[rank], members, axes, lasts_s, met, met_s, held_s, holder, before
                ):
                    for other in range(ranks):
                        if stuck_in[other] == which:
                            stuck_in[other], ready[count] = -1, other
                            count += 1
            if what == RECV:
                if arrival_s[which] < 0:
                    waiting[which] = rank
                    break
                if arrival_s[which] > now[rank]:
                    now[rank], cause[i] = arrival_s[which], sender[which]
            elif what in (AWAIT, MEET):
                if met_s[which, OVER_S] < 0:
                    stuck_in[rank] = which
                    break
                if met_s[which, OVER_S] > now[rank]:
                    now[rank], cause[i] = met_s[which, OVER_S], met[which, BY]
            now[rank] += seconds[i]
            end_s[i] = now[rank]
            if what == SEND:
                arrival_s[which] = _send(i, end_s[i], links[which], travel_s[which], taken_s, last, before)
                sender[which] = i
                if waiting[which] >= 0:
                    ready[count] = waiting[which]
                    count += 1
            i += 1
        at[rank] = i


@jit
def _join(
    entry: int,
    which: int,
    now_s: float,
    members: np.ndarray,
    axes: np.ndarray,
    lasts_s: np.ndarray,
    met: np.ndarray,
    met_s: np.ndarray,
    held_s: np.ndarray,
    holder: np.ndarray,
    before: np.ndarray,
) -> bool:
    """Add a member to meeting ``which``; return whether it was the last, so that its end is known."""
    met[which, JOINED] += 1
    if now_s >= met_s[which, LATEST_S]:
        met_s[which, LATEST_S], met[which, BY] = now_s, entry
    if met[which, JOINED] < members[which]:
        return False
    axis, by = axes[which], met[which, BY]
    if held_s[axis] > met_s[which, LATEST_S]:
        before[by] = holder[axis]
    held_s[axis] = max(met_s[which, LATEST_S], held_s[axis]) + lasts_s[which]
    met_s[which, OVER_S], holder[axis] = held_s[axis], by
    return True


@jit
def _send(
    entry: int, now_s: float, link: int, travel_s: np.ndarray, taken_s: np.ndarray, last: np.ndarray, before: np.ndarray
) -> float:
    """Put a message on its link behind earlier ones; return its arrival."""
    if taken_s[link] > now_s:
        now_s, before[entry] = taken_s[link], last[link]
    taken_s[link], last[link] = now_s + travel_s[LINK_S], entry
    arrival_s: float = taken_s[link] + travel_s[LATENCY_S]
    return arrival_s


def _nothing() -> tuple[object, ...]:
    """Return sample arguments: two ranks without entries."""
    count, kinds, seconds = np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0)
    rows = np.zeros(3, np.int64), kinds, count, seconds
    times = seconds.copy(), seconds.copy(), count.copy(), count.copy(), seconds.copy()
    return rows, (count, np.zeros((0, 2))), (count, count, seconds), np.zeros(2, np.int64), times


_run.sample(_nothing)
