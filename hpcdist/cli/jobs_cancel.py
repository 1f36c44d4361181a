"""`hpcdist jobs cancel`: a job saves and ends, or ends at once; whatever was to follow it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hpcdist.batch import ledger
from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import queue
from hpcdist.cli import jobs_find
from hpcdist.cli.jobs_begin import STOP_FILE
from hpcdist.cli.jobs_find import Found, shown
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic


@dataclass(frozen=True)
class Wish:
    """What is to become of a job, and of which parts of it."""

    job: Found
    how: str  # "pending", "now", "save" or "over"
    parts: tuple[JobState, ...]


@click.command("cancel")
@click.argument("words", metavar="JOB|RUN_DIR...", nargs=-1, required=True)
@click.option(
    "--save/--now",
    "saves",
    default=True,
    help="Let a job that runs save and end after its step, or end it at once.  [default: save]",
    show_default=False,
)
def cancel(words: tuple[str, ...], saves: bool) -> None:
    """Cancel jobs: those of a number, or all that train the run in a directory.

    One that waits leaves the queue. One that runs is asked, by a file in its run directory, to save after its step and
    to end, with exit code 0; its scheduler will not start it again. The later links of its chain leave the queue
    before. With --now it is ended at once, and its work since the newest checkpoint is lost.
    """
    found = jobs_find.named(words)
    live = [job for job in found if job.id in words or job.entered is None or not job.entered.is_ended]
    jobs = _with_later(live or found[-1:])
    parts = dispatch.states_of_parts(job.id for job in jobs)
    wishes = [_wish(job, parts[job.id], saves) for job in jobs]  # raises before anything is done
    for wish in reversed(wishes):  # what comes last first: it would begin when the one before it ends
        _grant(wish)


def _with_later(jobs: Sequence[Found]) -> list[Found]:
    """Return ``jobs`` with the later links of their chains, each after the one that it waits for."""
    found: dict[str, Found] = {}
    for job in jobs:
        found.setdefault(job.id, job)
        known = {} if job.run_dir is None else ledger.jobs(ledger.read(job.run_dir))
        for link in job.later:
            found.pop(link, None)
            found[link] = Found(link, job.run_dir, known.get(link))
    return list(found.values())


def _wish(job: Found, parts: Sequence[JobState], saves: bool) -> Wish:
    """Return what is to become of ``job``. Raises UsageError where it cannot save, MissingCapabilityError."""
    unknown = [part for part in parts if part.state == SchedulerState.UNKNOWN]
    if unknown:
        raise MissingCapabilityError(f"job {job.id} cannot be cancelled: {shown(unknown[0].reason)}")
    live = tuple(part for part in parts if not part.is_over)
    if not live:
        return Wish(job, "over", tuple(parts))
    _check_is_ours(job, live)
    if all(part.is_waiting for part in live):
        return Wish(job, "pending", live)
    if not saves:
        return Wish(job, "now", live)
    running = [part.id for part in live if not part.is_waiting]
    if job.run_dir is None or any("_" in part or "[" in part for part in running):
        why = "no run of yours names it" if job.run_dir is None else "it is a task of an array"
        raise UsageError(
            f"job {running[0]} runs, and cannot be asked to save: {why}. Nothing was cancelled; add --now to end it at "
            "once"
        )
    return Wish(job, ledger.SAVE, live)


def _check_is_ours(job: Found, parts: Sequence[JobState]) -> None:
    """Raise UsageError where Slurm has another job of that number: several clusters may share a home directory."""
    ours = job.text("name").partition("\n")[0].strip()
    names = {part.name.strip() for part in parts} - {""}
    if dispatch.scheduler_of(job.id) == dispatch.SLURM and ours and names and ours not in names:
        raise UsageError(
            f"job {job.id} is {shown(names.pop())!r} here, and {shown(ours)!r} in {shown(str(job.run_dir))}: it is "
            f"another one, perhaps of another cluster. Nothing was cancelled; scancel {job.id} ends it"
        )


def _grant(wish: Wish) -> None:
    """Do it, and say what was done. Raises StorageError and MissingCapabilityError."""
    job = wish.job
    if wish.how == "over":
        gone = wish.parts[0]
        why = f": {shown(gone.reason)}" if gone.state == SchedulerState.GONE else ""
        _say(f"job {job.id} is over already ({shown(gone.state)}{why})")
        return
    if wish.how == ledger.SAVE:
        _ask_to_save(job)
        return
    dispatch.cancel([job.id])
    _enter(job, wish.how)
    _say(f"job {job.id} {'left the queue' if wish.how == 'pending' else 'was ended'}")


def _ask_to_save(job: Found) -> None:
    """Let ``job`` save and end, and not come again."""
    assert job.run_dir is not None
    # First what keeps it from another start, the ledger, which its script reads when the training has ended.
    ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=ledger.SAVE)
    if dispatch.scheduler_of(job.id) == dispatch.SLURM:
        refused = queue.forbid_requeue(job.id)
        if refused:
            _say(f"warning: Slurm may start job {job.id} again if its node fails: {shown(refused)}")
    path = job.run_dir / STOP_FILE
    _write(path, job.id)
    _say(
        f"job {job.id} saves after its step and ends: {shown(str(path))} asks it to. `hpcdist jobs status {job.id}` "
        "tells when; --now ends it at once"
    )


def _write(path: Path, job: str) -> None:
    try:
        atomic.write(path, f"{job}\n")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; the job goes on. End it at once with --now"
        ) from error


def _enter(job: Found, how: str) -> None:
    if job.run_dir is None or job.entered is None:
        return
    try:
        ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=how)
    except StorageError as error:  # the job has been cancelled nevertheless
        _say(f"warning: {shown(str(error))}")


def _say(text: str) -> None:
    click.echo(f"hpcdist jobs: {text}", err=True)
