"""Render the script of a job, write it beside the run, submit it to the scheduler, and enter it in the ledger.

Rendering is pure. Templates are Jinja in a sandbox, since a site profile may replace blocks of them, and every value is
quoted for the language it lands in: bash, #SBATCH lines or #PBS lines. The modules that talk to a scheduler are
imported late: printing a script is instant.
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
from hpcdist.batch.sites.profile import SiteProfile
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.reporting import template as template_files
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.template import Templates, block_names

# Scheduler of a site -> the template of a training, from whose name that of the script in the run directory is made.
TEMPLATES: Final = {"slurm": "train.sbatch.j2", "pbs": "train.pbs.j2", "none": "train.sh.j2"}
CODES: Final = SimpleNamespace(
    failure=errors.FAILURE, missing=errors.MISSING_CAPABILITY, requeue=errors.REQUEUE, storage=errors.STORAGE
)

_WRITE_CURE: Final = "free space there, or choose another --out"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.,:@%+=/-]+")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SITE_PREFIX: Final = "of the site"  # name of the template that has a profile's blocks


def render(job: BatchJob, site: SiteProfile) -> str:
    """Return the script of ``job`` at ``site``.

    Raises UsageError for a value that no directive can hold, and ConfigurationError for a block of the profile that no
    template has, or that is no Jinja.
    """
    job = site.complete(job)
    templates = environment()
    name = job.template or TEMPLATES[site.scheduler.kind]
    if site.blocks:
        _check_blocks(templates, site)
        own = [key for key in site.blocks if key in block_names(templates, name)]
        # The blocks of the profile become a template that extends the shipped one: {{ super() }} is the shipped block.
        # A block of another template is left out here: Jinja would silently never render it.
        text = "".join(f"{{% block {key} %}}\n{site.blocks[key]}{{% endblock %}}\n" for key in own)
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
        raise ConfigurationError(f"[blocks] of the site {site.name!r} cannot be rendered: {error}") from error


def environment() -> Templates:
    """Return the templates of this installation, in which an unknown name is an error and not an empty text."""
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
    from hpcdist.batch import carbon  # late: few jobs have a time to begin at

    return carbon.begin_text(moment, scheduler)


def directive(value: object) -> str:
    r"""Return ``value`` quoted for sbatch's parser of #SBATCH lines, which takes \ as an escape in any quotes.

    Raises UsageError for control characters: a newline would end the line, and begin another option or a command.
    """
    text = _one_line(value, "no #SBATCH line can hold")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def pbs(value: object) -> str:
    """Return ``value`` as one word of a #PBS line: letters, digits and _.,:@%+=/- and nothing else.

    What PBS makes of quotes and escapes differs between its versions and derivatives: so nothing is quoted, and
    UsageError raised for what would need it.
    """
    text = str(value)
    if not _PLAIN.fullmatch(text):
        raise UsageError(
            f"{text!r}: a #PBS line holds letters, digits and _ . , : @ % + = / - alone; choose other names"
        )
    return text


def comment(value: object) -> str:
    """Return ``value`` as part of a comment line. Raises UsageError where it would end the line."""
    return _one_line(value, "no comment can hold")


def _one_line(value: object, refused: str) -> str:
    text = str(value)
    if not text.isprintable():
        raise UsageError(f"{text!r} has a newline or another control character, which {refused}")
    return text


def _memory(text: str) -> str:
    """Return a memory size of Slurm's as PBS writes it: 200G is 200gb, and a bare number is of MiB in both."""
    number = text.rstrip("KMGTkmgt")
    return number + (text[len(number) :].lower() or "m") + "b"


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of an environment variable")
    return name


def _rank_python(job: BatchJob, site: SiteProfile) -> tuple[str, ...]:
    """Return the words that run Python on the ranks, none where it is that of the job."""
    words = job.python_of_ranks
    if job.environment is not None:
        words = (f"{job.local}/environment/bin/python",)
    if _orders_gpus(job, site):
        listed = ",".join(str(number) for number in site.gpu.order)
        words = ("env", "CUDA_DEVICE_ORDER=PCI_BUS_ID", f"CUDA_VISIBLE_DEVICES={listed}", *(words or (job.python,)))
    return words


def _orders_gpus(job: BatchJob, site: SiteProfile) -> bool:
    """Whether ranks take GPUs in the order of the site: where each node gives all, or some are not there."""
    return job.gpus_of_nodes == {len(site.gpu.order)} and job.gpus_per_node > 0


def _check_blocks(templates: Templates, site: SiteProfile) -> None:
    """Raise ConfigurationError for a block of the profile that no template has, with the nearest one."""
    known = sorted(set().union(*(block_names(templates, name) for name in templates.list_templates(["j2"]))))
    for name in site.blocks:
        if name not in known:
            raise ConfigurationError(
                f"[blocks] of the site {site.name!r}: no template has a block {name!r}; {suggestion(name, known)}"
            )


@dataclass(frozen=True)
class SubmittedJob:
    """Job in the queue: its number, and where its log goes."""

    number: str
    log: Path


def chain(job: BatchJob, site: SiteProfile) -> list[tuple[BatchJob, str]]:
    """Return the links of the chain of ``job`` and what follows it, with their scripts (local)."""
    links = [*(replace(job, link=number) for number in range(1, job.links + 1)), *job.followers]
    return [(link, render(link, site)) for link in links]


def submit(links: Sequence[tuple[BatchJob, str]], site: SiteProfile, folder: Path) -> Iterator[SubmittedJob]:
    """Hand the scripts to the scheduler of ``site``, each to start after the one before; logs go into ``folder``.

    Each job is entered in the ledger of its run, and yielded before the next is submitted: of a chain that the
    scheduler takes in part, its numbers are known. Raises what `slurm.submit` does, and StorageError.
    """
    if site.scheduler.kind == "slurm":
        from hpcdist.batch.schedulers.slurm import submit

        submit.check_folder(folder)
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
        # The chain so far is entered with each link: `jobs cancel` finds the later links by the newest entry.
        try:
            ledger.record(
                job.run_dir, ledger.SUBMITTED, job=number, **values, chain=[earlier.number for earlier in submitted]
            )
        except StorageError as error:
            raise StorageError(f"job {number} is submitted, but {error}") from error
        yield submitted[-1]


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
        with suppress(OSError):  # a file system without locks: better two jobs than none
            fcntl.flock(fd, fcntl.LOCK_EX)  # on the ledger itself: no lock file is left behind
        yield
    finally:
        os.close(fd)


def unfinished_states(run_dir: Path) -> Mapping[str, str]:
    """Return the jobs of ``run_dir`` that wait or run, by number, with their states (asks the scheduler)."""
    from hpcdist.batch.schedulers import dispatch

    states = dispatch.states(job.id for job in ledger.jobs(ledger.read(run_dir)).values() if not job.is_ended)
    return {
        job: state.state for job, state in states.items() if state.state not in (*FINAL_STATES, SchedulerState.UNKNOWN)
    }


def script_path(job: BatchJob, site: SiteProfile) -> Path:
    """Return where the script of ``job`` is kept, to read or to submit by hand."""
    suffix = TEMPLATES[site.scheduler.kind].removeprefix("train.").removesuffix(".j2")
    link = f"-{job.link}" if job.links > 1 else ""
    return job.run_dir / f"job{link}.{suffix}"


def _submit_one(job: BatchJob, text: str, site: SiteProfile, folder: Path, after: str | None) -> tuple[str, Path]:
    """Return the number of the job, and where its log goes."""
    from hpcdist.batch.schedulers import local, pbs
    from hpcdist.batch.schedulers.slurm import submit

    if site.scheduler.kind == "none":
        log = folder / f"hpcdist-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.out"  # its number is not known yet
        return local.submit(text, log, job.begin), log
    number = submit.submit(text, after) if site.scheduler.kind == "slurm" else pbs.submit(text, after)
    return number, job.log(folder, number)
