"""Render the script of a job, write it to the run directory, submit it, and record it in the journal of the run.

Templates run in a Jinja sandbox, because site profiles may replace blocks.
"""

import fcntl
import functools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from hpcdist import errors
from hpcdist.batch import job as batch_job
from hpcdist.batch import ledger
from hpcdist.batch.job import BatchJob, walltime_s
from hpcdist.batch.schedulers.base import FINAL_STATES, SchedulerState
from hpcdist.batch.site_profile import VARIABLE_NAME, SiteProfile
from hpcdist.comm.record.run_journal import JOURNAL_FILE
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.reporting import template as template_files
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.template import Templates, block_names

# Scheduler of a site -> template of a training. The script in the run directory gets the suffix of its template.
TEMPLATES: Final = {"slurm": "train.sbatch.j2", "pbs": "train.pbs.j2", "none": "train.sh.j2"}
CODES: Final = SimpleNamespace(
    failure=errors.FAILURE, missing=errors.MISSING_CAPABILITY, requeue=errors.REQUEUE, storage=errors.STORAGE
)

_WRITE_CURE: Final = "free space there, or choose another --out"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.,:@%+=/-]+")
_SITE_PREFIX: Final = "of the site"  # name of the template made from a profile's blocks


def render(job: BatchJob, site: SiteProfile) -> str:
    """Return the text of the job script of ``job`` at ``site``. Raises UsageError or ConfigurationError."""
    job = site.complete(job)
    templates = environment()
    name = job.template or TEMPLATES[site.scheduler.kind]
    if site.blocks:
        _check_blocks(templates, site)
        site_blocks = [key for key in site.blocks if key in block_names(templates, name)]
        # The blocks become a template that extends the shipped template: {{ super() }} is the shipped block.
        # Blocks of other templates are left out; Jinja would ignore them silently.
        text = "".join(f"{{% block {key} %}}\n{site.blocks[key]}{{% endblock %}}\n" for key in site_blocks)
        templates = template_files.extended(templates, _SITE_PREFIX, name, text)
        name = _SITE_PREFIX
    try:
        return templates.get_template(name).render(
            job=job,
            site=site,
            codes=CODES,
            launcher_options=" ".join(filter(None, [shlex.join(site.launcher.options), job.mpi_args])),  # the last win
            rank_python=_rank_python(job, site),
            orders_gpus=_orders_gpus(job, site),
        )
    except template_files.TemplateError as error:
        if not site.blocks:
            raise
        raise ConfigurationError(
            f"[blocks] of the site {site.name!r} cannot be rendered: {error}; correct the site profile"
        ) from error


def environment() -> Templates:
    """Return the Jinja environment that renders job scripts. Rendering an undefined variable is an error."""
    return _environment(batch_job.folder(batch_job.TEMPLATES))


@functools.cache
def _environment(folder: Path) -> Templates:
    filters: dict[str, Callable[..., Any]] = {
        "directive": directive,
        "sh": lambda value: shlex.quote(str(value)),
        "words": shlex.join,
        "variable": _variable,
        "comment": comment,
        "begin": _begin,
        "pbs": pbs,
        "memory": _memory,
        "seconds": walltime_s,
        "clock": lambda seconds: f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
    }
    return template_files.templates(folder, filters)


def _begin(moment: datetime, scheduler: str = "slurm") -> str:
    from hpcdist.batch import carbon  # late: few jobs use it

    return carbon.begin_text(moment, scheduler)


def directive(value: object) -> str:
    """Return ``value``, quoted if necessary, for an #SBATCH line. Raises UsageError for control characters."""
    text = _one_line(value, "an #SBATCH line")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def pbs(value: object) -> str:
    """Return ``value`` as text for a #PBS line. Raises UsageError for characters that would need quotes."""
    text = str(value)
    if not _PLAIN.fullmatch(text):
        raise UsageError(
            f"the job setting {text!r} is invalid: a #PBS line may only contain letters, digits and _ . , : @ % + = / "
            "-; choose another job name, queue, account, path or option"
        )
    return text


def comment(value: object) -> str:
    """Return ``value`` as text for a comment line of a job script. Raises UsageError for control characters."""
    return _one_line(value, "a comment")


def _one_line(value: object, destination: str) -> str:
    text = str(value)
    if not text.isprintable():
        raise UsageError(f"{destination} cannot contain the newline or other control characters in {text!r}")
    return text


def _memory(text: str) -> str:
    # From Slurm's format to PBS's: 200G becomes 200gb. A plain number is in MiB.
    number = text.rstrip("KMGTkmgt")
    return number + (text[len(number) :].lower() or "m") + "b"


def _variable(name: str) -> str:
    if not VARIABLE_NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not a valid environment variable name; use letters, digits and _")
    return name


def _rank_python(job: BatchJob, site: SiteProfile) -> tuple[str, ...]:
    words = job.python_of_ranks
    if job.environment is not None:
        words = (f"{job.local}/environment/bin/python",)
    if _orders_gpus(job, site):
        listed = ",".join(str(number) for number in site.gpu.order)
        words = ("env", "CUDA_DEVICE_ORDER=PCI_BUS_ID", f"CUDA_VISIBLE_DEVICES={listed}", *(words or (job.python,)))
    return words


def _orders_gpus(job: BatchJob, site: SiteProfile) -> bool:
    return job.gpus_of_nodes == {len(site.gpu.order)} and job.gpus_per_node > 0


def _check_blocks(templates: Templates, site: SiteProfile) -> None:
    shipped = sorted(set().union(*(block_names(templates, name) for name in templates.list_templates(["j2"]))))
    for name in site.blocks:
        if name not in shipped:
            raise ConfigurationError(
                f"[blocks] of the site {site.name!r}: no job script template has a Jinja block named {name!r}; "
                f"{suggestion(name, shipped)}"
            )


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job: its number and the path of its log."""

    number: str
    log: Path


def chain(job: BatchJob, site: SiteProfile) -> list[tuple[BatchJob, str]]:
    """Return a list of pairs (job, script text), in order, of all jobs to submit for ``job``. Local."""
    links = [*(replace(job, link=number) for number in range(1, job.links + 1)), *job.followers]
    return [(link, render(link, site)) for link in links]


def submit(links: Sequence[tuple[BatchJob, str]], site: SiteProfile, folder: Path) -> Iterator[SubmittedJob]:
    """Submit the pairs ``links`` = (job, script text) of a chain at ``site``. Yield a `SubmittedJob` for each job.

    ``folder``: directory of the logs. Each job starts after the previous job has ended. Raises HpcdistError.
    """
    # Each job is recorded in the journal before the next job is submitted.
    if site.scheduler.kind == "slurm":
        from hpcdist.batch.schedulers import slurm

        slurm.check_folder(folder)
    submitted: list[SubmittedJob] = []
    ledger.register_run(links[0][0].run_dir)
    for job, text in links:
        path = script_path(job, site)
        if job.input_text:
            atomic.save(job.input_file, os.fsencode(job.input_text), _WRITE_CURE, parents=True)
        atomic.save(path, os.fsencode(text), _WRITE_CURE, parents=True)
        number, log = _submit_one(job, text, site, folder, submitted[-1].number if submitted else None)
        submitted.append(SubmittedJob(number, log))
        scheduler = "local" if site.scheduler.kind == "none" else site.scheduler.kind
        values = {"scheduler": scheduler, "site": site.name, "name": job.name, "log": str(log), "script": str(path)}
        # Each link records the chain so far: `jobs cancel` finds later links by the newest entry.
        try:
            ledger.record(
                job.run_dir, ledger.SUBMITTED, job=number, **values, chain=[earlier.number for earlier in submitted]
            )
        except StorageError as error:
            raise StorageError(f"job {number} was submitted, but not recorded in the journal: {error}") from error
        yield submitted[-1]


def script_with_input(job: BatchJob, text: str) -> str:
    """Return the job script ``text``, followed by the input file of ``job`` as comment lines, for `--dry-run`."""
    if not job.input_text:
        return text
    lines = "".join(f"#: {line}\n" for line in job.input_text.removesuffix("\n").split("\n"))
    return f"{text}\n# `hpcdist submit` writes these lines to the input file of the script:\n{lines}"


@contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Context manager that prevents other processes from submitting jobs for ``run_dir``. Raises StorageError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise StorageError(
            f"{run_dir / JOURNAL_FILE} cannot be written: {error.strerror}; choose another --out"
        ) from error
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)  # on the journal itself: no lock file remains
        yield
    finally:
        os.close(fd)


def unfinished_states(run_dir: Path) -> Mapping[str, str]:
    """Return {job id: state in the scheduler} of the unfinished jobs of ``run_dir``. Raises StorageError."""
    from hpcdist.batch.schedulers import dispatch

    states = dispatch.states(job.id for job in ledger.jobs(ledger.read(run_dir)).values() if not job.is_ended)
    return {
        job: state.state for job, state in states.items() if state.state not in (*FINAL_STATES, SchedulerState.UNKNOWN)
    }


def script_path(job: BatchJob, site: SiteProfile) -> Path:
    """Return the path at which `hpcdist submit` stores the script of ``job``. ``site`` selects the file type."""
    suffix = TEMPLATES[site.scheduler.kind].removeprefix("train.").removesuffix(".j2")
    link = f"-{job.link}" if job.links > 1 else ""
    return job.run_dir / f"job{link}.{suffix}"


def _submit_one(job: BatchJob, text: str, site: SiteProfile, folder: Path, after: str | None) -> tuple[str, Path]:
    from hpcdist.batch.schedulers import local, pbs, slurm

    if site.scheduler.kind == "none":
        log = folder / f"hpcdist-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.out"  # the number is not yet known
        return local.submit(text, log, job.begin), log
    number = slurm.submit(text, after) if site.scheduler.kind == "slurm" else pbs.submit(text, after)
    return number, job.log(folder, number)
