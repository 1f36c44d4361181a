"""Query and cancel jobs of any scheduler, selected by the form of the job id. Local."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from hpcdist.batch.schedulers import local, slurm
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.errors import MissingCapabilityError

SLURM: Final = "slurm"
PBS: Final = "pbs"
LOCAL: Final = "local"

# Slurm: 123, 123_4, 123+1. PBS: 123.server, 123[4].server. Without a scheduler: local-PID-START.
_ID: Final = re.compile(r"\d+(?:[_+]\d+)?|\d+(?:\[\d*\])?\.[\w.-]+|local-\d+-\d+", re.ASCII)


def is_id(text: str) -> bool:
    """Return True if ``text`` has the form of a job id or of an array task's id."""
    return _ID.fullmatch(text) is not None


def scheduler_of(job: str) -> str:
    """Return the scheduler of the job with id ``job``: SLURM, PBS or LOCAL, determined by the form of the id."""
    if job.startswith(local.PREFIX):
        return LOCAL
    return PBS if "." in job or "[" in job else SLURM


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return {job id: `JobState`} for the ids ``jobs``. The state is UNKNOWN if the scheduler does not answer."""
    # A job with several tasks or components has the state of one of them: running before waiting before failed.
    return {job: _combined_state(job, parts) for job, parts in states_of_parts(jobs).items()}


def states_of_parts(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """Return {job id: list of `JobState`, one per array task or component of the job} for the ids ``jobs``."""
    numbers = list(dict.fromkeys(jobs))
    states_of: dict[str, list[JobState]] = {}
    for scheduler, look in ((SLURM, _slurm), (PBS, _pbs)):
        selected = [job for job in numbers if scheduler_of(job) == scheduler]
        if selected:
            states_of |= look(selected)
    states_of |= {job: [local.state(job)] for job in numbers if scheduler_of(job) == LOCAL}
    return {job: states_of[job] for job in numbers}


def accounts(jobs: Sequence[str]) -> tuple[list[JobState], str]:
    """Return (list with a `JobState` per execution of ``jobs`` in Slurm accounting, error text or "")."""
    slurm_jobs = [job for job in jobs if scheduler_of(job) == SLURM]
    if not slurm_jobs:
        return [], f"hpcdist reads only Slurm accounting, and {', '.join(jobs)} is not a Slurm job"
    try:
        return slurm.accounted(slurm_jobs), ""
    except MissingCapabilityError as error:
        return [], str(error)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel the jobs with the ids ``jobs``. Raises MissingCapabilityError if a scheduler refuses."""
    slurm_jobs = [job for job in jobs if scheduler_of(job) == SLURM]
    if slurm_jobs:
        slurm.cancel(slurm_jobs)
    for job in jobs:
        if scheduler_of(job) == PBS:
            from hpcdist.batch.schedulers import pbs

            pbs.cancel(job)
        elif scheduler_of(job) == LOCAL:
            local.cancel(job)


def _slurm(jobs: list[str]) -> dict[str, list[JobState]]:
    try:
        queued = slurm.queued(jobs)
    except MissingCapabilityError as error:
        return {job: [JobState(id=job, state=SchedulerState.UNKNOWN, reason=str(error))] for job in jobs}
    states_of = {job: _states_of_job(job, queued) for job in jobs}
    missing = [job for job, parts in states_of.items() if not parts]
    if missing:
        accounted, why = accounts(missing)
        latest = list({state.id: state for state in accounted}.values())  # sacct has one row per start, in order
        for job in missing:
            states_of[job] = _states_of_job(job, latest) or [
                JobState(id=job, state=SchedulerState.GONE, reason=_unavailable("squeue", why))
            ]
    named = slurm.job_names(jobs)
    return {job: [replace(state, name=named.get(state.id, "")) for state in parts] for job, parts in states_of.items()}


def _unavailable(program: str, why: str) -> str:
    return f"{program} no longer knows this job{f', and {why}' if why else ', nor does sacct'}"


def _states_of_job(job: str, states: Iterable[JobState]) -> list[JobState]:
    parts = (job + "_", job + "+")
    matches = [state for state in states if state.id == job or state.id.startswith(parts)]
    if matches or not re.search(r"[_+]", job):
        return matches
    return [state for state in states if _waits_in(job, state.id)]


def _waits_in(task: str, array: str) -> bool:
    # ``task`` is like 9_3, ``array`` like 9_[1-5,7%2].
    array_id, _, number = task.partition("_")
    rest = array.removeprefix(array_id + "_[")
    if not number or rest == array:
        return False
    for stretch in rest.rstrip("]").partition("%")[0].split(","):
        first, _, last = stretch.partition("-")
        if first.isdecimal() and int(first) <= int(number) <= int(last.partition(":")[0] or first):
            return True
    return False


def _pbs(jobs: list[str]) -> dict[str, list[JobState]]:
    from hpcdist.batch.schedulers import pbs

    try:
        states_of = pbs.states(jobs)
    except MissingCapabilityError as error:
        return {job: [JobState(id=job, state=SchedulerState.UNKNOWN, reason=str(error))] for job in jobs}
    why = _unavailable("qstat", "its job history is off or expired")
    return {job: [states_of.get(job) or JobState(id=job, state=SchedulerState.GONE, reason=why)] for job in jobs}


def _combined_state(job: str, parts: list[JobState]) -> JobState:
    if len(parts) == 1:
        return replace(parts[0], id=job)
    live = [state for state in parts if not state.is_over]
    chosen = [state for state in live if not state.is_waiting] or live
    chosen = chosen or [state for state in parts if state.state != SchedulerState.COMPLETED] or parts
    nodes = [state.nodes for state in (chosen if live else parts) if state.nodes is not None]
    return replace(chosen[0], id=job, nodes=sum(nodes) if nodes and "+" in chosen[0].id else chosen[0].nodes)
