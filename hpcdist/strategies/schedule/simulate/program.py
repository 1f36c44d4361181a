"""The simulated program: operation lists as arrays, and the loop that finds when everything in them happens.

`StepCosts` has the seconds of passes and messages, given or measured; `Program` the entries that they make of a step,
`run` their `Times`. Every rank has a row of entries, which it takes one after the other:

    WORK    its seconds pass
    SEND    its seconds pass, then a message leaves; the sender goes on at once
    RECV    waits until its message is there, then its seconds pass

A link, from one rank to another, carries one message after the other in the order in which they were sent: each takes
it for its transfer, and arrives so many seconds of latency later.

No rank ever has a choice, and who uses a link uses it in its own order; so the times that come out do not depend on the
order in which the loop tries the ranks. It takes O(entries).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.jit import jit
from hpcdist.errors import ScheduleError, UsageError
from hpcdist.strategies.schedule.operations import COMPUTE


@dataclass(frozen=True)
class LinkCost:
    """Cost of a message between two ranks: it takes the link for ``carries_s``, and arrives ``latency_s`` later."""

    latency_s: float = 0.0
    carries_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of one micro-batch, each a sequence by unit of the model.

    ``backward_s`` is that of a joint backward; where it is split, ``input_s`` and ``weight_s`` take its place.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    link: LinkCost = LinkCost()

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

    @property
    def rows(self) -> tuple[Sequence[float], ...]:
        """Seconds by unit of FORWARD, BACKWARD, INPUT, WEIGHT and AGAIN."""
        return self.forward_s, self.backward_s, self.input_s, self.weight_s, self.forward_s


WORK, SEND, RECV = range(3)  # codes of entries
FORWARD, BACKWARD, INPUT, WEIGHT, AGAIN = range(5)  # what WORK it is: AGAIN is a forward that is computed once more
OTHER: Final = -1
CODES: Final = dict(zip(COMPUTE, range(4), strict=True))  # of passes


@dataclass(frozen=True)
class Program:
    """Entries of all ranks, row behind row; those of rank r are ``starts[r]:starts[r + 1]``."""

    starts: np.ndarray  # (ranks + 1,)
    code: np.ndarray  # (entries,), int8
    target: np.ndarray  # (entries,), number of the message, -1 for WORK
    seconds: np.ndarray  # (entries,)
    work: np.ndarray  # (entries,), int8: FORWARD, ..., AGAIN, or OTHER
    microbatch: np.ndarray  # (entries,), -1 where there is none
    chunk: np.ndarray  # (entries,), the number of the chunk in the model, -1 where there is none
    links: np.ndarray  # (messages,), which link each of them takes
    link: LinkCost

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
    """Begin and end of the entries: a RECV begins when its rank comes there.

    ``cause`` is the SEND that an entry waited for; -1 where it waited for none but the one before it on its rank.
    ``before`` is, for a SEND that found its link taken, who had taken it, else -1.
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
    travel_s = np.array([program.link.carries_s, program.link.latency_s])
    _run(rows, program.links, travel_s, at, (begin_s, end_s, cause, before, arrival_s))
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
    rows: tuple[np.ndarray, ...], links: np.ndarray, travel_s: np.ndarray, at: np.ndarray, times: tuple[np.ndarray, ...]
) -> None:
    """Advance ``at`` to the end of every row, or to where nothing moves; fill ``times`` on the way."""
    starts, code, target, seconds = rows
    begin_s, end_s, cause, before, arrival_s = times
    ranks = len(starts) - 1
    link_count = links.max() + 1 if len(links) else 0
    now = np.zeros(ranks)
    waiting, sender = np.full(len(links), -1), np.full(len(links), -1)  # rank that waits for the message; its entry
    taken_s, last = np.zeros(link_count), np.full(link_count, -1)
    ready, count = np.arange(ranks)[::-1].copy(), ranks
    while count:
        count -= 1
        rank = ready[count]
        i = at[rank]
        while i < starts[rank + 1]:
            what, which = code[i], target[i]
            if begin_s[i] < 0:
                begin_s[i] = now[rank]
            if what == RECV:
                if arrival_s[which] < 0:
                    waiting[which] = rank
                    break
                if arrival_s[which] > now[rank]:
                    now[rank], cause[i] = arrival_s[which], sender[which]
            now[rank] += seconds[i]
            end_s[i] = now[rank]
            if what == SEND:
                arrival_s[which] = _send(i, end_s[i], links[which], travel_s, taken_s, last, before)
                sender[which] = i
                if waiting[which] >= 0:
                    ready[count] = waiting[which]
                    count += 1
            i += 1
        at[rank] = i


@jit
def _send(
    entry: int, now_s: float, link: int, travel_s: np.ndarray, taken_s: np.ndarray, last: np.ndarray, before: np.ndarray
) -> float:
    """Put a message on its link behind earlier ones; return its arrival."""
    if taken_s[link] > now_s:
        now_s, before[entry] = taken_s[link], last[link]
    taken_s[link], last[link] = now_s + travel_s[0], entry
    arrival_s: float = taken_s[link] + travel_s[1]
    return arrival_s


def _nothing() -> tuple[object, ...]:
    """Return sample arguments: two ranks without entries."""
    count, kinds, seconds = np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0)
    rows = np.zeros(3, np.int64), kinds, count, seconds
    times = seconds.copy(), seconds.copy(), count.copy(), count.copy(), seconds.copy()
    return rows, count, np.zeros(2), np.zeros(2, np.int64), times


_run.sample(_nothing)
