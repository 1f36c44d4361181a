"""Find jobs by the words of a command line (job number or run directory), and print their texts safely.

A run directory selects its jobs by its journal; a job number may also be known to the scheduler only.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from hpcdist.batch import ledger
from hpcdist.batch.schedulers import dispatch
from hpcdist.comm.record.run_journal import JOURNAL_FILE, JournalEntry
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import regular

JOB_ARGUMENT: Final = click.argument("word", metavar="JOB|RUN_DIR")
JOBS_ARGUMENT: Final = click.argument("words", metavar="[JOB|RUN_DIR]...", nargs=-1)
TASK_PATTERN: Final = "%a"  # Slurm's placeholder for the array task number in the name of a log


@dataclass(frozen=True)
class LocatedJob:
    """A batch job, found by its number or by its run directory."""

    id: str
    run_dir: Path | None = None
    entered: ledger.LedgerJob | None = None  # the job's entries in the journal of its run, if any
    later: tuple[str, ...] = ()  # numbers of the later jobs of the same chain

    def text(self, name: str) -> str:
        """Return the text of the key ``name`` in the newest journal entry of the job that has this key, or ""."""
        return "" if self.entered is None else self.entered.text(name)

    def log(self, part: str) -> str:
        """Return the log path of the job or array task with the number ``part``, such as 123 or 123_4."""
        # The path of a whole job array keeps TASK_PATTERN.
        folder, name = os.path.split(self.text("log"))
        task = part.partition("_")[2]
        return os.path.join(folder, name.replace(TASK_PATTERN, task) if task.isdecimal() else name)


def all_jobs() -> list[LocatedJob]:
    """Return a list of the jobs of all runs of this user. Print a warning for a run with an unreadable journal."""
    return [job for run_dir in ledger.registered_runs() for job in _of_run(run_dir)]


def jobs_named(words: Sequence[str]) -> list[LocatedJob]:
    """Return a list of the jobs that ``words`` name: job numbers or run directories. Raises HpcdistError."""
    jobs: dict[str, LocatedJob] = {}
    registered_jobs = all_jobs() if any(dispatch.is_id(word) for word in words) else []
    for word in words:
        matches = [_by_number(word, registered_jobs)] if dispatch.is_id(word) else _by_directory(word)
        jobs |= {job.id: job for job in matches}
    return list(jobs.values())


def job_named(word: str) -> LocatedJob:
    """Return the job with the number ``word``, or one job of the run directory ``word``.

    For a run directory, return the job that started last or, if no job has started, the job that was submitted last.
    """
    jobs = jobs_named([word])
    started = [(entry.time, job) for job in jobs if job.entered and (entry := job.entered.last(ledger.BEGAN))]
    return max(started, key=lambda pair: pair[0])[1] if started else jobs[-1]


def _by_number(job: str, everything: Sequence[LocatedJob]) -> LocatedJob:
    whole = job.partition("_")[0].partition("+")[0]
    matches = [
        (candidate.id == job, candidate.entered.entries[-1].time, candidate)
        for candidate in everything
        if candidate.id in (job, whole) and candidate.entered is not None
    ]
    if not matches:
        return LocatedJob(job)
    # Job numbers can repeat if clusters share a home directory.
    newest = max(matches, key=lambda match: match[:2])[2]
    return LocatedJob(job, newest.run_dir, newest.entered, newest.later if newest.id == job else ())


def _by_directory(word: str) -> list[LocatedJob]:
    run_dir = Path(word)
    if not run_dir.is_dir():
        raise UsageError(
            f"{printable(word)} is neither a job number (123, 123_4, 123.server, local-12-345) nor a directory; "
            "list the jobs of your runs with `hpcdist jobs status --all`"
        )
    jobs = _jobs(run_dir, ledger.read(run_dir))
    if not jobs:
        raise ConfigurationError(
            f"{printable(word)} contains no {JOURNAL_FILE} with jobs: no job was submitted for this directory; "
            "give the --out directory of a submission"
        )
    return jobs


def _of_run(run_dir: Path) -> list[LocatedJob]:
    try:
        return _jobs(run_dir, ledger.read(run_dir))
    except StorageError as error:
        say(f"warning: {printable(str(error))}")
        return []


def _jobs(run_dir: Path, entries: list[JournalEntry]) -> list[LocatedJob]:
    jobs = ledger.jobs(entries)
    return [LocatedJob(job, run_dir, entered, tuple(ledger.later_links(jobs, job))) for job, entered in jobs.items()]


def recipe_steps(run_dir: Path) -> int | None:
    """Return run.steps of the recipe in ``run_dir``, or None if the recipe is missing or unreadable. Local."""
    try:
        steps = regular.toml(run_dir / RECIPE_FILE).get("run", {}).get("steps")
    except (OSError, ValueError, AttributeError):
        return None
    return steps if type(steps) is int else None


def printable(text: str) -> str:
    r"""Escape the unprintable characters of ``text``, so that a name cannot send terminal control sequences."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def short_path(path: Path) -> str:
    """Return ``path`` as `printable` text, relative to the current directory if ``path`` is inside this directory."""
    here = os.path.relpath(path)
    return printable(str(path) if here.startswith(os.pardir) else here)


def duration(seconds: float | None) -> str:
    """Format ``seconds`` as days-hours:minutes:seconds, such as 1-02:03:04 or 3:04. None becomes "-"."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(text: str) -> None:
    """Print a line with the prefix ``hpcdist jobs:`` on stderr."""
    click.echo(f"hpcdist jobs: {text}", err=True)
