"""`hpcdist jobs log`: print the end of a job's log, and follow the log until the job is over."""

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import click

from hpcdist.batch.schedulers import dispatch, slurm
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs.lookup import JOB_ARGUMENT, LocatedJob, printable
from hpcdist.errors import ConfigurationError, StorageError, UsageError

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
    """Print the end of a job's log; for a run directory, its newest job's log. All starts of a job share one log."""
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
            f"{printable(str(path))} does not exist: job {job.id} is {printable(state.state)}{reason}; "
            "add --follow to wait for it"
        ) from None
    except BrokenPipeError:  # the reader, such as `| head`, has exited: click ends quietly
        raise
    except OSError as error:
        raise StorageError(f"{printable(str(path))} cannot be read: {error.strerror}; check its permissions") from error


def log_path(job: LocatedJob) -> Path:
    """Return the path of a job's log, from the run's job records or the scheduler.

    Raises ConfigurationError if no log is known, and UsageError for a job array, which has a log per task.
    """
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


def _wait_for(path: Path, job: LocatedJob) -> None:
    for _ in _poll(job):
        if path.exists():
            return


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
