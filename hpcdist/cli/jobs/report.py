"""`hpcdist jobs report`: steps, time, restarts, energy and lost work of jobs.

A start of a job is a `began` entry in the journal of the run. During a start of a job, the training may start several
times; each start of the training is a `start` entry.
"""

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from hpcdist.batch import ledger
from hpcdist.batch.schedulers import dispatch, slurm_energy
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.cli.common import json_option
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.begin import newest_checkpoint
from hpcdist.cli.jobs.lookup import JOB_ARGUMENT, LocatedJob, duration, printable
from hpcdist.cli.jobs.show import by_ledger
from hpcdist.comm.record import run_journal
from hpcdist.comm.record.run_journal import HEARTBEAT_S, JournalEntry, StartEntry
from hpcdist.errors import INTERRUPTED, OK, REQUEUE, ConfigurationError
from hpcdist.reporting.units import counted

CLOCK_SLACK: Final = timedelta(seconds=1)  # tolerated clock difference of two processes
_LATEST_S: Final = 1 << 33  # largest plausible time, in seconds since 1970
_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC)
_STOP_REQUESTED: Final = (REQUEUE, INTERRUPTED)  # exit codes of a training that was asked to stop: not a failure
_UNKNOWN: Final = "neither a scheduler nor a ledger has the duration"
_AFTER: Final = " of work after the last checkpoints of failed starts"


@dataclass(frozen=True)
class JobStart:
    """One start of a job. A requeued job has several starts. ``elapsed_s`` and ``nodes`` are None if unknown."""

    job: str
    elapsed_s: float | None
    nodes: int | None
    code: int | None
    origin: str
    newest: str


class StartWindow(NamedTuple):
    """Time interval from a job start of a run to the next job start of this run."""

    number: int  # index of the start's entry in the journal of the run
    job: str
    first: datetime
    last: datetime

    def has(self, training: StartEntry) -> bool:
        """Return True if ``training``, a start of the training, began in this time interval."""
        return self.first - CLOCK_SLACK <= _utc(training.began) < self.last


def start_windows(entries: Sequence[JournalEntry]) -> list[StartWindow]:
    """Return a list of `StartWindow`, one per job start. ``entries``: the journal of the run, from `ledger.read`."""
    started = [(number, entry) for number, entry in enumerate(entries) if entry.event == ledger.BEGAN]
    ends = [*(entry.time for _, entry in started[1:]), _END_OF_TIME]
    return [
        StartWindow(number, entry.job, entry.time, end) for (number, entry), end in zip(started, ends, strict=False)
    ]


def _job_start(
    entries: Sequence[JournalEntry],
    window: StartWindow,
    live: dict[str, JobState],
    trainings: Sequence[StartEntry],
) -> JobStart:
    entry, state = entries[window.number], live.get(window.job)
    later = [other for other in entries[window.number + 1 :] if other.job == window.job]
    ending = next((other for other in later if other.event in (ledger.BEGAN, ledger.ENDED)), None)
    end = ending if ending is not None and ending.event == ledger.ENDED else None
    seen = [_utc(training.seen) for training in trainings if window.has(training)]
    if end is not None:
        elapsed_s: float | None = (end.time - entry.time).total_seconds()
    elif ending is None and state is not None and state.elapsed_s is not None:
        elapsed_s = state.elapsed_s
    else:
        elapsed_s = (max(seen) - entry.time).total_seconds() if seen else None  # lower bound: the last heartbeat
    return JobStart(
        job=entry.job,
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s),
        nodes=entry.number("nodes") or (None if state is None else state.nodes),
        code=None if end is None else end.number("code"),
        origin=entry.text("from"),
        newest="" if end is None else end.text("newest"),
    )


def save_times(run_dir: Path, entries: Sequence[JournalEntry]) -> list[datetime]:
    """Return a sorted list of the write times of the checkpoints in ``run_dir`` and in the journal ``entries``."""
    from hpcdist.cli.runs.progress import checkpoints

    mentioned = [ns for entry in entries if 0 < (ns := entry.number("saved_ns") or 0) < _LATEST_S * 10**9]
    return sorted(_utc(ns / 1e9) for ns in {*mentioned, *checkpoints(run_dir).values()})


def lost_s(trainings: Sequence[StartEntry], windows: Sequence[StartWindow], saves: Sequence[datetime]) -> float:
    """Return the seconds of lost work: from the last checkpoint of each failed training start to the end of the start.

    ``trainings``: starts of the training. Starts outside the time intervals ``windows`` are ignored. ``saves``:
    write times of checkpoints.
    """
    # Removed checkpoints make the result an upper bound.
    seconds = 0.0
    for training in trainings:
        if not training.end and any(window.has(training) for window in windows):
            began, seen = _utc(training.began), _utc(training.seen)
            training_saves = [moment for moment in saves if began - CLOCK_SLACK <= moment <= seen + CLOCK_SLACK]
            seconds += max(0.0, (seen - max([began, *training_saves])).total_seconds())
    return seconds


def is_running(entries: Sequence[JournalEntry]) -> bool:
    """Return True if the newest start in ``entries``, the journal of the run, has no `ended` entry."""
    last = next((entry for entry in reversed(entries) if entry.event in (ledger.BEGAN, ledger.ENDED)), None)
    return last is not None and last.event == ledger.BEGAN


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@click.command("report")
@JOB_ARGUMENT
@json_option
def report(word: str, as_json: bool) -> None:
    """Report on a job, or on all jobs of a run: outcome, time, node hours, restarts, steps, energy, lost work.

    Times and energy come from Slurm accounting if enabled; otherwise times are from the journal of the run. The energy
    is known once the job is over. The energy covers whole nodes, including other jobs on these nodes.

    --json prints one object: jobs, each with job, state, reason, exit_code and restarts; run_dir, starts,
    failed_starts, elapsed_s, elapsed_by (accounts, ledger or queue), elapsed_reason, node_hours, steps_from, steps_to,
    steps, energy_j, energy_reason, lost_s and lost_reason; unknown is null.
    """
    figures = account(lookup.jobs_named([word]))
    click.echo(json.dumps(figures) if as_json else "\n".join(text(figures)))


def account(jobs: Sequence[LocatedJob]) -> dict[str, Any]:
    """Return the dict that `report --json` prints for ``jobs``. Raises ConfigurationError if no job is known."""
    ids = [job.id for job in jobs]
    by_scheduler = dispatch.states(ids)
    states = {job.id: by_ledger(job, by_scheduler[job.id]) for job in jobs}
    rows, no_rows = dispatch.accounts(ids)
    run_dir = jobs[0].run_dir
    are_unknown = all(state.state in (SchedulerState.GONE, SchedulerState.UNKNOWN) for state in states.values())
    if run_dir is None and not rows and are_unknown:
        raise ConfigurationError(
            f"job {', '.join(ids)} is unknown: {printable(states[ids[0]].reason)}; "
            "give the directory of its run instead"
        )
    entries = [] if run_dir is None else ledger.read(run_dir)
    trainings = [] if run_dir is None else run_journal.known_starts(run_dir)
    windows = [window for window in start_windows(entries) if window.job in ids]
    begun = [_job_start(entries, window, states, trainings) for window in windows]
    return {
        "jobs": [_end_of(states[job]) for job in ids],
        "run_dir": None if run_dir is None else str(run_dir),
        **_starts(begun, rows, states),
        **_time(begun, rows, states),
        **_steps(run_dir, begun),
        **_energy(rows, no_rows, states, run_dir),
        **_lost(run_dir, entries, windows, trainings),
    }


def _end_of(state: JobState) -> dict[str, Any]:
    return {
        "job": state.id,
        "state": str(state.state),
        "reason": state.reason or None,
        "exit_code": state.exit_code,
        "restarts": state.restarts,
    }


def _starts(begun: Sequence[JobStart], rows: Sequence[JobState], states: dict[str, JobState]) -> dict[str, Any]:
    if not begun:
        return {"starts": len(rows) or None, "failed_starts": None}
    last = {start.job: start for start in begun}
    at_work = {job for job, state in states.items() if not state.is_over and state.state != SchedulerState.UNKNOWN}
    dead = [start for start in begun if start.code is None and not (last[start.job] is start and start.job in at_work)]
    failed = [start for start in begun if start.code not in (None, OK, *_STOP_REQUESTED)]
    return {"starts": len(begun), "failed_starts": len(dead) + len(failed)}


def _time(begun: Sequence[JobStart], rows: Sequence[JobState], states: dict[str, JobState]) -> dict[str, Any]:
    # Elapsed time and node hours: from Slurm accounting, else from the job records, else from the queue.
    # Components of a heterogeneous job (7+0, 7+1) are on different nodes at the same time.
    accounts = [((row.id.partition("+")[0], row.restarts), row.elapsed_s, row.nodes) for row in rows]
    by_ledger = [(number, entry.elapsed_s, entry.nodes) for number, entry in enumerate(begun)]
    # The queue only has the last start, and the ledger has already used it.
    by_queue = [(job, entry.elapsed_s, entry.nodes) for job, entry in states.items() if not (begun or entry.restarts)]
    for by, durations in (("accounts", accounts), ("ledger", by_ledger), ("queue", by_queue)):
        times: dict[Any, float] = {}
        for start, elapsed_s, _ in durations:
            times[start] = max(times.get(start, 0.0), elapsed_s or 0.0)
        if times and len(times) >= len(begun) and all(elapsed_s is not None for _, elapsed_s, _ in durations):
            hours = [elapsed_s * nodes / 3600 for _, elapsed_s, nodes in durations if elapsed_s is not None and nodes]
            figures = {"elapsed_s": sum(times.values()), "elapsed_by": by, "elapsed_reason": None}
            return figures | {"node_hours": sum(hours) if len(hours) == len(durations) else None}
    return {"elapsed_s": None, "elapsed_by": None, "elapsed_reason": _UNKNOWN, "node_hours": None}


def _steps(run_dir: Path | None, begun: Sequence[JobStart]) -> dict[str, Any]:
    steps = None if run_dir is None else lookup.recipe_steps(run_dir)
    if run_dir is None or not begun:
        return {"steps_from": None, "steps_to": None, "steps": steps}
    to = begun[-1].newest or newest_checkpoint(run_dir).name
    numbers = [int(name.removeprefix("step-") or 0) for name in (begun[0].origin, to)]
    return {"steps_from": numbers[0], "steps_to": numbers[1], "steps": steps}


def _energy(
    rows: Sequence[JobState], no_rows: str, states: dict[str, JobState], run_dir: Path | None
) -> dict[str, Any]:
    if not rows:
        reasons = [no_rows, *(state.energy_reason for state in states.values())]
        return {"energy_j": None, "energy_reason": next(filter(None, reasons), "no accounts of these jobs")}
    energy = slurm_energy.of_rows(rows)
    reason = energy.missing_reason
    if slurm_energy.NOT_YET in reason:  # same hint as in the report at the end of the job script
        reason += f": see `hpcdist jobs report {shlex.quote(str(run_dir or rows[-1].id))}` then"
    return {"energy_j": energy.joules, "energy_reason": reason or None}


def _lost(
    run_dir: Path | None,
    entries: Sequence[JournalEntry],
    windows: Sequence[StartWindow],
    trainings: Sequence[StartEntry],
) -> dict[str, Any]:
    if run_dir is None or not windows:
        return {"lost_s": None, "lost_reason": "no ledger has starts of these jobs"}
    if not trainings:
        return {"lost_s": None, "lost_reason": "no training has begun, or its record cannot be read"}
    # A start that is still running may yet save, unless its heartbeat stopped.
    works = is_running(entries) and time.time() - trainings[-1].seen < 2 * HEARTBEAT_S
    over = trainings[: len(trainings) - works]
    return {"lost_s": lost_s(over, windows, save_times(run_dir, entries)), "lost_reason": None}


def text(figures: dict[str, Any]) -> list[str]:
    """Return ``figures``, the result of `account`, as a list of text lines."""
    lines = []
    for job in figures["jobs"]:
        code = "" if job["exit_code"] is None else f", exit code {job['exit_code']}"
        reason = "" if job["reason"] is None else f" ({printable(job['reason'])})"
        lines.append(f"job        {job['job']}: {printable(job['state'])}{code}{reason}")
    if figures["run_dir"] is not None:
        lines.append(f"run        {printable(figures['run_dir'])}")
    if figures["starts"] is not None:
        failed = "" if not figures["failed_starts"] else f", of which {figures['failed_starts']} failed"
        lines.append(f"starts     {figures['starts']}{failed}")
    lines.append(f"time       {_time_text(figures)}")
    if figures["steps_to"] is not None:
        of = "" if figures["steps"] is None else f" of {figures['steps']}"
        made = figures["steps_to"] - figures["steps_from"]
        lines.append(
            f"steps      {counted(made, 'step')} made, from {figures['steps_from']} to {figures['steps_to']}{of}"
        )
    lost = figures["lost_s"]
    lines.append(f"lost       {_unknown(figures['lost_reason']) if lost is None else duration(lost) + _AFTER}")
    joules, reason = figures["energy_j"], figures["energy_reason"]
    note = "" if reason is None else f" ({printable(reason)})"
    lines.append(f"energy     {_unknown(reason) if joules is None else f'{joules:,.0f} J{note}'}")
    return lines


def _time_text(figures: dict[str, Any]) -> str:
    if figures["elapsed_s"] is None:
        return _unknown(figures["elapsed_reason"])
    hours = "" if figures["node_hours"] is None else f", {figures['node_hours']:.3g} node hours"
    return f"{duration(figures['elapsed_s'])}{hours}, by the {figures['elapsed_by']}"


def _unknown(reason: str) -> str:
    return f"not known ({printable(reason)})"
