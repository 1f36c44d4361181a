"""`hpcdist jobs status`: one line for each job, by its scheduler, its ledger and the checkpoints of its run."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.batch import ledger
from hpcdist.batch.requeue import NewestCheckpoint
from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import queue
from hpcdist.cli.common import json_option
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.begin import newest_checkpoint
from hpcdist.cli.jobs.lookup import JOBS_ARGUMENT, LocatedJob, duration, printable, short_path
from hpcdist.errors import OK, REQUEUE
from hpcdist.reporting.table import aligned, text_of

JOB_NAME_PREFIX: Final = "hpcdist"  # how the names of jobs begin that no ledger names, and are shown nevertheless
_AS_ASKED: Final = "saved and ended, as it was asked to"
_UNFINISHED: Final = "stopped before its last step: submit it again to go on"
_UNKNOWN_STATES: Final = (
    SchedulerState.GONE,
    SchedulerState.UNKNOWN,
)  # whose reason is a sentence: it is told below the table
_HEAD: Final = ("JOB", "NAME", "STATE", "NODES", "ELAPSED", "LEFT", "RESTARTS", "SAVED", "RUN")


@dataclass(frozen=True)
class StatusRow:
    """A job, or one task of it: what is known of it, and of its run."""

    job: LocatedJob
    state: JobState
    saved: NewestCheckpoint
    steps: int | None

    @property
    def name(self) -> str:
        """Its name: as it was submitted, else as the queue has it."""
        return self.job.text("name") or self.state.name


@click.command("status")
@JOBS_ARGUMENT
@click.option("--all", "ended", is_flag=True, help="Show jobs that are over, too.")
@json_option
def status(words: tuple[str, ...], ended: bool, as_json: bool) -> None:
    """Show how jobs are: those that are named, by number or run directory, or all of yours that are not over.

    SAVED is the newest checkpoint of the run, of so many steps, and its age. Yours are the jobs of all runs that you
    have submitted, and those in the queue whose names begin with hpcdist.

    --json prints {"jobs": [...]}, each with job, name, scheduler, site, state, reason, nodes, elapsed_s, time_left_s,
    restarts, exit_code, begun_utc, ended_utc, log, run_dir, checkpoint, checkpoint_step, checkpoint_utc and steps; null
    is what is not known.
    """
    rows = status_rows(lookup.jobs_named(words) if words else _own_jobs(ended), ended or bool(words))
    if as_json:
        click.echo(json.dumps({"jobs": [jsonable(row) for row in rows]}))
        return
    if not rows:
        click.echo("no job of yours waits or runs; --all shows those that are over", err=True)
        return
    now = time.time_ns()
    click.echo("\n".join(aligned([_HEAD, *(_cells(row, now) for row in rows)], left=range(len(_HEAD)))))
    for reason in dict.fromkeys(row.state.reason for row in rows if row.state.state in _UNKNOWN_STATES):
        lookup.say(printable(reason))


def _own_jobs(ended: bool) -> list[LocatedJob]:
    """Return the jobs of all runs of this user, of the registry and of the queue."""
    entered = lookup.all_jobs()
    jobs = [job for job in entered if ended or job.entered is None or not job.entered.is_ended]
    known = {job.id for job in entered}
    for part, name in queue.job_names().items():
        job = part.partition("_")[0].partition("+")[0]
        if name.startswith(JOB_NAME_PREFIX) and job not in known:
            known.add(job)
            jobs.append(LocatedJob(job))
    return jobs


def status_rows(jobs: Sequence[LocatedJob], ended: bool) -> list[StatusRow]:
    """Return a row for each of ``jobs`` and of their tasks, those that are over only where ``ended``."""
    parts = dispatch.states_of_parts(job.id for job in jobs)
    rows = []
    runs: dict[Path | None, tuple[NewestCheckpoint, int | None]] = {None: (NewestCheckpoint(), None)}
    for job in jobs:
        for state in parts[job.id]:
            known_state = by_ledger(job, state)
            if not ended and known_state.is_over:
                continue
            if job.run_dir not in runs and job.run_dir is not None:
                runs[job.run_dir] = newest_checkpoint(job.run_dir), lookup.recipe_steps(job.run_dir)
            rows.append(StatusRow(job, known_state, *runs[job.run_dir]))
    return rows


def by_ledger(job: LocatedJob, state: JobState) -> JobState:
    """Return the ``state`` of a job, by what it has said itself where no scheduler says anything."""
    if job.entered is None:
        return state
    end = job.entered.last(ledger.ENDED)
    code = state.exit_code if end is None else end.number("code")
    has_saved = job.entered.is_to_save and code == REQUEUE
    if has_saved and state.is_over and state.state not in _UNKNOWN_STATES:
        return replace(state, reason=_AS_ASKED)
    if job.entered.is_to_save and state.state == SchedulerState.RUNNING:
        return replace(state, reason="was asked to save and end")
    if code == REQUEUE and state.state == SchedulerState.FAILED and state.reason in ("", "NonZeroExitCode"):
        return replace(state, reason=_UNFINISHED)
    if state.state not in _UNKNOWN_STATES:
        return state
    began = job.entered.last(ledger.BEGAN)
    restarts = None if began is None else began.number("restart")
    if end is None or not job.entered.is_ended:
        killed = "; it has said no end: it was killed, or has not begun"
        return replace(state, restarts=restarts, reason=state.reason + killed)
    code = OK if has_saved else code
    word = SchedulerState.COMPLETED if code == OK else SchedulerState.FAILED
    ended = end.time.isoformat(timespec="seconds")
    reason = _AS_ASKED if has_saved else "by its ledger"
    return replace(state, state=word, exit_code=code, restarts=restarts, ended_utc=ended, reason=reason)


def _cells(row: StatusRow, now_ns: int) -> list[str]:
    """Return the texts of a row, under _HEAD."""
    state = row.state
    code = f" {state.exit_code}" if state.exit_code else ""
    reason = f" ({printable(state.reason)})" if state.reason and state.state not in _UNKNOWN_STATES else ""
    saved = "-"
    if row.saved.name:
        of = "" if row.steps is None else f" of {row.steps}"
        saved = f"{row.saved.name}{of}, {duration(max(0.0, (now_ns - row.saved.ns) / 1e9))} ago"
    elif row.steps is not None:
        saved = f"nothing of {row.steps}"
    nodes, restarts = (text_of(number, ".0f") for number in (state.nodes, state.restarts))
    times = duration(state.elapsed_s), duration(state.time_left_s)
    run_dir = "-" if row.job.run_dir is None else short_path(row.job.run_dir)
    word = f"{printable(state.state)}{code}{reason}"
    return [state.id, printable(row.name) or "-", word, nodes, *times, restarts, saved, run_dir]


def jsonable(row: StatusRow) -> dict[str, Any]:
    """Return a row as JSON values; None for what is not known."""
    state, job = row.state, row.job
    saved_utc = (
        datetime.fromtimestamp(row.saved.ns / 1e9, UTC).isoformat(timespec="seconds") if row.saved.name else None
    )
    return {
        "job": state.id,
        "name": row.name or None,
        "scheduler": job.text("scheduler") or dispatch.scheduler_of(job.id),
        "site": job.text("site") or None,
        "state": str(state.state),
        "reason": state.reason or None,
        "nodes": state.nodes,
        "elapsed_s": state.elapsed_s,
        "time_left_s": state.time_left_s,
        "restarts": state.restarts,
        "exit_code": state.exit_code,
        "begun_utc": state.begun_utc or None,
        "ended_utc": state.ended_utc or None,
        "log": job.log(state.id) or state.log or None,
        "run_dir": None if job.run_dir is None else str(job.run_dir),
        "checkpoint": row.saved.name or None,
        "checkpoint_step": row.saved.step if row.saved.name else None,
        "checkpoint_utc": saved_utc,
        "steps": row.steps,
    }
