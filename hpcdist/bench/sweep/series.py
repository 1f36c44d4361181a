"""Run the trials of a sweep one after the other: the remaining ones, their order, and the time budget."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome
from hpcdist.reporting.units import counted

# (trial, limit in seconds) -> how it ended
Measure = Callable[[SweepTrial, float], TrialOutcome]
MARGIN: Final = 1.1  # a repeat may take a little longer than the ones before


class SweepStopped(BaseException):
    """Somebody asked this process to stop: the trial under way is ended, and not recorded."""


@dataclass(frozen=True)
class SeriesItem:
    """A repeat of a trial; ``status`` is that in the results file, "" where it is to be run."""

    trial: SweepTrial
    position: int
    repeat: int
    status: str


@dataclass(frozen=True)
class SweepTally:
    """Numbers of trials that are recorded as ok and failed, and of those that were left for another time."""

    ok: int
    failed: int
    left: int


def plan(
    trials: Sequence[SweepTrial],
    repeats: int,
    path: Path,
    retry_failed: bool,
    only: int | None = None,
) -> list[SeriesItem]:
    """Return all trials in the order in which they are run: repeat by repeat, every second one backwards.

    So a machine that becomes slower with time does so for all configurations alike. ``only``: position of a single
    trial to return. Raises StorageError if the file at ``path`` exists and is not a results file.
    """
    known = results.statuses(path) if path.exists() else {}
    places = range(len(trials))
    items = []
    for repeat in range(repeats):
        for position in places if repeat % 2 == 0 else reversed(places):
            if only in (None, position):
                status = known.get((trials[position].id, repeat), "")
                status = "" if status == FAILED and retry_failed else status
                items.append(SeriesItem(trials[position], position, repeat, status))
    return items


@dataclass(frozen=True)
class SeriesLimits:
    """``trial_s`` for each trial, ``budget_s`` for all of this call."""

    trial_s: float
    budget_s: float = float("inf")


def run(
    items: Sequence[SeriesItem],
    path: Path,
    measure: Measure,
    limits: SeriesLimits,
    provenance: Mapping[str, str],
    say: Callable[[str], None],
) -> SweepTally:
    """Run the items that are not recorded yet and append each to the results at ``path`` (local).

    A failed trial does not end the sweep. An item that would not end within the budget, going by how long its other
    good repeats took (or the longest good trial so far) and by its limit, is left, and so is all that is not done when
    `Stopped` is raised.
    """
    end = time.monotonic() + limits.budget_s
    done: dict[tuple[str, int], str] = {(item.trial.id, item.repeat): item.status for item in items if item.status}
    try:
        results.prepare(path, provenance)
        walls = _walls(path)
        for number, item in enumerate(items, 1):
            place = f"{item.trial.name} on {counted(item.trial.ranks, 'rank')}"
            what = f"[{number}/{len(items)}] {place}, repeat {item.repeat + 1}"
            remaining = end - time.monotonic()
            if item.status:
                continue
            if min(_expected(walls, item.trial.id), limits.trial_s) > remaining:
                say(f"{what}: left, it would not end within the budget")
                continue
            outcome = measure(item.trial, min(limits.trial_s, remaining))
            if outcome.status == FAILED and time.monotonic() >= end:
                say(f"{what}: left, it was ended with the budget")
                continue
            results.append(path, item.trial, item.position, item.repeat, outcome, provenance.get("git_commit", ""))
            done[item.trial.id, item.repeat] = outcome.status
            if outcome.status == OK:
                walls.setdefault(item.trial.id, []).append(outcome.wall_s)
            say(f"{what}: {_told(outcome)}")
    except SweepStopped:
        say("stopped; the trial under way is not recorded, and the next call goes on with it")
    counts = list(done.values())
    return SweepTally(counts.count(OK), counts.count(FAILED), len(items) - len(counts))


def anonymous(outcome: TrialOutcome, hosts: Sequence[str]) -> TrialOutcome:
    """Return ``outcome`` without the names of hosts in its texts."""
    reason, tail = outcome.reason, outcome.stderr_tail
    for host in hosts:
        reason, tail = reason.replace(host, "HOST"), tail.replace(host, "HOST")
    return replace(outcome, reason=reason, stderr_tail=tail)


def _walls(path: Path) -> dict[str, list[float]]:
    """Return how long the good trials in the file took, by id: how long a failure took says nothing of the next."""
    return {
        configuration.id: [repeat.wall_s for repeat in configuration.good]
        for configuration in results.read(path).configurations
    }


def _expected(walls: Mapping[str, Sequence[float]], trial: str) -> float:
    """Return the seconds that a trial may take: nothing is known of the first."""
    known = walls.get(trial) or [wall_s for others in walls.values() for wall_s in others]
    return MARGIN * max(known, default=0.0)


def _told(outcome: TrialOutcome) -> str:
    if outcome.status == FAILED:
        return f"FAILED after {outcome.wall_s:.1f} s, {outcome.reason}"
    rate = outcome.summary.get("tokens_per_s")
    speed = "speed not measured" if rate is None else f"{rate:,.0f} {outcome.summary.get('speed_unit') or 'tokens'}/s"
    return f"ok, {speed}, {outcome.wall_s:.1f} s in all"
