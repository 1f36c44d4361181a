"""`hpcdist jobs cancel`: let jobs save and end, or end them at once, with the later jobs of their chains."""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from hpcdist.batch import ledger
from hpcdist.batch.schedulers import dispatch, slurm
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.lookup import LocatedJob, printable
from hpcdist.constants import STOP_FILE
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic


@dataclass(frozen=True)
class CancelRequest:
    """Request to cancel ``job``. ``parts`` has one `JobState` per array task or component to cancel."""

    job: LocatedJob
    how: str  # "pending", "now", "save" or "over"
    parts: tuple[JobState, ...]


@click.command("cancel")
@click.argument("words", metavar="JOB|RUN_DIR...", nargs=-1, required=True)
@click.option(
    "--save/--now",
    "saves",
    default=True,
    help="Save a checkpoint after the current step and end, or end at once.  [default: save]",
    show_default=False,
)
def cancel(words: tuple[str, ...], saves: bool) -> None:
    """Cancel jobs. Name a job by its number, or by the run directory that the job trains.

    A pending job leaves the queue. By default (--save) a running job saves after the current step, ends with exit
    code 0, and is not requeued. Later jobs of its chain leave the queue first. With --now a running job is ended at
    once; work since the newest checkpoint is lost.
    """
    named = lookup.jobs_named(words)
    live = [job for job in named if job.id in words or job.entered is None or not job.entered.is_ended]
    jobs = _with_later_links(live or named[-1:])
    parts = dispatch.states_of_parts(job.id for job in jobs)
    requests = [_request(job, parts[job.id], saves) for job in jobs]  # all checks precede the first cancellation
    for request in reversed(requests):  # last job of a chain first: it would start when its predecessor ends
        _carry_out(request)


def _with_later_links(jobs: Sequence[LocatedJob]) -> list[LocatedJob]:
    ordered: dict[str, LocatedJob] = {}
    for job in jobs:
        ordered.setdefault(job.id, job)
        ledger_jobs = {} if job.run_dir is None else ledger.jobs(ledger.read(job.run_dir))
        for link in job.later:
            ordered.pop(link, None)
            ordered[link] = LocatedJob(link, job.run_dir, ledger_jobs.get(link))
    return list(ordered.values())


def _request(job: LocatedJob, parts: Sequence[JobState], saves: bool) -> CancelRequest:
    unknown = [part for part in parts if part.state == SchedulerState.UNKNOWN]
    if unknown:
        raise MissingCapabilityError(
            f"job {job.id} cannot be cancelled, because its state is unknown: {printable(unknown[0].reason)}; "
            "use `scancel`"
        )
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
        reason = "no run of yours contains this job" if job.run_dir is None else "it is a task of an array"
        raise UsageError(
            f"running job {running[0]} cannot be asked to save: {reason}. Nothing was cancelled; add --now to end the "
            "job at once"
        )
    return CancelRequest(job, ledger.SAVE, live)


def _check_is_ours(job: LocatedJob, parts: Sequence[JobState]) -> None:
    # Clusters with separate job numbers may share a home directory.
    ours = job.text("name").partition("\n")[0].strip()
    names = {part.name.strip() for part in parts} - {""}
    if dispatch.scheduler_of(job.id) == dispatch.SLURM and ours and names and ours not in names:
        raise UsageError(
            f"job {job.id} is named {printable(names.pop())!r} in Slurm, but {printable(ours)!r} in "
            f"{printable(str(job.run_dir))}: it is a different job, perhaps of another cluster. "
            f"Nothing was cancelled; use `scancel {job.id}` to end it"
        )


def _carry_out(request: CancelRequest) -> None:
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
    assert job.run_dir is not None
    # First the ledger entry that prevents another start: the job script reads it when the training has ended.
    ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=ledger.SAVE)
    if dispatch.scheduler_of(job.id) == dispatch.SLURM:
        refused = slurm.forbid_requeue(job.id)
        if refused:
            lookup.say(f"warning: Slurm may start job {job.id} again if its node fails: {printable(refused)}")
    path = job.run_dir / STOP_FILE
    atomic.save(path, f"{job.id}\n", "the job goes on. End it at once with --now")
    lookup.say(
        f"job {job.id} saves after its current step and ends (stop file {printable(str(path))}). "
        f"`hpcdist jobs status {job.id}` shows its state; --now ends it at once"
    )


def _record(job: LocatedJob, how: str) -> None:
    if job.run_dir is None or job.entered is None:
        return
    try:
        ledger.record(job.run_dir, ledger.CANCELLED, job=job.id, how=how)
    except StorageError as error:  # the job is already cancelled
        lookup.say(f"warning: {printable(str(error))}")
