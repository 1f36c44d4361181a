"""Execution of the trials of a sweep, one after another: selection, order, and time budget."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome
from hpcdist.reporting.units import counted

Measure = Callable[[SweepTrial, float], TrialOutcome]  # runs a trial with a time limit in seconds


class SweepStopped(BaseException):
    """Request to stop this process: the running trial is ended and not recorded."""


@dataclass(frozen=True)
class SeriesItem:
    """Repeat ``repeat`` of the trial at index ``position`` of a sweep. ``status`` is "" for a repeat that will run."""

    trial: SweepTrial
    position: int
    repeat: int
    status: str


@dataclass(frozen=True)
class SweepTally:
    """Numbers of repeats that are recorded as ok, recorded as failed, and not recorded."""

    ok: int
    failed: int
    left: int


def plan(
    trials: Sequence[SweepTrial], repeats: int, path: Path, retry_failed: bool, only: int | None = None
) -> list[SeriesItem]:
    """Return the ``repeats`` of all ``trials`` in execution order. Every second repeat reverses the order of trials.

    So a machine that slows down affects all trials alike. Recorded statuses come from the results file ``path``, if it
    exists. ``retry_failed`` runs failed repeats again. ``only`` is the index of the single trial to plan, or None for
    all trials. Raises StorageError if ``path`` is not a results file.
    """
    statuses = results.statuses(path) if path.exists() else {}
    items = []
    for repeat in range(repeats):
        for position, trial in list(enumerate(trials))[:: -1 if repeat % 2 else 1]:
            if only in (None, position):
                status = statuses.get((trial.id, repeat), "")
                items.append(SeriesItem(trial, position, repeat, "" if status == FAILED and retry_failed else status))
    return items


@dataclass(frozen=True)
class SeriesLimits:
    """Time limits in seconds: ``trial_s`` of each trial, and ``budget_s`` of one call of `run`."""

    trial_s: float
    budget_s: float = float("inf")


def run(
    items: Sequence[SeriesItem],
    path: Path,
    measure: Measure,
    limits: SeriesLimits,
    provenance: Mapping[str, str],
    log: Callable[[str], None],
) -> SweepTally:
    """Run the ``items`` without a status by ``measure``. Append each outcome to the results file ``path``. Local.

    A failed trial does not end the sweep. An item is skipped if its expected duration, at most ``limits.trial_s``,
    exceeds the remaining budget. If ``measure`` raises SweepStopped, no further item runs. ``provenance`` holds the
    attributes of a new results file. ``log`` prints one line of progress.
    """
    end = time.monotonic() + limits.budget_s
    statuses = {(item.trial.id, item.repeat): item.status for item in items if item.status}
    try:
        results.prepare(path, provenance)
        configurations = results.read(path).configurations
        walls_s = {trial.id: [repeat.wall_s for repeat in trial.good] for trial in configurations}
        for number, item in enumerate(items, 1):
            if item.status:
                continue
            ranks = counted(item.trial.ranks, "rank")
            label = f"[{number}/{len(items)}] {item.trial.name} on {ranks}, repeat {item.repeat + 1}"
            remaining = end - time.monotonic()
            if min(_expected_s(walls_s, item.trial.id), limits.trial_s) > remaining:
                log(f"{label}: skipped, because it would not end within the time budget")
                continue
            outcome = measure(item.trial, min(limits.trial_s, remaining))
            if outcome.status == FAILED and time.monotonic() >= end:
                log(f"{label}: not recorded, because the time budget ended before the trial")
                continue
            results.append(path, item.trial, item.position, item.repeat, outcome, provenance.get("git_commit", ""))
            statuses[item.trial.id, item.repeat] = outcome.status
            if outcome.status == OK:
                walls_s.setdefault(item.trial.id, []).append(outcome.wall_s)
            log(f"{label}: {_outcome_text(outcome)}")
    except SweepStopped:
        log("stopped; the running trial is not recorded; run the same command to continue with this trial")
    recorded = list(statuses.values())
    return SweepTally(recorded.count(OK), recorded.count(FAILED), len(items) - len(recorded))


def anonymous(outcome: TrialOutcome, hosts: Sequence[str]) -> TrialOutcome:
    """Return ``outcome`` with each host name of ``hosts`` replaced by HOST in the reason and the stderr tail."""
    for host in hosts:
        reason, tail = (text.replace(host, "HOST") for text in (outcome.reason, outcome.stderr_tail))
        outcome = replace(outcome, reason=reason, stderr_tail=tail)
    return outcome


def _expected_s(walls_s: Mapping[str, Sequence[float]], trial: str) -> float:
    """Return the expected duration of the trial with the id ``trial`` in seconds, or 0 if ``walls_s`` is empty.

    ``walls_s`` holds the durations of ok repeats by trial id. A new trial may take as long as the longest one.
    """
    durations_s = walls_s.get(trial) or [wall_s for repeats in walls_s.values() for wall_s in repeats]
    return 1.1 * max(durations_s, default=0.0)  # a repeat may take a little longer than the repeats before


def _outcome_text(outcome: TrialOutcome) -> str:
    if outcome.status == FAILED:
        return f"FAILED after {outcome.wall_s:.1f} s, {outcome.reason}"
    rate = outcome.summary.get("tokens_per_s")
    speed = "speed not measured" if rate is None else f"{rate:,.0f} {outcome.summary.get('speed_unit') or 'tokens'}/s"
    return f"ok, {speed}, {outcome.wall_s:.1f} s in total"
