"""Query and cancel Slurm jobs by squeue, sacct and scancel.

squeue knows waiting and running jobs, and jobs that ended within MinJobAge (default 300 s). sacct knows older jobs and
energy, if accounting is on.
"""

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from hpcdist.batch.schedulers import base
from hpcdist.batch.schedulers.base import FINAL_STATES, JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import energy as slurm_energy
from hpcdist.errors import MissingCapabilityError

LIMIT_S: Final = 60.0  # a busy controller responds slowly

# Fields of squeue. Only the last field may contain the separator "|".
_QUEUE: Final = (
    *("JobArrayID", "State", "RestartCnt", "TimeUsed", "TimeLeft", "NumNodes", "exit_code", "StartTime", "EndTime"),
    "Reason",
)
# Fields of sacct for jobs and steps. Only the last field may contain "|".
_ACCOUNTS: Final = (
    *("JobID", "State", "ElapsedRaw", "NNodes", "ExitCode", "Start", "End", "ConsumedEnergyRaw", "NodeList"),
    *("TRESUsageInMin", "TRESUsageInMinNode", "TRESUsageInMax", "TRESUsageInMaxNode", "Reason"),
)
_CLOCK: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)
_NAMED: Final = re.compile(r"(\d+(?:[_+][\d\[\],%.-]+)?)\|(.*)", re.ASCII)
_ENERGY: Final = re.compile(r"(?:^|,)energy=([^,]*)", re.ASCII)


def queued(jobs: Sequence[str]) -> list[JobState]:
    """Return the states of ``jobs`` from squeue, one per job, array task or component of a heterogeneous job.

    Jobs that squeue does not know are left out. Raises MissingCapabilityError if squeue does not answer.
    """
    fields = ",".join(f"{name}:|" for name in _QUEUE)
    code, output, complaint = _run(
        "squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--Format={fields}"
    )
    if code:
        if "invalid job id" in complaint.lower():
            return []
        raise MissingCapabilityError(
            f"squeue does not answer: {complaint or f'exit code {code}'}; run sinfo to see if Slurm is up"
        )
    rows = [line.split("|", len(_QUEUE) - 1) for line in output.splitlines()]
    return [_queued(row) for row in rows if len(row) == len(_QUEUE)]


def _queued(row: list[str]) -> JobState:
    job, state, restarts, used, left, nodes, code, start, end, reason = row
    ended = state in FINAL_STATES
    waits = state == SchedulerState.PENDING
    return JobState(
        id=job,
        state=state,
        reason=_reason(reason.removesuffix("|")),
        restarts=_whole(restarts),
        elapsed_s=_seconds(used),
        time_left_s=None if ended else _seconds(left),
        nodes=_whole(nodes),
        exit_code=_exit_code(code, state),
        energy_reason=slurm_energy.NOT_YET,
        begun_utc="" if waits else _utc(start),
        ended_utc=_utc(end) if ended else "",
    )


def accounted(jobs: Sequence[str]) -> list[JobState]:
    """Return the states of ``jobs`` from sacct, one per execution. Raises MissingCapabilityError if sacct fails."""
    options = ["--noheader", "--parsable2", "--duplicates"]
    code, output, complaint = _run("sacct", *options, f"--jobs={','.join(jobs)}", f"--format={','.join(_ACCOUNTS)}")
    if code:
        raise MissingCapabilityError(f"sacct has no accounting data: {complaint or f'exit code {code}'}")
    starts: list[tuple[list[str], list[list[str]]]] = []  # rows of a start and of its steps, which follow it
    # A row without ".step" begins a start; a requeued job has several starts with the same id.
    for row in (line.split("|", len(_ACCOUNTS) - 1) for line in output.splitlines()):
        job, step, _ = row[0].partition(".")
        if len(row) != len(_ACCOUNTS):
            continue
        if not step:
            starts.append((row, []))
        elif starts and starts[-1][0][0] == job:  # otherwise a step of a start that sacct has not printed
            starts[-1][1].append(row)
    start_counts: dict[str, int] = {}
    states = []
    for row, steps in starts:
        start_counts[row[0]] = start_counts.get(row[0], -1) + 1
        states.append(_accounted(row, start_counts[row[0]], steps))
    return states


def _accounted(row: list[str], restarts: int, steps: Sequence[list[str]] = ()) -> JobState:
    job, words, elapsed, nodes, code, start, end, *_, reason = row
    state = words.partition(" ")[0]  # CANCELLED by 1000
    joules = slurm_energy.AccountedEnergy(None, slurm_energy.NOT_YET)
    if _utc(end):
        joules = slurm_energy.of_start(_accounted_step(row), [_accounted_step(step) for step in steps])
    return JobState(
        id=job,
        state=state,
        reason=_reason(reason),
        restarts=restarts,
        elapsed_s=_whole(elapsed),
        nodes=_whole(nodes),
        exit_code=_exit_code(code, state),
        energy_j=joules.known,
        energy_reason=joules.lacking,
        begun_utc=_utc(start),
        ended_utc=_utc(end),
    )


def _accounted_step(row: list[str]) -> slurm_energy.AccountedStep:
    named, words, _, _, _, start, end, energy, where, least, least_node, most, most_node, _ = row
    # Slurm keeps the minimum and maximum over the nodes of a step: complete for one or two nodes.
    of_nodes: dict[str, float] = {}
    for values, places in ((least, least_node), (most, most_node)):
        value, node = _ENERGY.search(values), _ENERGY.search(places)
        if value and node and value[1].isdecimal():
            of_nodes[node[1]] = float(value[1])
    return slurm_energy.AccountedStep(
        name=named.partition(".")[2],
        state=words.partition(" ")[0],
        begin=_whole(start) or 0,
        end=_whole(end) or 0,
        nodes=slurm_energy.expand_hostlist(where),
        joules=slurm_energy.joules(energy),
        of_nodes=of_nodes,
    )


def job_names(jobs: Sequence[str] | None = None) -> dict[str, str]:
    """Return a dict from job id to job name, or {} without Slurm. ``jobs`` None means all jobs of this user."""
    selection = "--me" if jobs is None else f"--jobs={','.join(jobs)}"
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", selection, "--Format=JobArrayID:|,Name:|")
    except MissingCapabilityError:
        return {}
    # A name may contain newlines that look like a row: the first row of each id is the real row.
    names: dict[str, str] = {}
    for line in output.removesuffix("\n").split("\n") if not code else ():
        match = _NAMED.fullmatch(line)
        if match and match[1] not in names:
            names[match[1]] = match[2].removesuffix("|")
    return names


def log_of(job: str) -> str:
    """Return the log path of ``job`` from squeue, or "" if unknown."""
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=STDOUT:|")
    except MissingCapabilityError:
        return ""
    return "" if code else output.removesuffix("\n").partition("|\n")[0].removesuffix("|")


def cancel(jobs: Iterable[str]) -> None:
    """Cancel unfinished jobs. ``jobs``: ids of jobs or array tasks. Raises MissingCapabilityError on failure."""
    code, _, complaint = _run("scancel", *jobs)
    if code and "already completing or completed" not in complaint.lower():
        raise MissingCapabilityError(f"scancel failed: {complaint or f'exit code {code}'}; try again")


def forbid_requeue(job: str) -> str:
    """Prevent Slurm from requeueing ``job``. Return the error message, or "" on success."""
    try:
        code, _, why = _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    except MissingCapabilityError as error:
        return str(error)
    return (why or f"exit code {code}") if code else ""


def _run(name: str, *arguments: str) -> tuple[int, str, str]:
    # User defaults for these commands must not change the output. Times are in seconds since 1970, and waiting array
    # tasks are listed in full.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SACCT_", "SCANCEL_"))
    }
    settings = environment | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    absent = f"{name} is not on PATH; run this on a login node of the cluster"
    answer = base.run_command(
        [name, *arguments], absent, "is Slurm up? try sinfo", limit_s=LIMIT_S, environment=settings
    )
    return answer.code, answer.output, " ".join(answer.complaint.split())


def _exit_code(text: str, state: str) -> int | None:
    if state not in FINAL_STATES:
        return None
    parts = [_whole(part) for part in text.split(":")]
    if None in parts or len(parts) > 2:
        return None
    # sacct prints code:signal; squeue prints the status of wait(2), whose low byte is the signal.
    code, signal = (parts[0] or 0, parts[1] or 0) if len(parts) == 2 else divmod(parts[0] or 0, 256)
    shell_code = 128 + (signal & 127) if signal & 127 else code
    return (
        shell_code if shell_code or state == SchedulerState.COMPLETED else None
    )  # e.g. a cancelled job has no exit code


def _seconds(text: str) -> float | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _utc(text: str) -> str:
    number = _whole(text)
    return "" if not number else datetime.fromtimestamp(number, UTC).isoformat(timespec="seconds")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _reason(text: str) -> str:
    return "" if text in ("None", "NONE", "(null)") else text
