"""Submit a job: write its files beside the run, hand the script to the scheduler, and enter it in the ledger.

The modules that talk to a scheduler are imported late: printing a script is instant.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from hpcdist.batch import ledger, script
from hpcdist.batch.job import BatchJob
from hpcdist.batch.schedulers.base import FINAL_STATES, SchedulerState
from hpcdist.batch.sites.profile import SiteProfile
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic

# By scheduler: the template of a training, and where the script of a run is kept.
TEMPLATES: Final = {"slurm": "train.sbatch.j2", "pbs": "train.pbs.j2", "none": "train.sh.j2"}


@dataclass(frozen=True)
class SubmittedJob:
    """A job in the queue: its number, and where its log goes."""

    number: str
    log: Path


def chain(job: BatchJob, site: SiteProfile) -> list[tuple[BatchJob, str]]:
    """Return the links of the chain of ``job`` and what follows it, with their scripts (local)."""
    links = [*(replace(job, link=number) for number in range(1, job.links + 1)), *job.followers]
    return [(link, script.render(link, site, link.template or TEMPLATES[site.scheduler.kind])) for link in links]


def submit(links: Sequence[tuple[BatchJob, str]], site: SiteProfile, folder: Path) -> Iterator[SubmittedJob]:
    """Hand the scripts to the scheduler of ``site``, each to start after the one before; logs go into ``folder``.

    Each job is entered in the ledger of its run, and yielded before the next is submitted: of a chain that the
    scheduler takes in part, its numbers are known. Raises what `slurm.submit` does, and StorageError.
    """
    if site.scheduler.kind == "slurm":
        from hpcdist.batch.schedulers.slurm import submit

        submit.check_folder(folder)
    done: list[SubmittedJob] = []
    ledger.register_run(links[0][0].run_dir)
    for job, text in links:
        path = script_path(job, site)
        if job.input_text:
            _write(job.input_file, job.input_text)
        _write(path, text)
        number, log = _submit_one(job, text, site, folder, done[-1].number if done else None)
        done.append(SubmittedJob(number, log))
        values = {
            "scheduler": _scheduler_name(site),
            "site": site.name,
            "name": job.name,
            "log": str(log),
            "script": str(path),
        }
        try:
            ledger.record(job.run_dir, ledger.SUBMITTED, job=number, **values, chain=[each.number for each in done])
        except StorageError as error:
            raise StorageError(f"job {number} is submitted, but {error}") from error
        yield done[-1]


def script_with_input(job: BatchJob, text: str) -> str:
    """Return the script ``text`` of ``job`` with its input file as comments at the end: complete, and never parsed."""
    if not job.input_text:
        return text
    lines = "".join(f"#: {line}\n" for line in job.input_text.removesuffix("\n").split("\n"))
    return f"{text}\n# `hpcdist submit` puts this into the file that the script reads:\n{lines}"


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Wait until nobody else submits jobs of ``run_dir``, and keep others from it: two at once would both submit.

    Where the file system has no locks, they are not kept from it. Raises StorageError.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir / ledger.FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise StorageError(
            f"{run_dir / ledger.FILE_NAME} cannot be written: {error.strerror}; choose another --out"
        ) from error
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def unfinished_states(run_dir: Path) -> Mapping[str, str]:
    """Return the jobs of ``run_dir`` that wait or run, by number, with their states (asks the scheduler)."""
    from hpcdist.batch.schedulers import dispatch

    jobs = [job.id for job in ledger.unfinished_jobs(run_dir)]
    if not jobs:
        return {}
    states = dispatch.states(jobs)
    return {
        job: state.state for job, state in states.items() if state.state not in (*FINAL_STATES, SchedulerState.UNKNOWN)
    }


def script_path(job: BatchJob, site: SiteProfile) -> Path:
    """Return where the script of ``job`` is kept, to read or to submit by hand."""
    suffix = TEMPLATES[site.scheduler.kind].removeprefix("train.").removesuffix(".j2")
    link = f"-{job.link}" if job.links > 1 else ""
    return job.run_dir / f"job{link}.{suffix}"


def _scheduler_name(site: SiteProfile) -> str:
    return "local" if site.scheduler.kind == "none" else site.scheduler.kind


def _submit_one(job: BatchJob, text: str, site: SiteProfile, folder: Path, after: str | None) -> tuple[str, Path]:
    """Return the number of the job, and where its log goes."""
    from hpcdist.batch.schedulers import local, pbs
    from hpcdist.batch.schedulers.slurm import submit

    if site.scheduler.kind == "none":
        log = folder / f"hpcdist-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.out"  # its number is not known yet
        return local.submit(text, log, job.begin), log
    number = submit.submit(text, after) if site.scheduler.kind == "slurm" else pbs.submit(text, after)
    return number, job.log(folder, number)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, os.fsencode(text))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; free space there, or choose another --out"
        ) from error
