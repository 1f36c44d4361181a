"""The simulated program: operation lists as arrays, and the loop that computes the times of all entries.

Each rank runs its entries in order:

    WORK    takes its seconds
    SEND    takes its seconds, then a message leaves; the sender continues at once
    RECV    waits for its message, then takes its seconds

A link connects two ranks in one direction and carries messages in sending order. O(entries).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.jit import jit
from hpcdist.errors import ScheduleError, UsageError
from hpcdist.strategies.core.operations import COMPUTE


@dataclass(frozen=True)
class LinkCost:
    """Cost of a message in seconds: the time that the message occupies the link, and the latency."""

    latency_s: float = 0.0  # from the end of ``carries_s`` to the arrival
    carries_s: float = 0.0  # the message occupies the link


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Run times of the passes of each model layer over one micro-batch, in seconds, and the cost of a message."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]  # unsplit backward pass
    input_s: Sequence[float]  # input-gradient half of a split backward pass
    weight_s: Sequence[float]  # weight-gradient half
    link: LinkCost = LinkCost()

    def __post_init__(self) -> None:
        rows = {name: getattr(self, name) for name in ("forward_s", "backward_s", "input_s", "weight_s")}
        for name, row in rows.items():
            if len(row) != len(self.forward_s):
                raise UsageError(
                    f"StepCosts: {name} has {len(row)} values, but forward_s has {len(self.forward_s)}; each field "
                    "needs one value for each model unit"
                )
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in row):
                raise UsageError(f"StepCosts: {name} = {list(row)}; all seconds must be finite and not negative")

    @classmethod
    def equal(
        cls, units: int, forward_s: float, input_s: float, weight_s: float, *, link: LinkCost | None = None
    ) -> "StepCosts":
        """Return the costs of ``units`` equal layers. A forward pass of a layer takes ``forward_s`` seconds.

        A backward pass of a layer takes ``input_s`` + ``weight_s`` seconds.
        """
        return cls(
            forward_s=[forward_s] * units,
            backward_s=[input_s + weight_s] * units,
            input_s=[input_s] * units,
            weight_s=[weight_s] * units,
            link=link or LinkCost(),
        )

    @property
    def rows(self) -> tuple[Sequence[float], ...]:
        """Tuple of five sequences, one per type of pass. Each sequence has the seconds of all layers."""
        return self.forward_s, self.backward_s, self.input_s, self.weight_s, self.forward_s


WORK, SEND, RECV = range(3)  # codes of entries
FORWARD, BACKWARD, INPUT, WEIGHT, AGAIN = range(5)  # kinds of WORK; AGAIN is a recomputed forward pass
OTHER: Final = -1
CODES: Final = dict(zip(COMPUTE, range(4), strict=True))  # of passes


@dataclass(frozen=True)
class Program:
    """Operations of all ranks, stored in arrays for the simulator."""

    starts: np.ndarray  # (ranks + 1,): rank r has the operations starts[r]:starts[r + 1]
    code: np.ndarray  # (entries,), int8
    target: np.ndarray  # (entries,), message number, -1 for WORK
    seconds: np.ndarray  # (entries,)
    work: np.ndarray  # (entries,), int8: FORWARD, ..., AGAIN, or OTHER
    microbatch: np.ndarray  # (entries,), or -1
    chunk: np.ndarray  # (entries,), number of the chunk in the model, or -1
    links: np.ndarray  # (messages,), link number of each message
    link: LinkCost

    @property
    def ranks(self) -> int:
        return len(self.starts) - 1

    def row(self, rank: int) -> slice:
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def rank_of(self, entry: int) -> int:
        return int(np.searchsorted(self.starts, entry, side="right")) - 1


@dataclass(frozen=True)
class Times:
    """Simulated start and end times of all operations in a `Program`."""

    # ``cause``: for a RECV that waited (its time includes the wait), the index of the matching SEND. ``before``: for a
    # SEND that waited, the index of the SEND that occupied the link. Otherwise -1.
    begin_s: np.ndarray  # (entries,)
    end_s: np.ndarray  # (entries,)
    cause: np.ndarray  # (entries,)
    before: np.ndarray  # (entries,)
    arrival_s: np.ndarray  # (messages,)


def run(program: Program) -> Times:
    """Simulate ``program``, and return the `Times` of its operations. Raises ScheduleError if ranks deadlock."""
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
            f"rank {rank} waits forever in the operation with index {at[rank] - program.starts[rank]}. The ranks "
            f"{stuck.tolist()} of all {len(at)} ranks wait forever, because a message is never sent, or because ranks "
            "wait for each other; check the operation lists with hpcdist.strategies.schedule.verify"
        )
    return Times(begin_s, end_s, cause, before, arrival_s)


@jit
def _run(
    rows: tuple[np.ndarray, ...], links: np.ndarray, travel_s: np.ndarray, at: np.ndarray, times: tuple[np.ndarray, ...]
) -> None:
    # Simulate until each rank has ended or waits for a message. ``rows``, ``links``: arrays of the `Program`. ``at``:
    # index of each rank's next operation. ``travel_s``: seconds that a message occupies its link, and its latency.
    starts, code, target, seconds = rows
    begin_s, end_s, cause, before, arrival_s = times
    ranks = len(starts) - 1
    link_count = links.max() + 1 if len(links) else 0
    now = np.zeros(ranks)
    waiting, sender = np.full(len(links), -1), np.full(len(links), -1)  # by message: waiting rank, sending entry
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
    if taken_s[link] > now_s:
        now_s, before[entry] = taken_s[link], last[link]
    taken_s[link], last[link] = now_s + travel_s[0], entry
    arrival_s: float = taken_s[link] + travel_s[1]
    return arrival_s


def _nothing() -> tuple[object, ...]:
    count, kinds, seconds = np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0)
    rows = np.zeros(3, np.int64), kinds, count, seconds
    times = seconds.copy(), seconds.copy(), count.copy(), count.copy(), seconds.copy()
    return rows, count, np.zeros(2), np.zeros(2, np.int64), times


_run.sample(_nothing)
