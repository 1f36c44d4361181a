"""Query and cancel jobs of any scheduler. Starts nothing but the scheduler's own commands (local)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from hpcdist.batch.schedulers import local
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import queue
from hpcdist.errors import MissingCapabilityError

SLURM: Final = "slurm"
PBS: Final = "pbs"
LOCAL: Final = "local"

# 123, 123_4, 123+1 of Slurm; 123.server, 123[4].server of PBS; local-pid-start
_ID: Final = re.compile(r"\d+(?:[_+]\d+)?|\d+(?:\[\d*\])?\.[\w.-]+|local-\d+-\d+", re.ASCII)


def is_id(text: str) -> bool:
    """Whether ``text`` may be the number of a job, or of a task of an array."""
    return _ID.fullmatch(text) is not None


def scheduler_of(job: str) -> str:
    """Return whose number ``job`` is, by its form."""
    if job.startswith(local.PREFIX):
        return LOCAL
    return PBS if "." in job or "[" in job else SLURM


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return how each of ``jobs`` is, as one state: see `parts`. Nothing is raised.

    Of several tasks or components, one that runs speaks for all, then one that waits, then one that did not end well.
    """
    return {job: _combined_state(job, found) for job, found in states_of_parts(jobs).items()}


def states_of_parts(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """Return the states of each of ``jobs``: one, or those of its tasks (123_4) or components (123+1).

    GONE is one that its scheduler does not know any more, UNKNOWN one whose scheduler does not answer; the reason says
    why.
    """
    wanted = list(dict.fromkeys(jobs))
    found: dict[str, list[JobState]] = {}
    for scheduler, look in ((SLURM, _slurm), (PBS, _pbs), (LOCAL, _local)):
        own = [job for job in wanted if scheduler_of(job) == scheduler]
        if own:
            found |= look(own)
    return {job: found[job] for job in wanted}


def accounts(jobs: Sequence[str]) -> tuple[list[JobState], str]:
    """Return the accounts of ``jobs``, a state for each start of each; and why there are none, "" where there are."""
    own = [job for job in jobs if scheduler_of(job) == SLURM]
    if not own:
        return [], f"only Slurm keeps accounts that are read here, and {', '.join(jobs)} was not its job"
    try:
        return queue.accounted(own), ""
    except MissingCapabilityError as error:
        return [], str(error)


def cancel(jobs: Sequence[str]) -> None:
    """Cancel ``jobs`` at once. Raises MissingCapabilityError where their scheduler refuses, or is not there."""
    own = [job for job in jobs if scheduler_of(job) == SLURM]
    if own:
        queue.cancel(own)
    for job in jobs:
        if scheduler_of(job) == PBS:
            from hpcdist.batch.schedulers import pbs

            pbs.cancel(job)
        elif scheduler_of(job) == LOCAL:
            local.cancel(job)


def _slurm(jobs: list[str]) -> dict[str, list[JobState]]:
    try:
        queued = queue.queued(jobs)
    except MissingCapabilityError as error:
        return {job: [JobState(id=job, state=SchedulerState.UNKNOWN, reason=str(error))] for job in jobs}
    found = {job: _states_of_job(job, queued) for job in jobs}
    missing = [job for job, own in found.items() if not own]
    if missing:
        accounted, why = accounts(missing)
        latest = list({state.id: state for state in accounted}.values())
        for job in missing:
            found[job] = _states_of_job(job, latest) or [
                JobState(id=job, state=SchedulerState.GONE, reason=_unavailable("squeue", why))
            ]
    named = queue.job_names(jobs)
    return {job: [replace(state, name=named.get(state.id, "")) for state in own] for job, own in found.items()}


def _unavailable(program: str, why: str) -> str:
    return f"{program} does not know it any more{f', and {why}' if why else ', nor sacct'}"


def _states_of_job(job: str, found: Iterable[JobState]) -> list[JobState]:
    """Return those states that are of ``job``, or of a part of it."""
    parts = (job + "_", job + "+")
    own = [state for state in found if state.id == job or state.id.startswith(parts)]
    if own or not re.search(r"[_+]", job):
        return own
    return [state for state in found if _waits_in(job, state.id)]


def _waits_in(task: str, array: str) -> bool:
    """Whether ``task`` 9_3 is one of the tasks that wait as ``array`` 9_[1-5,7%2]."""
    own, _, number = task.partition("_")
    rest = array.removeprefix(own + "_[")
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
        found = pbs.states(jobs)
    except MissingCapabilityError as error:
        return {job: [JobState(id=job, state=SchedulerState.UNKNOWN, reason=str(error))] for job in jobs}
    gone = {
        job: JobState(id=job, state=SchedulerState.GONE, reason=_unavailable("qstat", "its history is off or over"))
        for job in jobs
    }
    return {job: [found.get(job, gone[job])] for job in jobs}


def _local(jobs: list[str]) -> dict[str, list[JobState]]:
    return {job: [local.state(job)] for job in jobs}


def _combined_state(job: str, found: list[JobState]) -> JobState:
    """Return one state for all parts of a job."""
    if len(found) == 1:
        return replace(found[0], id=job)
    live = [state for state in found if not state.is_over]
    told = [state for state in live if not state.is_waiting] or live
    told = told or [state for state in found if state.state != SchedulerState.COMPLETED] or found
    nodes = [state.nodes for state in (told if live else found) if state.nodes is not None]
    return replace(told[0], id=job, nodes=sum(nodes) if nodes and "+" in told[0].id else told[0].nodes)
