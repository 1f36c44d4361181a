"""`hpcdist jobs cancel`: let jobs save and end, or end them at once, with the later links of their chains."""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from hpcdist.batch import ledger
from hpcdist.batch.requeue import STOP_FILE
from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import queue
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.lookup import LocatedJob, printable
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic


@dataclass(frozen=True)
class CancelRequest:
    """Way in which a job is cancelled, and the parts of it."""

    job: LocatedJob
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
    named = lookup.jobs_named(words)
    live = [job for job in named if job.id in words or job.entered is None or not job.entered.is_ended]
    jobs = _with_later_links(live or named[-1:])
    parts = dispatch.states_of_parts(job.id for job in jobs)
    requests = [_request(job, parts[job.id], saves) for job in jobs]  # raises before anything is done
    for request in reversed(requests):  # what comes last first: it would begin when the one before it ends
        _carry_out(request)


def _with_later_links(jobs: Sequence[LocatedJob]) -> list[LocatedJob]:
    """Return ``jobs`` with the later links of their chains, each after the one that it waits for."""
    ordered: dict[str, LocatedJob] = {}
    for job in jobs:
        ordered.setdefault(job.id, job)
        known = {} if job.run_dir is None else ledger.jobs(ledger.read(job.run_dir))
        for link in job.later:
            ordered.pop(link, None)
            ordered[link] = LocatedJob(link, job.run_dir, known.get(link))
    return list(ordered.values())


def _request(job: LocatedJob, parts: Sequence[JobState], saves: bool) -> CancelRequest:
    """Return what is to become of ``job``. Raises UsageError where it cannot save, MissingCapabilityError."""
    unknown = [part for part in parts if part.state == SchedulerState.UNKNOWN]
    if unknown:
        raise MissingCapabilityError(f"job {job.id} cannot be cancelled: {printable(unknown[0].reason)}")
    live = tuple(part for part in parts if not part.is_over)
    if not live:
        return CancelRequest(job, "over", tuple(parts))
    _check_is_ours(job, live)
    if all(part.is_waiting for part in live):
        return CancelRequest(job, "pending", live)
    if not saves:
        return CancelRequest(job, "now", live)
    running = [part.id for part in live if not part.is_waiting]
    if job.run_dir is None or any("_" in part or "[" in part for part in running):
        why = "no run of yours names it" if job.run_dir is None else "it is a task of an array"
        raise UsageError(
            f"job {running[0]} runs, and cannot be asked to save: {why}. Nothing was cancelled; add --now to end it at "
            "once"
        )
    return CancelRequest(job, ledger.SAVE, live)


def _check_is_ours(job: LocatedJob, parts: Sequence[JobState]) -> None:
    """Raise UsageError where Slurm has another job of that number: several clusters may share a home directory."""
    ours = job.text("name").partition("\n")[0].strip()
    names = {part.name.strip() for part in parts} - {""}
    if dispatch.scheduler_of(job.id) == dispatch.SLURM and ours and names and ours not in names:
        raise UsageError(
            f"job {job.id} is {printable(names.pop())!r} here, and {printable(ours)!r} in "
            f"{printable(str(job.run_dir))}: it is another one, perhaps of another cluster. "
            f"Nothing was cancelled; scancel {job.id} ends it"
        )


def _carry_out(request: CancelRequest) -> None:
    """Carry out ``request``, and print what was done. Raises StorageError and MissingCapabilityError."""
    job = request.job
    if request.how == "over":
        gone = request.parts[0]
        why = f": {printable(gone.reason)}" if gone.state == SchedulerState.GONE else ""
        lookup.say(f"job {job.id} is over already ({printable(gone.state)}{why})")
        return
    if request.how == ledger.SAVE:
        _ask_to_save(job)
        return
    dispatch.cancel([job.id])
    _record(job, request.how)
    lookup.say(f"job {job.id} {'left the queue' if request.how == 'pending' else 'was ended'}")


def _ask_to_save(job: LocatedJob) -> None:
    """Let ``job`` save and end, and not come again."""
    assert job.run_dir is not None
    # First what keeps it from another start, the ledger, which its script reads when the training has ended.
    ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=ledger.SAVE)
    if dispatch.scheduler_of(job.id) == dispatch.SLURM:
        refused = queue.forbid_requeue(job.id)
        if refused:
            lookup.say(f"warning: Slurm may start job {job.id} again if its node fails: {printable(refused)}")
    path = job.run_dir / STOP_FILE
    atomic.save(path, f"{job.id}\n", "the job goes on. End it at once with --now")
    lookup.say(
        f"job {job.id} saves after its step and ends: {printable(str(path))} asks it to. "
        f"`hpcdist jobs status {job.id}` "
        "tells when; --now ends it at once"
    )


def _record(job: LocatedJob, how: str) -> None:
    if job.run_dir is None or job.entered is None:
        return
    try:
        ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=how)
    except StorageError as error:  # the job has been cancelled nevertheless
        lookup.say(f"warning: {printable(str(error))}")
