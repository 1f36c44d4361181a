"""Aligning the collectives of several ranks by their number: the first one that they did not all make the same way."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.comm.recordfile import Event, RankRecord

SAME_COUNT: Final = ("allreduce", "reduce_scatter", "all_gather", "broadcast")  # sizes agree on all members
_SITE: Final = re.compile(r"(?P<file>.*?):(?P<line>\d+) \((?P<function>.*?)\)")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong. ``kind``: skipped, mismatch, raised, stopped, killed, absent, deadlock or missing."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    event: Event | None = None  # the operation at which it shows


def _signature(event: Event) -> tuple[object, ...]:
    sized = event.op.endswith(SAME_COUNT)
    return event.op, event.dtype if sized else "", event.count if sized else 0, event.peer


def mismatches(records: Sequence[RankRecord]) -> list[Finding]:
    """Return the first collective, in time, that the members of a communicator entered in different ways."""
    made: dict[tuple[str, int], dict[int, Event]] = defaultdict(dict)
    for record in records:
        for event in record.events:
            if event.collective:
                made[event.comm, event.sequence][record.rank] = event
    differing = [events for events in made.values() if len({_signature(event) for event in events.values()}) > 1]
    if not differing:
        return []
    events = min(differing, key=lambda events: min(event.started_ns for event in events.values()))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, event in sorted(events.items()):
        groups[_signature(event)].append(rank)
    ordered = sorted(groups.values(), key=len)
    blamed, others = ordered[0], ordered[-1]
    if len(blamed) == len(others):
        blamed, others = _choose(blamed, others, events, made)
    return [_mismatch(blamed, others, events)]


def _choose(
    a: list[int], b: list[int], events: dict[int, Event], made: dict[tuple[str, int], dict[int, Event]]
) -> tuple[list[int], list[int]]:
    """Put first the half that broke the habit: the way from the operation before was never taken, or jumps ahead."""

    def way(rank: int, event: Event) -> tuple[str, str] | None:
        before = made.get((event.comm, event.sequence - 1), {}).get(rank)
        return None if before is None else (before.site, event.site)

    here = events[a[0]]
    habits = {
        way(rank, event)
        for (comm, sequence), made_there in made.items()
        if comm == here.comm and sequence < here.sequence
        for rank, event in made_there.items()
    } - {None}
    known_a, known_b = (way(group[0], events[group[0]]) in habits for group in (a, b))
    if known_a != known_b:
        return (b, a) if known_a else (a, b)
    return (b, a) if _jumped(events[b[0]], here) else (a, b)


def _jumped(event: Event, over: Event) -> bool:
    """Whether ``event`` stands further down in the same function than ``over``."""
    mine, other = _SITE.match(event.site), _SITE.match(over.site)
    if mine is None or other is None or mine["file"] != other["file"] or mine["function"] != other["function"]:
        return False
    return int(mine["line"]) > int(other["line"])


def _mismatch(blamed: list[int], others: list[int], events: dict[int, Event]) -> Finding:
    event, expected = events[blamed[0]], events[others[0]]
    ranks = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    skipped = event.op != expected.op or _jumped(event, expected)
    text = f"made {event} where {ranks} made {expected}"
    text += ": skipped that one, or took another branch" if skipped else ": every member must give the same"
    return Finding("skipped" if skipped else "mismatch", tuple(blamed), text, expected if skipped else event)
