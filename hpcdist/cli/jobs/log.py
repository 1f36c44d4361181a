"""`hpcdist jobs log`: print the end of a job's log, and follow it until the job is over."""

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import click

from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.slurm import queue
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.lookup import JOB_ARGUMENT, LocatedJob, printable
from hpcdist.errors import ConfigurationError, StorageError, UsageError

BLOCK_BYTES: Final = 1 << 16
POLL_S: Final = 0.5
SCHEDULER_POLL_S: Final = 5.0  # the scheduler, whether the job is over


@click.command("log")
@JOB_ARGUMENT
@click.option("-n", "--lines", type=click.IntRange(min=0), default=30, help="So many lines of its end; 0: all of it.")
@click.option("--follow", is_flag=True, help="Go on with what is printed, until the job is over.")
def log(word: str, lines: int, follow: bool) -> None:
    """Show the end of the log of a job, of a run that of the job which began last. All its starts write one log."""
    job = lookup.job_named(word)
    path = log_path(job)
    lookup.say(printable(str(path)))
    if follow:
        _wait_for(path, job)
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
            f"{printable(str(path))} is not there: job {job.id} is {printable(state.state)}{reason}; "
            "--follow waits for it"
        ) from None
    except BrokenPipeError:  # of `| head`: it is no fault of the log, and click ends quietly
        raise
    except OSError as error:
        raise StorageError(f"{printable(str(path))} cannot be read: {error.strerror}") from error


def log_path(job: LocatedJob) -> Path:
    """Return where the log of ``job`` is: by its ledger, else by its scheduler.

    Raises UsageError for an array, and ConfigurationError where nobody knows.
    """
    text = job.log(job.id)
    if lookup.TASK_PATTERN in os.path.basename(text):
        raise UsageError(f"job {job.id} is an array, and each of its tasks has a log: name one, as {job.id}_0")
    if not text and dispatch.scheduler_of(job.id) == dispatch.SLURM:
        text = queue.log_of(job.id)
    text = text or dispatch.states([job.id])[job.id].log
    if not text:
        raise ConfigurationError(
            f"nobody knows where the log of job {job.id} is: no run of yours names it, and its scheduler does not "
            "either; look where it was submitted"
        )
    return Path(text)


def _tail_offset(file: BinaryIO, lines: int) -> int:
    """Return the byte at which the last ``lines`` of ``file`` begin; 0 for all of it."""
    end = file.seek(0, os.SEEK_END)
    if lines == 0 or end == 0:
        return 0
    newlines, at = 0, end - 1  # that of the last line itself does not count
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


def _wait_for(path: Path, job: LocatedJob) -> None:
    """Wait until ``path`` is there, or the job is over."""
    for _ in _poll(job):
        if path.exists():
            return


def _poll(job: LocatedJob) -> Iterator[None]:
    """Yield now and then, and a last time after ``job`` is over: what it printed last is there then."""
    queried_s = -math.inf
    while True:
        over = False
        if time.monotonic() - queried_s >= SCHEDULER_POLL_S:
            over, queried_s = dispatch.states([job.id])[job.id].is_over, time.monotonic()
        yield
        if over:
            return
        time.sleep(POLL_S)
