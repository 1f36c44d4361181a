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
    """Exception that stops a sweep. The sweep ends the current trial, and does not record a result of this trial."""


@dataclass(frozen=True)
class SeriesItem:
    """Planned run of a sweep. ``status``: "ok" or "failed" if a result is recorded, "" if the run is still to do."""

    trial: SweepTrial
    position: int
    repeat: int
    status: str


@dataclass(frozen=True)
class SweepTally:
    """Numbers of runs that are recorded as ok, recorded as failed, and not recorded (``left``)."""

    ok: int
    failed: int
    left: int


def plan(
    trials: Sequence[SweepTrial], repeats: int, results_path: Path, retry_failed: bool, only: int | None = None
) -> list[SeriesItem]:
    """Return a list of a sweep's runs in execution order. ``only``: index of the only trial to run, or None for all.

    ``repeats``: runs per trial. ``results_path``: file of recorded results. ``retry_failed``: repeat failed runs.
    """
    # Every second round has the reverse order, so that a machine that slows down affects all trials alike.
    statuses = results.statuses(results_path) if results_path.exists() else {}
    items = []
    for repeat in range(repeats):
        for position, trial in list(enumerate(trials))[:: -1 if repeat % 2 else 1]:
            if only in (None, position):
                status = statuses.get((trial.id, repeat), "")
                items.append(SeriesItem(trial, position, repeat, "" if status == FAILED and retry_failed else status))
    return items


@dataclass(frozen=True)
class SeriesLimits:
    """Time limits in seconds: ``trial_s`` for each run, and ``budget_s`` for all runs together."""

    trial_s: float
    budget_s: float = float("inf")


def run(
    items: Sequence[SeriesItem],
    results_path: Path,
    measure: Measure,
    limits: SeriesLimits,
    provenance: Mapping[str, str],
    print_line: Callable[[str], None],
) -> SweepTally:
    """Run the planned ``items`` that have no status, and append each result to ``results_path``. Local.

    ``measure``: function that runs a trial, or raises SweepStopped to stop the sweep. ``provenance``: attributes to
    write if the file is new. ``print_line``: function that prints progress.
    """
    end = time.monotonic() + limits.budget_s
    statuses = {(item.trial.id, item.repeat): item.status for item in items if item.status}
    try:
        results.prepare(results_path, provenance)
        configurations = results.read(results_path).configurations
        walls_s = {trial.id: [repeat.wall_s for repeat in trial.good] for trial in configurations}
        for number, item in enumerate(items, 1):
            if item.status:
                continue
            ranks = counted(item.trial.ranks, "rank")
            label = f"[{number}/{len(items)}] {item.trial.name} on {ranks}, repeat {item.repeat + 1}"
            remaining = end - time.monotonic()
            if min(_expected_s(walls_s, item.trial.id), limits.trial_s) > remaining:
                print_line(f"{label}: skipped, because it would not end within the time budget")
                continue
            outcome = measure(item.trial, min(limits.trial_s, remaining))
            if outcome.status == FAILED and time.monotonic() >= end:
                print_line(f"{label}: not recorded, because the time budget ended before the trial")
                continue
            results.append(
                results_path, item.trial, item.position, item.repeat, outcome, provenance.get("git_commit", "")
            )
            statuses[item.trial.id, item.repeat] = outcome.status
            if outcome.status == OK:
                walls_s.setdefault(item.trial.id, []).append(outcome.wall_s)
            print_line(f"{label}: {_outcome_text(outcome)}")
    except SweepStopped:
        print_line("stopped; the running trial is not recorded; run the same command to continue with this trial")
    recorded = list(statuses.values())
    return SweepTally(recorded.count(OK), recorded.count(FAILED), len(items) - len(recorded))


def anonymous(outcome: TrialOutcome, hosts: Sequence[str]) -> TrialOutcome:
    """Return a copy of ``outcome`` whose error texts contain HOST in place of each host name in ``hosts``."""
    for host in hosts:
        reason, tail = (text.replace(host, "HOST") for text in (outcome.reason, outcome.stderr_tail))
        outcome = replace(outcome, reason=reason, stderr_tail=tail)
    return outcome


def _expected_s(walls_s: Mapping[str, Sequence[float]], trial: str) -> float:
    durations_s = walls_s.get(trial) or [wall_s for repeats in walls_s.values() for wall_s in repeats]
    return 1.1 * max(durations_s, default=0.0)  # a repeat may take a little longer than the repeats before


def _outcome_text(outcome: TrialOutcome) -> str:
    if outcome.status == FAILED:
        return f"FAILED after {outcome.wall_s:.1f} s, {outcome.reason}"
    rate = outcome.summary.get("tokens_per_s")
    speed = "speed not measured" if rate is None else f"{rate:,.0f} {outcome.summary.get('speed_unit') or 'tokens'}/s"
    return f"ok, {speed}, {outcome.wall_s:.1f} s in total"
