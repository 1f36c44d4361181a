"""What a job has cost: its starts, and the work that each of them has lost.

A start is an entry `began` of the ledger, with what is known of its end. In it the training may have started several
times (`hpcdist run --restarts`): ``starts.json`` has those. Of one that failed, the work since the last checkpoint
before its end is lost; where that checkpoint has been removed since, the figure is an upper bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from hpcdist.batch import ledger
from hpcdist.batch.schedulers.base import JobState

if TYPE_CHECKING:  # late at run time: it is not needed for --help
    from hpcdist.training.starts import Start

SLACK: Final = timedelta(seconds=1)  # between what two processes call now
_LATEST_S: Final = 1 << 33  # seconds since 1970, of what can be meant
_EVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Spent:
    """One start of a job: ``elapsed_s`` and ``nodes`` are None where nobody has written them down."""

    job: str
    elapsed_s: float | None
    nodes: int | None
    code: int | None
    origin: str
    newest: str


class Window(NamedTuple):
    """The time from one start of a run to the next, and where the ledger has its begin."""

    place: int
    job: str
    first: datetime
    last: datetime

    def has(self, training: "Start") -> bool:
        """Whether ``training`` began in it."""
        return self.first - SLACK <= _utc(training.began) < self.last


def windows(entries: Sequence[ledger.LedgerEntry]) -> list[Window]:
    """Return a window for each start in the ledger."""
    begun = [(place, entry) for place, entry in enumerate(entries) if entry.event == ledger.BEGAN]
    ends = [*(entry.time for _, entry in begun[1:]), _EVER]
    return [Window(place, entry.job, entry.time, end) for (place, entry), end in zip(begun, ends, strict=False)]


def spent(
    entries: Sequence[ledger.LedgerEntry], jobs: Iterable[str], live: dict[str, JobState], trainings: Sequence["Start"]
) -> list[Spent]:
    """Return the starts of ``jobs`` by the ledger.

    One that was killed has written no end. The last of a job lasted as ``live`` says then, if it does; another at least
    as long as its ``trainings`` were seen.
    """
    wanted = set(jobs)
    return [_spent(entries, window, live, trainings) for window in windows(entries) if window.job in wanted]


def _spent(
    entries: Sequence[ledger.LedgerEntry], window: Window, live: dict[str, JobState], trainings: Sequence["Start"]
) -> Spent:
    entry, state = entries[window.place], live.get(window.job)
    later = [each for each in entries[window.place + 1 :] if each.job == window.job]
    ending = next((each for each in later if each.event in (ledger.BEGAN, ledger.ENDED)), None)
    end = ending if ending is not None and ending.event == ledger.ENDED else None
    seen = [_utc(each.seen) for each in trainings if window.has(each)]
    if end is not None:
        elapsed_s: float | None = (end.time - entry.time).total_seconds()
    elif ending is None and state is not None and state.elapsed_s is not None:
        elapsed_s = state.elapsed_s
    else:
        elapsed_s = (max(seen) - entry.time).total_seconds() if seen else None
    return Spent(
        job=entry.job,
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s),
        nodes=entry.number("nodes") or (None if state is None else state.nodes),
        code=None if end is None else end.number("code"),
        origin=entry.text("from"),
        newest="" if end is None else end.text("newest"),
    )


def saves(run_dir: Path, entries: Sequence[ledger.LedgerEntry]) -> list[datetime]:
    """Return when checkpoints were written: those that are there, and those that the ledger mentions (local)."""
    from hpcdist.cli.run import checkpoints

    mentioned = [ns for entry in entries if 0 < (ns := entry.number("saved_ns") or 0) < _LATEST_S * 10**9]
    return sorted(_utc(ns / 1e9) for ns in {*mentioned, *checkpoints(run_dir).values()})


def lost_s(trainings: Sequence["Start"], within: Sequence[Window], saved: Sequence[datetime]) -> float:
    """Return the seconds of work that those of ``trainings`` have lost by failing that began ``within`` windows."""
    found = 0.0
    for training in trainings:
        if not training.end and any(window.has(training) for window in within):
            began, seen = _utc(training.began), _utc(training.seen)
            kept = [moment for moment in saved if began - SLACK <= moment <= seen + SLACK]
            found += max(0.0, (seen - max([began, *kept])).total_seconds())
    return found


def is_sound(training: "Start") -> bool:
    """Whether its times can be meant: the record is a file, in which anybody may have written."""
    return 0 <= training.began < _LATEST_S and 0 <= training.seen < _LATEST_S


def is_at_work(entries: Sequence[ledger.LedgerEntry]) -> bool:
    """Whether the newest start of the run has said no end."""
    last = next((entry for entry in reversed(entries) if entry.event in (ledger.BEGAN, ledger.ENDED)), None)
    return last is not None and last.event == ledger.BEGAN


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
