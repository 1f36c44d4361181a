"""`hpcdist jobs report`: steps, time, restarts, energy and lost work of jobs.

Sources are the accounts of Slurm and the ledger of the run. A start is an entry `began` of the ledger, with what is
known of its end. In it the training may have started several times (`hpcdist run --restarts`): ``starts.json`` has
those. Of one that failed, the work since the last checkpoint before its end is lost; where that checkpoint has been
removed since, the figure is an upper bound.
"""

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from hpcdist.batch import ledger
from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import energy as slurm_energy
from hpcdist.cli.common import json_option
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.begin import newest_checkpoint
from hpcdist.cli.jobs.lookup import JOB_ARGUMENT, LocatedJob, duration, printable
from hpcdist.cli.jobs.status import by_ledger
from hpcdist.errors import INTERRUPTED, OK, REQUEUE, ConfigurationError
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # late at run time: --help must not load it
    from hpcdist.training.run.start_record import StartEntry

CLOCK_SLACK: Final = timedelta(seconds=1)  # between what two processes call now
_LATEST_S: Final = 1 << 33  # seconds since 1970, of what can be meant
_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC)
_STOP_REQUESTED: Final = (REQUEUE, INTERRUPTED)  # exit codes of a training that was told to stop: it did not fail
_UNKNOWN: Final = "no scheduler and no ledger says how long"
_AFTER: Final = " of work after the last checkpoints of failed starts"


@dataclass(frozen=True)
class JobStart:
    """One start of a job: ``elapsed_s`` and ``nodes`` are None where nobody has written them down."""

    job: str
    elapsed_s: float | None
    nodes: int | None
    code: int | None
    origin: str
    newest: str


class StartWindow(NamedTuple):
    """The time from one start of a run to the next, and where the ledger has its begin."""

    place: int
    job: str
    first: datetime
    last: datetime

    def has(self, training: "StartEntry") -> bool:
        """Whether ``training`` began in it."""
        return self.first - CLOCK_SLACK <= _utc(training.began) < self.last


def start_windows(entries: Sequence[ledger.LedgerEntry]) -> list[StartWindow]:
    """Return a window for each start in the ledger."""
    begun = [(place, entry) for place, entry in enumerate(entries) if entry.event == ledger.BEGAN]
    ends = [*(entry.time for _, entry in begun[1:]), _END_OF_TIME]
    return [StartWindow(place, entry.job, entry.time, end) for (place, entry), end in zip(begun, ends, strict=False)]


def _job_start(
    entries: Sequence[ledger.LedgerEntry],
    window: StartWindow,
    live: dict[str, JobState],
    trainings: Sequence["StartEntry"],
) -> JobStart:
    """Return a start of a job by the ledger.

    One that was killed has written no end. The last of a job lasted as ``live`` says then, if it does; another at least
    as long as its ``trainings`` were seen.
    """
    entry, state = entries[window.place], live.get(window.job)
    later = [other for other in entries[window.place + 1 :] if other.job == window.job]
    ending = next((other for other in later if other.event in (ledger.BEGAN, ledger.ENDED)), None)
    end = ending if ending is not None and ending.event == ledger.ENDED else None
    seen = [_utc(training.seen) for training in trainings if window.has(training)]
    if end is not None:
        elapsed_s: float | None = (end.time - entry.time).total_seconds()
    elif ending is None and state is not None and state.elapsed_s is not None:
        elapsed_s = state.elapsed_s
    else:
        elapsed_s = (max(seen) - entry.time).total_seconds() if seen else None
    return JobStart(
        job=entry.job,
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s),
        nodes=entry.number("nodes") or (None if state is None else state.nodes),
        code=None if end is None else end.number("code"),
        origin=entry.text("from"),
        newest="" if end is None else end.text("newest"),
    )


def save_times(run_dir: Path, entries: Sequence[ledger.LedgerEntry]) -> list[datetime]:
    """Return when checkpoints were written: those that are there, and those that the ledger mentions (local)."""
    from hpcdist.cli.run import checkpoints

    mentioned = [ns for entry in entries if 0 < (ns := entry.number("saved_ns") or 0) < _LATEST_S * 10**9]
    return sorted(_utc(ns / 1e9) for ns in {*mentioned, *checkpoints(run_dir).values()})


def lost_s(trainings: Sequence["StartEntry"], within: Sequence[StartWindow], saved: Sequence[datetime]) -> float:
    """Return the seconds of work that those of ``trainings`` have lost by failing that began ``within`` windows."""
    seconds = 0.0
    for training in trainings:
        if not training.end and any(window.has(training) for window in within):
            began, seen = _utc(training.began), _utc(training.seen)
            saves = [moment for moment in saved if began - CLOCK_SLACK <= moment <= seen + CLOCK_SLACK]
            seconds += max(0.0, (seen - max([began, *saves])).total_seconds())
    return seconds


def is_running(entries: Sequence[ledger.LedgerEntry]) -> bool:
    """Whether the newest start of the run has said no end."""
    last = next((entry for entry in reversed(entries) if entry.event in (ledger.BEGAN, ledger.ENDED)), None)
    return last is not None and last.event == ledger.BEGAN


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@click.command("report")
@JOB_ARGUMENT
@json_option
def report(word: str, as_json: bool) -> None:
    """Account for a job, or for all jobs of a run: how it ended, time, node hours, restarts, steps, energy, lost work.

    Times and joules are those of Slurm's accounting, where that is on; else times are those of the ledger, from begin
    to end of the training. Energy is what Slurm has booked in the steps of the job, its script included, once each: of
    whole nodes, and so only of this job where it had them for itself. Slurm knows it when a job is over.

    --json prints one object: jobs, each with job, state, reason, exit_code and restarts; run_dir, starts,
    failed_starts, elapsed_s, elapsed_by (accounts, ledger or queue), elapsed_reason, node_hours, steps_from, steps_to,
    steps, energy_j, energy_reason (also of what is not in energy_j), lost_s and lost_reason; null is what is not known.
    """
    figures = account(lookup.jobs_named([word]))
    click.echo(json.dumps(figures) if as_json else "\n".join(text(figures)))


def account(jobs: Sequence[LocatedJob]) -> dict[str, Any]:
    """Return the figures of ``jobs``, which are of one run, or one job of none. Raises ConfigurationError."""
    ids = [job.id for job in jobs]
    by_scheduler = dispatch.states(ids)
    states = {job.id: by_ledger(job, by_scheduler[job.id]) for job in jobs}
    rows, no_rows = dispatch.accounts(ids)
    run_dir = jobs[0].run_dir
    if (
        run_dir is None
        and not rows
        and all(state.state in (SchedulerState.GONE, SchedulerState.UNKNOWN) for state in states.values())
    ):
        raise ConfigurationError(
            f"nothing is known of job {', '.join(ids)}: {printable(states[ids[0]].reason)}; "
            "name the directory of its run"
        )
    entries = [] if run_dir is None else ledger.read(run_dir)
    trainings = [] if run_dir is None else _trainings(run_dir)
    windows = [window for window in start_windows(entries) if window.job in ids]
    begun = [_job_start(entries, window, states, trainings) for window in windows]
    return {
        "jobs": [_end_of(states[job]) for job in ids],
        "run_dir": None if run_dir is None else str(run_dir),
        **_starts(begun, rows, states),
        **_time(begun, rows, states),
        **_steps(run_dir, begun, states),
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
    """Return how many starts there were, and how many of them ended by nobody's wish."""
    if not begun:
        return {"starts": len(rows) or None, "failed_starts": None}
    last = {start.job: start for start in begun}
    at_work = {job for job, state in states.items() if not state.is_over and state.state != SchedulerState.UNKNOWN}
    dead = [start for start in begun if start.code is None and not (last[start.job] is start and start.job in at_work)]
    failed = [start for start in begun if start.code not in (None, OK, *_STOP_REQUESTED)]
    return {"starts": len(begun), "failed_starts": len(dead) + len(failed)}


def _time(begun: Sequence[JobStart], rows: Sequence[JobState], states: dict[str, JobState]) -> dict[str, Any]:
    """Return the time of all starts, and node hours, by the best that knows both of all of them."""
    # Components of a heterogeneous job (7+0, 7+1) are on different nodes at the same time.
    accounts = [((row.id.partition("+")[0], row.restarts), row.elapsed_s, row.nodes) for row in rows]
    own = [(number, each.elapsed_s, each.nodes) for number, each in enumerate(begun)]
    # The queue knows of the last start alone, and the ledger has asked it for that.
    single = [(job, each.elapsed_s, each.nodes) for job, each in states.items() if not (begun or each.restarts)]
    for by, known in (("accounts", accounts), ("ledger", own), ("queue", single)):
        times: dict[Any, float] = {}
        for start, elapsed_s, _ in known:
            times[start] = max(times.get(start, 0.0), elapsed_s or 0.0)
        if times and len(times) >= len(begun) and all(elapsed_s is not None for _, elapsed_s, _ in known):
            hours = [elapsed_s * nodes / 3600 for _, elapsed_s, nodes in known if elapsed_s is not None and nodes]
            figures = {"elapsed_s": sum(times.values()), "elapsed_by": by, "elapsed_reason": None}
            return figures | {"node_hours": sum(hours) if len(hours) == len(known) else None}
    return {"elapsed_s": None, "elapsed_by": None, "elapsed_reason": _UNKNOWN, "node_hours": None}


def _steps(run_dir: Path | None, begun: Sequence[JobStart], states: dict[str, JobState]) -> dict[str, Any]:
    """Return from which step to which checkpoint the jobs have come."""
    if run_dir is None or not begun:
        return {
            "steps_from": None,
            "steps_to": None,
            "steps": None if run_dir is None else lookup.recipe_steps(run_dir),
        }
    to = begun[-1].newest or newest_checkpoint(run_dir).name
    numbers = [int(name.removeprefix("step-") or 0) for name in (begun[0].origin, to)]
    return {"steps_from": numbers[0], "steps_to": numbers[1], "steps": lookup.recipe_steps(run_dir)}


def _energy(
    rows: Sequence[JobState], no_rows: str, states: dict[str, JobState], run_dir: Path | None
) -> dict[str, Any]:
    """Return the joules of all starts together, and why they are not known or what is not in them."""
    if not rows:
        reasons = [no_rows, *(state.energy_reason for state in states.values())]
        return {"energy_j": None, "energy_reason": next(filter(None, reasons), "no accounts of these jobs")}
    energy = slurm_energy.of_rows(rows)
    reason = energy.lacking
    if slurm_energy.NOT_YET in reason:  # as in the report at the end of a job's own script
        reason += f": see `hpcdist jobs report {shlex.quote(str(run_dir or rows[-1].id))}` then"
    return {"energy_j": energy.known, "energy_reason": reason or None}


def _trainings(run_dir: Path) -> "list[StartEntry]":
    """Return the starts of the run by its own record whose times can be meant: anybody may have written in it."""
    from hpcdist.training.run import start_record

    starts = start_record.known_starts(run_dir)
    return [start for start in starts if 0 <= start.began < _LATEST_S and 0 <= start.seen < _LATEST_S]


def _lost(
    run_dir: Path | None,
    entries: Sequence[ledger.LedgerEntry],
    windows: Sequence[StartWindow],
    trainings: "Sequence[StartEntry]",
) -> dict[str, Any]:
    """Return the seconds of work that failed starts have lost."""
    from hpcdist.training.run.start_record import HEARTBEAT_S

    if run_dir is None or not windows:
        return {"lost_s": None, "lost_reason": "no ledger has starts of these jobs"}
    if not trainings:
        return {"lost_s": None, "lost_reason": "no training has begun, or its record cannot be read"}
    # One that is at work may yet save: what is not seen any more does not.
    works = is_running(entries) and time.time() - trainings[-1].seen < 2 * HEARTBEAT_S
    over = trainings[: len(trainings) - works]
    return {"lost_s": lost_s(over, windows, save_times(run_dir, entries)), "lost_reason": None}


def text(figures: dict[str, Any]) -> list[str]:
    """Return the figures as lines for people."""
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
    beside = "" if reason is None else f" ({printable(reason)})"
    lines.append(f"energy     {_unknown(reason) if joules is None else f'{joules:,.0f} J{beside}'}")
    return lines


def _time_text(figures: dict[str, Any]) -> str:
    if figures["elapsed_s"] is None:
        return _unknown(figures["elapsed_reason"])
    hours = "" if figures["node_hours"] is None else f", {figures['node_hours']:.3g} node hours"
    return f"{duration(figures['elapsed_s'])}{hours}, by the {figures['elapsed_by']}"


def _unknown(reason: str) -> str:
    return f"not known ({printable(reason)})"
