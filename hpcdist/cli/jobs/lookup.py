"""Look up jobs by the words of a command line (number or run directory), and print their texts safely.

A job is known by the ledger of its run, a number also by the scheduler; a run directory stands for the job that began
last. Also has the arguments, tables and formats that all `hpcdist jobs` commands share.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from hpcdist.batch import ledger
from hpcdist.batch.job import RECIPE_FILE
from hpcdist.batch.schedulers import dispatch
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import regular

JOB_ARGUMENT: Final = click.argument("word", metavar="JOB|RUN_DIR")
JOBS_ARGUMENT: Final = click.argument("words", metavar="[JOB|RUN_DIR]...", nargs=-1)
TASK_PATTERN: Final = "%a"  # number of a task in the name of a log, as Slurm writes it
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class LocatedJob:
    """A job, and what the ledger of its run has of it: None for one that no run of this user's registry names.

    ``later`` are the links of its chain that wait for its end.
    """

    id: str
    run_dir: Path | None = None
    entered: ledger.LedgerJob | None = None
    later: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        """Return what the ledger has under ``name``, "" where nothing."""
        return "" if self.entered is None else self.entered.text(name)

    def log(self, part: str) -> str:
        """Return where ``part`` prints, this job or a task of it; "" where no ledger says.

        That of a whole array has TASK in its name, for the number of a task.
        """
        folder, name = os.path.split(self.text("log"))
        task = part.partition("_")[2]
        return os.path.join(folder, name.replace(TASK_PATTERN, task) if task.isdecimal() else name)


def all_jobs() -> list[LocatedJob]:
    """Return all jobs of the runs in the registry of this user. A ledger that cannot be read is told and left out."""
    return [job for run_dir in ledger.registered_runs() for job in _of_run(run_dir)]


def jobs_named(words: Sequence[str]) -> list[LocatedJob]:
    """Return the jobs that ``words`` name, each by its number or by the directory of its run.

    Raises UsageError for what is neither, ConfigurationError for a directory for which nothing was submitted.
    """
    jobs: dict[str, LocatedJob] = {}
    known = all_jobs() if any(dispatch.is_id(word) for word in words) else []
    for word in words:
        own = [_by_number(word, known)] if dispatch.is_id(word) else _by_directory(word)
        jobs |= {job.id: job for job in own}
    return list(jobs.values())


def job_named(word: str) -> LocatedJob:
    """Return the job that ``word`` names; of a run the one that began last, or else was submitted last."""
    jobs = jobs_named([word])
    begun = [(entry.time, job) for job in jobs if job.entered and (entry := job.entered.last(ledger.BEGAN))]
    return max(begun, key=lambda pair: pair[0])[1] if begun else jobs[-1]


def _by_number(job: str, everything: Sequence[LocatedJob]) -> LocatedJob:
    """Return the newest job of that number: several clusters may share a home directory."""
    whole = job.partition("_")[0].partition("+")[0]
    known = [candidate for candidate in everything if candidate.id in (job, whole) and candidate.entered is not None]
    if not known:
        return LocatedJob(job)
    newest = max(
        known,
        key=lambda candidate: (
            candidate.id == job,
            candidate.entered.entries[-1].time if candidate.entered else _LONG_AGO,
        ),
    )
    return LocatedJob(job, newest.run_dir, newest.entered, newest.later if newest.id == job else ())


def _by_directory(word: str) -> list[LocatedJob]:
    run_dir = Path(word)
    if not run_dir.is_dir():
        raise UsageError(
            f"{printable(word)} is neither the number of a job (123, 123_4, 123.server, local-12-345) nor a directory; "
            "`hpcdist jobs status --all` lists the jobs of your runs"
        )
    jobs = _jobs(run_dir, ledger.read(run_dir))
    if not jobs:
        raise ConfigurationError(
            f"{printable(word)} holds no {ledger.FILE_NAME}: nothing was submitted for it; "
            "give the --out of a submission"
        )
    return jobs


def _of_run(run_dir: Path) -> list[LocatedJob]:
    try:
        return _jobs(run_dir, ledger.read(run_dir))
    except StorageError as error:
        say(f"warning: {printable(str(error))}")
        return []


def _jobs(run_dir: Path, entries: list[ledger.LedgerEntry]) -> list[LocatedJob]:
    jobs = ledger.jobs(entries)
    return [LocatedJob(job, run_dir, entered, tuple(ledger.later_links(jobs, job))) for job, entered in jobs.items()]


def recipe_steps(run_dir: Path) -> int | None:
    """Return how many steps the run in ``run_dir`` is to have, None where its recipe does not say (local)."""
    try:
        steps = regular.toml(run_dir / RECIPE_FILE).get("run", {}).get("steps")
    except (OSError, ValueError, AttributeError):
        return None
    return steps if type(steps) is int else None


def printable(text: str) -> str:
    r"""Return ``text`` with all that a terminal would not show as it stands escaped: a name must not command it."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def short_path(path: Path) -> str:
    """Return ``path`` as short as it can be written from here, and as `printable`."""
    here = os.path.relpath(path)
    return printable(str(path) if here.startswith(os.pardir) else here)


def duration(seconds: float | None) -> str:
    """Return 1-02:03:04, 2:03:04 or 3:04; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(text: str) -> None:
    """Print a line about jobs, on stderr."""
    click.echo(f"hpcdist jobs: {text}", err=True)
