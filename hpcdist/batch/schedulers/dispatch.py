"""Query and cancel jobs of any scheduler, which is known by the form of a job's id. Runs its commands alone (local)."""

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
    """Return how each of ``jobs`` is, as one state: see `states_of_parts`. Nothing is raised.

    Of several tasks or components, one that runs speaks for all, then one that waits, then one that did not end well.
    """
    return {job: _combined_state(job, parts) for job, parts in states_of_parts(jobs).items()}


def states_of_parts(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """Return the states of each of ``jobs``: one, or those of its tasks (123_4) or components (123+1).

    GONE is one that its scheduler does not know any more, UNKNOWN one whose scheduler does not answer; the reason says
    why.
    """
    numbers = list(dict.fromkeys(jobs))
    states_of: dict[str, list[JobState]] = {}
    for scheduler, look in ((SLURM, _slurm), (PBS, _pbs), (LOCAL, _local)):
        own = [job for job in numbers if scheduler_of(job) == scheduler]
        if own:
            states_of |= look(own)
    return {job: states_of[job] for job in numbers}


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
    states_of = {job: _states_of_job(job, queued) for job in jobs}
    missing = [job for job, own in states_of.items() if not own]
    if missing:
        accounted, why = accounts(missing)
        latest = list({state.id: state for state in accounted}.values())  # sacct has a row for each start, in order
        for job in missing:
            states_of[job] = _states_of_job(job, latest) or [
                JobState(id=job, state=SchedulerState.GONE, reason=_unavailable("squeue", why))
            ]
    named = queue.job_names(jobs)
    return {job: [replace(state, name=named.get(state.id, "")) for state in own] for job, own in states_of.items()}


def _unavailable(program: str, why: str) -> str:
    return f"{program} does not know it any more{f', and {why}' if why else ', nor sacct'}"


def _states_of_job(job: str, states: Iterable[JobState]) -> list[JobState]:
    """Return those states that are of ``job``, or of a part of it."""
    parts = (job + "_", job + "+")
    own = [state for state in states if state.id == job or state.id.startswith(parts)]
    if own or not re.search(r"[_+]", job):
        return own
    return [state for state in states if _waits_in(job, state.id)]


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
        states_of = pbs.states(jobs)
    except MissingCapabilityError as error:
        return {job: [JobState(id=job, state=SchedulerState.UNKNOWN, reason=str(error))] for job in jobs}
    why = _unavailable("qstat", "its history is off or over")
    return {job: [states_of.get(job) or JobState(id=job, state=SchedulerState.GONE, reason=why)] for job in jobs}


def _local(jobs: list[str]) -> dict[str, list[JobState]]:
    return {job: [local.state(job)] for job in jobs}


def _combined_state(job: str, parts: list[JobState]) -> JobState:
    """Return one state for all parts of a job."""
    if len(parts) == 1:
        return replace(parts[0], id=job)
    live = [state for state in parts if not state.is_over]
    speaking = [state for state in live if not state.is_waiting] or live
    speaking = speaking or [state for state in parts if state.state != SchedulerState.COMPLETED] or parts
    nodes = [state.nodes for state in (speaking if live else parts) if state.nodes is not None]
    return replace(speaking[0], id=job, nodes=sum(nodes) if nodes and "+" in speaking[0].id else speaking[0].nodes)
