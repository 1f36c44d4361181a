"""Diagnosis of a hang or a death: the rank that left the common path first, with operation and source line.

Reads only the files of the flight recorder. Members of a communicator call its collectives in the same order, so calls
are aligned by their number.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hpcdist.comm.record.flight_recorder import FINAL, RankRecord, RecordedEvent, read
from hpcdist.constants import NS_PER_S
from hpcdist.errors import StorageError, UsageError

EQUAL_COUNT_COLLECTIVES: Final = (
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
)  # the count is equal on all members
WORLD: Final = "world"  # name of the communicator of all ranks of a run
_SITE: Final = re.compile(r"(?P<file>.*?):(?P<line>\d+) \((?P<function>.*?)\)")


@dataclass(frozen=True)
class Finding:
    """A problem found in the recorded operations of a run, with the ranks that caused it."""

    # Kinds: skipped (an operation that other ranks called), mismatch (the same collective with other arguments), raised
    # (an exception), killed, stopped (or without a heartbeat for long), absent (from an operation in which other ranks
    # wait), deadlock (wait for each other), waiting (no known cause), missing and damaged (no readable record).
    kind: str
    ranks: tuple[int, ...]
    text: str
    event: RecordedEvent | None = None  # the operation concerned
    group: tuple[int, ...] = ()  # ranks of the operation's communicator; () for all ranks, or if they are unknown


def _signature(event: RecordedEvent) -> tuple[object, ...]:
    sized = event.op.endswith(EQUAL_COUNT_COLLECTIVES)
    return event.op, event.dtype if sized else "", event.count if sized else 0, event.peer


def first_mismatch(records: Sequence[RankRecord]) -> list[Finding]:
    """Return a list with a `Finding` about the first collective whose arguments differ between ranks, or []. Local."""
    calls: dict[tuple[str, int], dict[int, RecordedEvent]] = defaultdict(dict)
    for record in records:
        for event in record.events:
            if event.collective:
                calls[event.comm, event.sequence][record.rank] = event
    differing = [events for events in calls.values() if len({_signature(event) for event in events.values()}) > 1]
    if not differing:
        return []
    events = min(differing, key=lambda events: min(event.started_ns for event in events.values()))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, event in sorted(events.items()):
        groups[_signature(event)].append(rank)
    ordered = sorted(groups.values(), key=len)
    blamed, others = ordered[0], ordered[-1]
    if len(blamed) == len(others):
        blamed, others = _blamed_half_first(blamed, others, events, calls)
    return [_mismatch(blamed, others, events)]


def _blamed_half_first(
    a: list[int], b: list[int], events: dict[int, RecordedEvent], calls: dict[tuple[str, int], dict[int, RecordedEvent]]
) -> tuple[list[int], list[int]]:
    # The half to blame comes first: if the pair of its call sites (previous and current collective) is new, and the
    # pair of the other half occurred before; otherwise, the half whose call site is further down in the same function.
    def sites(rank: int, event: RecordedEvent) -> tuple[str, str] | None:
        before = calls.get((event.comm, event.sequence - 1), {}).get(rank)
        return None if before is None else (before.site, event.site)

    here = events[a[0]]
    habits = {
        sites(rank, event)
        for (comm, sequence), members in calls.items()
        if comm == here.comm and sequence < here.sequence
        for rank, event in members.items()
    } - {None}
    usual_a, usual_b = (sites(group[0], events[group[0]]) in habits for group in (a, b))
    if usual_a != usual_b:
        return (b, a) if usual_a else (a, b)
    return (b, a) if _jumped(events[b[0]], here) else (a, b)


def _jumped(event: RecordedEvent, over: RecordedEvent) -> bool:
    mine, other = _SITE.match(event.site), _SITE.match(over.site)
    if mine is None or other is None or mine["file"] != other["file"] or mine["function"] != other["function"]:
        return False
    return int(mine["line"]) > int(other["line"])


def _mismatch(blamed: list[int], others: list[int], events: dict[int, RecordedEvent]) -> Finding:
    event, expected = events[blamed[0]], events[others[0]]
    ranks = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    skipped = event.op != expected.op or _jumped(event, expected)
    text = f"made {event} where {ranks} made {expected}"
    text += ": skipped that operation, or took another branch" if skipped else ": every member must give the same"
    return Finding("skipped" if skipped else "mismatch", tuple(blamed), text, expected if skipped else event)


FAILURES: Final = ("raised", "deadline")  # notes of a rank that ended the job
SYMPTOMS: Final = ("CommunicationError", "DeadlineError", "mpi4py")  # errors mostly caused by another rank


@dataclass(frozen=True)
class RankState:
    """State and last operation of a rank in a run that hangs or has ended."""

    # States: running, finished, raised (an exception), deadline (an operation missed its deadline), stopped (for
    # example by SIGSTOP), silent (the heartbeats ended long before the job), killed (without a message), ended (because
    # of another rank's failure).
    rank: int
    state: str
    last: RecordedEvent | None  # the outermost open operation, else the last operation
    waiting_s: float | None  # age of the open operation at the last sign of life
    note: str


@dataclass(frozen=True)
class HangReport:
    """Diagnosis of a run. The first finding is the most likely cause. ``findings`` is empty if no problem was found."""

    world: int
    findings: tuple[Finding, ...]
    ranks: tuple[RankState, ...]
    job_ranks: tuple[int, ...] = ()  # rank of the job by rank of the run; () for a run on all ranks of the job


def load(directory: Path, unreadable: dict[int, str] | None = None) -> list[RankRecord]:
    """Return a list with a `RankRecord` per rank, read from the flight recorder files of the run in ``directory``.

    ``unreadable``: dict to fill with {rank: error text}. If ``unreadable`` is None, an unreadable file raises
    StorageError. Raises UsageError if there are no files, and StorageError if no file is readable.
    """
    folder = directory / "recorder" if (directory / "recorder").is_dir() else directory
    records, last = [], None
    for path in sorted(folder.glob("rank-*.rec")):
        try:
            records.append(read(path))
        except StorageError as error:
            rank = path.stem.removeprefix("rank-")
            if unreadable is None or not rank.isdecimal():
                raise
            unreadable[int(rank)], last = str(error), error
    if not records and last is not None:
        raise last
    if not records:
        raise UsageError(
            f"{directory} has no flight recorder files (recorder/rank-*.rec); give the directory of a run. Your own "
            "program writes these files if it calls hpcdist.init() or creates a Training, and is started by `hpcdist "
            "run --out DIRECTORY`"
        )
    world = max(records, key=lambda record: record.started_ns).world
    return [record for record in records if record.rank < world]  # a larger, earlier run may have left other files


def analyse(
    records: Sequence[RankRecord],
    patience_s: float = 10.0,
    now_ns: int | None = None,
    unreadable: Mapping[int, str] | None = None,
) -> HangReport:
    """Diagnose a run from the ranks' ``records``. A wait of at least ``patience_s`` seconds counts as a hang.

    ``now_ns``: wall-clock time in ns, or None to read the clock. ``unreadable``: {rank: error text} of bad records.
    """
    now = time.time_ns() if now_ns is None else now_ns
    world = records[0].world
    records = _until_first_deadline(records)
    states = _states(records, now)
    unreadable_ranks = {rank: reason for rank, reason in (unreadable or {}).items() if rank < world}
    missing = tuple(sorted(set(range(world)) - states.keys() - unreadable_ranks.keys()))
    ranks = tuple(
        _rank_state(record, states[record.rank], now) for record in sorted(records, key=lambda record: record.rank)
    )
    suspects = WaitGraph(records, states, patience_s, now)
    findings = [*first_mismatch(records), *_raised(records, states), *_dead(records, states, suspects)]
    if missing:
        text = "no record: this rank did not reach its first operation, or wrote to another directory"
        findings.append(Finding("missing", missing, text))
    findings += [Finding("damaged", (rank,), f"is not known: {reason}") for rank, reason in unreadable_ranks.items()]
    findings += suspects.absent()
    findings += suspects.deadlock()
    findings = findings or suspects.unexplained()
    findings = [replace(finding, group=suspects.group(finding.event)) for finding in findings]
    symptoms = [finding for finding in findings if _is_symptom(finding)]
    causes = [finding for finding in findings if finding not in symptoms]
    job_ranks = _job_ranks(records)
    return HangReport(world, (*causes, *symptoms), ranks, job_ranks if job_ranks != tuple(range(world)) else ())


def _job_ranks(records: Sequence[RankRecord]) -> tuple[int, ...]:
    # The communicator of all ranks of the run is "world", also on a part of the job.
    world = max(record.world for record in records)
    return next((record.groups[WORLD] for record in records if WORLD in record.groups), tuple(range(world)))


# --- state of each rank ---------------------------------------------------------------------------------------------


def _until_first_deadline(records: Sequence[RankRecord]) -> list[RankRecord]:
    # Later events mislead: the end of the job wakes stopped ranks.
    first_deadline_ns = min(
        (record.notes["deadline"].time_ns for record in records if "deadline" in record.notes), default=None
    )
    if first_deadline_ns is None:
        return list(records)
    truncated = []
    for record in records:
        events = tuple(
            event if event.ended_ns is None or event.ended_ns <= first_deadline_ns else replace(event, ended_ns=None)
            for event in record.events
            if event.started_ns <= first_deadline_ns
        )
        notes = {
            k: note
            for k, note in record.notes.items()
            if k in ("deadline", "frozen") or note.time_ns <= first_deadline_ns
        }
        truncated.append(replace(record, events=events, notes=notes))
    return truncated


def _states(records: Sequence[RankRecord], now: int) -> dict[int, str]:
    processes = {record.rank: _process(record, now) for record in records}
    # While other ranks run, a missing process was killed. After the job, a rank that fell silent early was stopped.
    goes_on = any(processes.values())
    end = now if goes_on else max(record.last_sign_ns for record in records)
    notes = [record.notes[kind].time_ns for record in records for kind in FAILURES if kind in record.notes]
    states = {}
    for record in records:
        final: str | None = next((kind for kind in FINAL if kind in record.notes), None)
        if final is None and processes[record.rank]:
            final = "stopped" if processes[record.rank] in "Tt" else "running"
        elif final is None and goes_on and record.process_state() == "":
            final = "killed"
        states[record.rank] = final or _end(record, end, min(notes, default=None))
    return states


def _process(record: RankRecord, now: int) -> str:
    # "" if the process has ended. "?" if this host cannot read the state, but the last heartbeat was recent.
    state = record.process_state()
    if state is None:
        return "?" if record.next_beat_ns and now - record.last_sign_ns <= _late_ns(record) else ""
    return state


def _late_ns(record: RankRecord) -> int:
    return 3 * record.next_beat_ns + 2 * NS_PER_S  # a heartbeat that is later than this will not come


def _end(record: RankRecord, end: int, first_note: int | None) -> str:
    # State of a rank without a final note. ``end``: end of the job in ns, or now. ``first_note``: time of the first
    # failure note of any rank.
    frozen = record.notes.get("frozen")
    if frozen is not None and first_note is not None and frozen.time_ns > first_note:
        return "silent"  # it woke up when the job was ended
    if record.next_beat_ns and end - record.last_sign_ns > _late_ns(record):
        return "silent"
    if first_note is not None and record.last_sign_ns > first_note - record.next_beat_ns - NS_PER_S:
        return "ended"
    return "killed"


def _last(record: RankRecord) -> RecordedEvent | None:
    return next(iter(record.open_events), record.events[-1] if record.events else None)


def _rank_state(record: RankRecord, state: str, now: int) -> RankState:
    last = _last(record)
    until = now if state in ("running", "stopped") else record.last_sign_ns
    waiting = None if last is None or last.ended_ns is not None else (until - last.started_ns) / NS_PER_S
    note = next((record.notes[kind].text for kind in (*FINAL, "frozen") if kind in record.notes), "")
    return RankState(record.rank, state, last, waiting, note)


def _raised(records: Sequence[RankRecord], states: dict[int, str]) -> list[Finding]:
    raised = [(record.notes["raised"], record) for record in records if states[record.rank] == "raised"]
    raised.sort(key=lambda pair: pair[0].time_ns)
    return [Finding("raised", (record.rank,), f"raised {note.text}", _last(record)) for note, record in raised]


def _is_symptom(finding: Finding) -> bool:
    return finding.kind == "raised" and finding.text.removeprefix("raised ").startswith(SYMPTOMS)


def _dead(records: Sequence[RankRecord], states: dict[int, str], suspects: "WaitGraph") -> list[Finding]:
    texts = {
        "stopped": "is stopped (SIGSTOP, a debugger or a suspended job): SIGCONT lets it go on",
        "silent": "gave no sign of life for long before the job ended: stopped (SIGSTOP), or its node froze or swapped",
        "killed": "ended without a message: killed from outside (SIGKILL, out of memory, a lost node, the end of the "
        "job)",
    }
    dead = [record for record in records if states[record.rank] in texts]
    # The launcher kills all ranks after the first death: the rank that others wait for died first.
    behind = [record for record in dead if states[record.rank] != "killed" or record.rank in suspects.culprits]
    findings: dict[tuple[str, RecordedEvent | None], list[int]] = defaultdict(list)
    for record in behind or dead:
        event = suspects.culprits.get(record.rank) or _last(record)
        findings[texts[states[record.rank]], event].append(record.rank)
    kinds = {texts[state]: "killed" if state == "killed" else "stopped" for state in texts}
    return [Finding(kinds[text], tuple(ranks), text, event) for (text, event), ranks in findings.items()]


def _declared_members(records: Sequence[RankRecord]) -> dict[str, list[int]]:
    run_rank = {rank: index for index, rank in enumerate(_job_ranks(records))}
    declared = {name: ranks for record in records for name, ranks in record.groups.items()}
    return {name: [run_rank[rank] for rank in ranks if rank in run_rank] for name, ranks in declared.items()}


# --- waits between ranks --------------------------------------------------------------------------------------------


class WaitGraph:
    """Graph of ranks that wait for other ranks. ``culprits``: dict {awaited rank: operation that the rank missed}."""

    # ``waits``: dict from a waiting rank to {awaited rank: operation}.
    def __init__(self, records: Sequence[RankRecord], states: dict[int, str], patience_s: float, now: int) -> None:
        self.records = {record.rank: record for record in records}
        self.states = states
        seen: dict[str, set[int]] = defaultdict(set)
        self._reached: dict[tuple[int, str], int] = {}
        for record in records:
            for event in record.events:
                seen[event.comm].add(record.rank)
                if event.collective:  # in ascending order: the last number remains
                    self._reached[record.rank, event.comm] = event.sequence
        # In the order of the communicator's ranks: unknown members are ordered as in the world.
        self._members = {name: sorted(ranks) for name, ranks in seen.items()} | _declared_members(records)
        self._members[WORLD] = list(range(records[0].world))
        self._long: dict[int, RecordedEvent] = {}  # rank -> its outermost long operation
        self.waits: dict[int, dict[int, RecordedEvent]] = {}
        for record in records:
            if states[record.rank] in ("finished", "raised"):
                continue  # a failed rank leaves its operation open
            live = states[record.rank] in ("running", "stopped")
            for event in record.open_events:
                if not live or now - event.started_ns >= patience_s * NS_PER_S:
                    self._long.setdefault(record.rank, event)
                    for rank in self._awaited(record, event):
                        self.waits.setdefault(record.rank, {}).setdefault(rank, event)
        self.culprits: dict[int, RecordedEvent] = {}
        for waits in self.waits.values():
            for rank, event in waits.items():
                earlier = self.culprits.get(rank, event)
                if rank not in self.waits:  # the most specific: a message, or a collective of few ranks
                    self.culprits[rank] = min(earlier, event, key=self._generality)

    def _generality(self, event: RecordedEvent) -> tuple[bool, int, int]:
        return event.collective, len(self._members[event.comm]), event.sequence

    def _awaited(self, record: RankRecord, event: RecordedEvent) -> Iterable[int]:
        members = self._members[event.comm]
        if event.collective:
            return [rank for rank in members if rank != record.rank and self._behind(rank, event)]
        return [members[event.peer]] if 0 <= event.peer < len(members) and members[event.peer] != record.rank else []

    def _behind(self, rank: int, event: RecordedEvent) -> bool:
        record = self.records.get(rank)
        if record is None:
            return True
        reached = self._reached.get((rank, event.comm))
        if reached is None and len(record.events) >= record.capacity:
            # Calls lost from the ring buffer count as made.
            return False
        return (reached or 0) < event.sequence

    def group(self, event: RecordedEvent | None) -> tuple[int, ...]:
        """Return the ranks of the communicator of ``event``, or () for all ranks of the run."""
        members = sorted(self._members.get(event.comm, ())) if event is not None else []
        return tuple(members) if len(members) < len(self._members[WORLD]) else ()

    def absent(self) -> list[Finding]:
        """Return a list of findings about ranks that did not reach an operation in which other ranks wait."""
        findings: dict[RecordedEvent, list[int]] = defaultdict(list)
        for rank, event in self.culprits.items():
            if self.states.get(rank) in ("running", "finished", "ended", "deadline"):
                findings[event].append(rank)
        return [
            Finding("skipped" if self.states[ranks[0]] == "finished" else "absent", tuple(sorted(ranks)), text, event)
            for event, ranks in findings.items()
            if (text := self._absence(ranks[0], event))
        ]

    def _absence(self, rank: int, event: RecordedEvent) -> str:
        record = self.records[rank]
        text = "did not reach the operation in which the others wait"
        if self.states[rank] == "finished":
            return f"{text}: it finished without it ({record.notes['finished'].text})"
        if not record.events:
            return f"{text}, nor any operation before"
        last = record.events[-1]
        busy = "computes, waits for something other than a message, or took another branch"
        return f"{text}: after {last}, it {busy}; its stacks, if it could write them, are in {record.path.stem}.stacks"

    def unexplained(self) -> list[Finding]:
        """Return a list of findings about ranks that wait or missed a deadline. The cause of the waits is unknown."""
        findings = []
        for rank, record in sorted(self.records.items()):
            late = self.states[rank] == "deadline"
            waits = self.waits.get(rank, {})
            if late or rank in self._long:
                event = self._long.get(rank) or _last(record)
                awaited = sorted(waits)
                whom = (
                    f"for {'rank' if len(awaited) == 1 else 'ranks'} {', '.join(map(str, awaited))}"
                    if awaited
                    else ("but the records do not show for which rank")
                )
                text = f"waits {whom}" + (f"; it passed its deadline: {record.notes['deadline'].text}" if late else "")
                findings.append(Finding("waiting", (rank,), text, event))
        return findings

    def _is_explained(self, circle: Sequence[int]) -> bool:
        dead = {self.states[rank] for rank in circle} & {"stopped", "silent", "killed"}
        return "stopped" in dead or (bool(dead) and any(self.states[rank] not in dead for rank in circle))

    def deadlock(self) -> list[Finding]:
        """Return a list with one finding about ranks that wait for each other, or [] if there are no such ranks."""
        if self.culprits:
            return []
        for first in sorted(self.waits):
            path = [first]
            while path[-1] in self.waits:
                following = min(self.waits[path[-1]])
                if following in path:
                    circle = path[path.index(following) :]
                    if self._is_explained(circle):
                        break
                    steps = [self.waits[rank][circle[(i + 1) % len(circle)]] for i, rank in enumerate(circle)]
                    groups = [
                        f" (ranks {', '.join(map(str, self.group(step)))})" * bool(self.group(step)) for step in steps
                    ]
                    text = "; ".join(
                        f"rank {rank} waits in {step}{group}"
                        for rank, step, group in zip(circle, steps, groups, strict=True)
                    )
                    return [Finding("deadlock", tuple(circle), f"wait for each other: {text}", steps[0])]
                path.append(following)
        return []
