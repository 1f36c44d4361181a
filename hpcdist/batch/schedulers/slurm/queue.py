"""Query and cancel jobs of Slurm by squeue, sacct and scancel, in explicit formats.

squeue has what waits and runs, and what ended within MinJobAge (300 s by default). sacct has what ended before, and
joules, where accounting is on. The name of a job may hold any character, newlines too, so it is queried by itself: no
name can pretend to be the state of another job. Written for Slurm 22.05, whose --json is not yet that of later
ones.
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

LIMIT_S: Final = 60.0  # a busy controller answers late

# Fields of squeue. None of these can hold the separator "|" but the last, which takes what is left of the row.
_QUEUE: Final = (
    *("JobArrayID", "State", "RestartCnt", "TimeUsed", "TimeLeft", "NumNodes", "exit_code", "StartTime", "EndTime"),
    "Reason",
)
# Fields of sacct, of jobs and steps; the last may hold "|", too.
_ACCOUNTS: Final = (
    *("JobID", "State", "ElapsedRaw", "NNodes", "ExitCode", "Start", "End", "ConsumedEnergyRaw", "NodeList"),
    *("TRESUsageInMin", "TRESUsageInMinNode", "TRESUsageInMax", "TRESUsageInMaxNode", "Reason"),
)
_CLOCK: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)
_NAMED: Final = re.compile(r"(\d+(?:[_+][\d\[\],%.-]+)?)\|(.*)", re.ASCII)
_ENERGY: Final = re.compile(r"(?:^|,)energy=([^,]*)", re.ASCII)


def queued(jobs: Sequence[str]) -> list[JobState]:
    """Return what squeue has of ``jobs``: a state for each, and for each task or component of those that have some.

    Raises MissingCapabilityError where there is no Slurm, or none that answers.
    """
    fields = ",".join(f"{name}:|" for name in _QUEUE)
    code, output, complaint = _run(
        "squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", f"--Format={fields}"
    )
    if code:
        if "invalid job id" in complaint.lower():
            return []
        raise MissingCapabilityError(
            f"squeue does not answer: {complaint or f'exit code {code}'}; is Slurm up? try sinfo"
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
    """Return what sacct has of ``jobs``: a state for each start of each, in order; ``restarts`` counts them.

    It prints a row for each start, and then one for each step of it, "116.batch".
    Raises MissingCapabilityError where accounting is off.
    """
    options = ["--noheader", "--parsable2", "--duplicates"]
    code, output, complaint = _run("sacct", *options, f"--jobs={','.join(jobs)}", f"--format={','.join(_ACCOUNTS)}")
    if code:
        raise MissingCapabilityError(f"sacct has no accounts: {complaint or f'exit code {code}'}")
    starts: list[tuple[list[str], list[list[str]]]] = []  # the row of a start, and those of its steps, which follow it
    # A start has no number of its own in sacct: a row without ".step" begins one, also of a requeued job of that id.
    for row in (line.split("|", len(_ACCOUNTS) - 1) for line in output.splitlines()):
        job, step, _ = row[0].partition(".")
        if len(row) != len(_ACCOUNTS):
            continue
        if not step:
            starts.append((row, []))
        elif starts and starts[-1][0][0] == job:  # else of a start that sacct has not printed
            starts[-1][1].append(row)
    seen: dict[str, int] = {}
    states = []
    for row, steps in starts:
        seen[row[0]] = seen.get(row[0], -1) + 1
        states.append(_accounted(row, seen[row[0]], steps))
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
    """Return what a row of sacct has of a job or a step."""
    named, words, _, _, _, start, end, energy, where, least, least_node, most, most_node, _ = row
    # Slurm keeps of all nodes of a step those with the least and the most joules: of one or two nodes that is all.
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
    """Return the names of ``jobs``, None: of all jobs of this user, as far as squeue has them; {} without Slurm."""
    of = "--me" if jobs is None else f"--jobs={','.join(jobs)}"
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", of, "--Format=JobArrayID:|,Name:|")
    except MissingCapabilityError:
        return {}
    # A name may hold newlines, and what follows one may look like a row: of each id the first row counts.
    names: dict[str, str] = {}
    for line in output.removesuffix("\n").split("\n") if not code else ():
        match = _NAMED.fullmatch(line)
        if match and match[1] not in names:
            names[match[1]] = match[2].removesuffix("|")
    return names


def log_of(job: str) -> str:
    """Return where the output of ``job`` goes, "" where squeue does not know."""
    try:
        code, output, _ = _run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=STDOUT:|")
    except MissingCapabilityError:
        return ""
    return "" if code else output.removesuffix("\n").partition("|\n")[0].removesuffix("|")


def cancel(jobs: Iterable[str]) -> None:
    """Cancel ``jobs``, or tasks of arrays: at once. Raises MissingCapabilityError where Slurm refuses or is not there.

    One that is over is no error.
    """
    code, _, why = _run("scancel", *jobs)
    if code and "already completing or completed" not in why.lower():
        raise MissingCapabilityError(f"scancel: {why or f'exit code {code}'}")


def forbid_requeue(job: str) -> str:
    """Let Slurm not start ``job`` again, whatever happens; return why it does not obey, "" where it does."""
    try:
        code, _, why = _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    except MissingCapabilityError as error:
        return str(error)
    return (why or f"exit code {code}") if code else ""


def _run(name: str, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code of a command of Slurm, what it printed, and its errors. Raises MissingCapabilityError."""
    # A user's defaults for these commands would change what is read here. Times are in seconds since 1970, and the
    # tasks of an array that wait are listed in full.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SACCT_", "SCANCEL_"))
    }
    settings = environment | {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    absent = f"there is no {name} on PATH; ask on a login node of the cluster"
    answer = base.run_command(
        [name, *arguments], absent, "is Slurm up? try sinfo", limit_s=LIMIT_S, environment=settings
    )
    return answer.code, answer.output, " ".join(answer.complaint.split())


def _exit_code(text: str, state: str) -> int | None:
    """Return the exit code as a shell has it, of code:signal or a raw wait status; None while there is none."""
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
    )  # cancelled, and such: no code is its own


def _seconds(text: str) -> float | None:
    """Return the seconds of [days-][hours:]minutes:seconds; None for UNLIMITED, INVALID and the like."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _utc(text: str) -> str:
    """Return seconds since 1970 as a date; "" for Unknown, None and N/A."""
    number = _whole(text)
    return "" if not number else datetime.fromtimestamp(number, UTC).isoformat(timespec="seconds")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _reason(text: str) -> str:
    return "" if text in ("None", "NONE", "(null)") else text
