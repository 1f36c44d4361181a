"""`hpcdist jobs status`: one line per job. `hpcdist jobs log`: the end of a job's log, followed until the job is over.

The state of a job comes from its scheduler, the journal of its run, and the checkpoints of its run.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from hpcdist.batch import ledger
from hpcdist.batch.ledger import NewestCheckpoint
from hpcdist.batch.schedulers import dispatch, slurm
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.cli.common import json_option
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.begin import newest_checkpoint
from hpcdist.cli.jobs.lookup import JOB_ARGUMENT, JOBS_ARGUMENT, LocatedJob, duration, printable, short_path
from hpcdist.errors import OK, REQUEUE, ConfigurationError, StorageError, UsageError
from hpcdist.reporting.table import aligned, text_of

JOB_NAME_PREFIX: Final = "hpcdist"  # queued jobs with this name prefix are listed even if no ledger has them
_AS_ASKED: Final = "saved and ended as requested"
_UNFINISHED: Final = "stopped before its last step: submit it again to continue"
# Their reason is a sentence: it is printed below the table.
_UNKNOWN_STATES: Final = (SchedulerState.GONE, SchedulerState.UNKNOWN)
_HEAD: Final = ("JOB", "NAME", "STATE", "NODES", "ELAPSED", "LEFT", "RESTARTS", "SAVED", "RUN")


@dataclass(frozen=True)
class StatusRow:
    """A row of the status table for a job or array task: state, newest checkpoint, and run.steps of the recipe."""

    job: LocatedJob
    state: JobState
    saved: NewestCheckpoint
    steps: int | None

    @property
    def name(self) -> str:
        """Job name from the journal of the run, or from the queue if the journal has no name."""
        return self.job.text("name") or self.state.name


@click.command("status")
@JOBS_ARGUMENT
@click.option("--all", "ended", is_flag=True, help="Also show jobs that are over.")
@json_option
def status(words: tuple[str, ...], ended: bool, as_json: bool) -> None:
    """Show the state of the named jobs (number or run directory), or of all your jobs that are not over.

    SAVED shows the newest checkpoint of the run: step, run.steps of the recipe, and age. Your jobs include queued
    jobs whose name begins with hpcdist.

    --json prints {"jobs": [...]}, each with job, name, scheduler, site, state, reason, nodes, elapsed_s, time_left_s,
    restarts, exit_code, begun_utc, ended_utc, log, run_dir, checkpoint, checkpoint_step, checkpoint_utc and steps;
    unknown is null.
    """
    rows = status_rows(lookup.jobs_named(words) if words else _own_jobs(ended), ended or bool(words))
    if as_json:
        click.echo(json.dumps({"jobs": [jsonable(row) for row in rows]}))
        return
    if not rows:
        click.echo("you have no waiting or running job; --all shows finished jobs", err=True)
        return
    now = time.time_ns()
    click.echo("\n".join(aligned([_HEAD, *(_cells(row, now) for row in rows)], left=range(len(_HEAD)))))
    for reason in dict.fromkeys(row.state.reason for row in rows if row.state.state in _UNKNOWN_STATES):
        lookup.say(printable(reason))


def _own_jobs(ended: bool) -> list[LocatedJob]:
    entered = lookup.all_jobs()
    jobs = [job for job in entered if ended or job.entered is None or not job.entered.is_ended]
    job_ids = {job.id for job in entered}
    for part, name in slurm.job_names().items():
        job = part.partition("_")[0].partition("+")[0]
        if name.startswith(JOB_NAME_PREFIX) and job not in job_ids:
            job_ids.add(job)
            jobs.append(LocatedJob(job))
    return jobs


def status_rows(jobs: Sequence[LocatedJob], ended: bool) -> list[StatusRow]:
    """Return a list with a row per job, or per array task of a job. ``ended``: True to include jobs that are over."""
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
    """Return ``state``, the scheduler's state of ``job``, corrected by the journal of the run.

    For example, a job that the scheduler no longer knows has ended if the journal says so.
    """
    if job.entered is None:
        return state
    end = job.entered.last(ledger.ENDED)
    code = state.exit_code if end is None else end.number("code")
    has_saved = job.entered.is_to_save and code == REQUEUE
    if has_saved and state.is_over and state.state not in _UNKNOWN_STATES:
        return replace(state, reason=_AS_ASKED)
    if job.entered.is_to_save and state.state == SchedulerState.RUNNING:
        return replace(state, reason="asked to save and end")
    if code == REQUEUE and state.state == SchedulerState.FAILED and state.reason in ("", "NonZeroExitCode"):
        return replace(state, reason=_UNFINISHED)
    if state.state not in _UNKNOWN_STATES:
        return state
    began = job.entered.last(ledger.BEGAN)
    restarts = None if began is None else began.number("restart")
    if end is None or not job.entered.is_ended:
        killed = "; the ledger has no end: the job was killed, or has not begun"
        return replace(state, restarts=restarts, reason=state.reason + killed)
    code = OK if has_saved else code
    word = SchedulerState.COMPLETED if code == OK else SchedulerState.FAILED
    ended = end.time.isoformat(timespec="seconds")
    reason = _AS_ASKED if has_saved else "by its ledger"
    return replace(state, state=word, exit_code=code, restarts=restarts, ended_utc=ended, reason=reason)


def _cells(row: StatusRow, now_ns: int) -> list[str]:
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
    """Return the status table ``row`` as a dict of JSON values. Unknown values are None."""
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


BLOCK_BYTES: Final = 1 << 16
POLL_S: Final = 0.5
SCHEDULER_POLL_S: Final = 5.0  # interval of asking the scheduler whether the job is over


@click.command("log")
@JOB_ARGUMENT
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=30, help="Number of last lines to print; 0: the whole log."
)
@click.option("--follow", is_flag=True, help="Keep printing new lines until the job is over.")
def log(word: str, lines: int, follow: bool) -> None:
    """Print the end of the log of a job, or of the newest job of a run directory. All starts of a job share one log."""
    job = lookup.job_named(word)
    path = log_path(job)
    lookup.say(printable(str(path)))
    for _ in _poll(job) if follow else ():
        if path.exists():
            break
    try:
        with path.open("rb") as file:
            file.seek(_tail_offset(file, lines))
            _copy(file)
            for _ in _poll(job) if follow else ():
                _copy(file)
    except FileNotFoundError:
        state = dispatch.states([job.id])[job.id]
        reason = f" ({printable(state.reason)})" if state.reason else ""
        raise StorageError(
            f"{printable(str(path))} does not exist: job {job.id} is {printable(state.state)}{reason}; "
            "add --follow to wait for the file"
        ) from None
    except BrokenPipeError:  # the reader, such as `| head`, has exited: click ends quietly
        raise
    except OSError as error:
        raise StorageError(f"{printable(str(path))} cannot be read: {error.strerror}; check its permissions") from error


def log_path(job: LocatedJob) -> Path:
    """Return the log path of ``job``. Raises ConfigurationError if unknown, UsageError for a whole job array."""
    text = job.log(job.id)
    if lookup.TASK_PATTERN in os.path.basename(text):
        raise UsageError(f"job {job.id} is an array with one log per task; name one task, e.g. {job.id}_0")
    if not text and dispatch.scheduler_of(job.id) == dispatch.SLURM:
        text = slurm.log_of(job.id)
    text = text or dispatch.states([job.id])[job.id].log
    if not text:
        raise ConfigurationError(
            f"the log of job {job.id} is unknown: no run of yours contains the job, and its scheduler does not report "
            "a log; look in the directory of the submission"
        )
    return Path(text)


def _tail_offset(file: BinaryIO, lines: int) -> int:
    end = file.seek(0, os.SEEK_END)
    if lines == 0 or end == 0:
        return 0
    newlines, at = 0, end - 1  # skip the newline that ends the last line
    while at > 0:
        begin = max(0, at - BLOCK_BYTES)
        file.seek(begin)
        block = file.read(at - begin)
        position = len(block)
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            newlines += 1
            if newlines == lines:
                return begin + position + 1
        at = begin
    return 0


def _copy(file: BinaryIO) -> None:
    out = sys.stdout.buffer
    while block := file.read(BLOCK_BYTES):
        out.write(block)
    out.flush()


def _poll(job: LocatedJob) -> Iterator[None]:
    # Yield while the job runs, and once after its end, to read its last output.
    queried_s = -math.inf
    while True:
        over = False
        if time.monotonic() - queried_s >= SCHEDULER_POLL_S:
            over, queried_s = dispatch.states([job.id])[job.id].is_over, time.monotonic()
        yield
        if over:
            return
        time.sleep(POLL_S)
