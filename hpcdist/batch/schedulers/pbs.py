"""PBS Pro and OpenPBS: submit, cancel and query jobs by qsub, qdel and qstat.

Written from the OpenPBS sources, and tested with mock commands only.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.batch.schedulers import base
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.errors import ConfigurationError, MissingCapabilityError

# job_state of qstat. The states F (finished) and X (finished array task) are mapped by their exit status.
_STATES: Final = {
    "Q": SchedulerState.PENDING,
    "W": SchedulerState.PENDING,  # waits for its start time
    "T": SchedulerState.PENDING,  # moves to another server
    "H": SchedulerState.PENDING,  # held
    "R": SchedulerState.RUNNING,
    "B": SchedulerState.RUNNING,  # array with a started task
    "S": SchedulerState.SUSPENDED,
    "U": SchedulerState.SUSPENDED,  # the workstation's owner is active
    "E": SchedulerState.COMPLETING,
}
# Exit_status of jobs that PBS ended because they exceeded a limit.
_LIMITS: Final = {
    -24: "used more cores than requested",
    -25: "used more cores than requested",
    -26: "used more memory than requested",
    -27: "used more memory than requested",
    -28: "used more CPU time than requested",
    -29: "exceeded its walltime",
}
_ENDED_BY: Final = {-26: SchedulerState.OUT_OF_MEMORY, -27: SchedulerState.OUT_OF_MEMORY, -29: SchedulerState.TIMEOUT}
_SIGNALLED: Final = 256  # exit status minus signal number, if a signal ended the job
_DELETED: Final = 91  # substate
_CLOCK: Final = re.compile(r"(\d+):([0-5]?\d):([0-5]?\d)", re.ASCII)
_MISSING_COMMAND: Final = (
    "{} is not on PATH; submit from a login node of the cluster (PBS may need a module), or print the "
    "script with --dry-run and submit it there"
)
# Errors of PBS commands that do not reach the server.
_UNREACHABLE: Final = (
    *("cannot connect to server", "connection refused", "no route to host", "communication failure"),
    "munge",
)
_HINT: Final = "is PBS up? try qstat -B"


def submit(script: str, after: str | None = None) -> str:
    """Submit the script text ``script`` and return the job id. ``after``: id of a job that must end first, or None."""
    dependency = [] if after is None else ["-W", f"depend=afterany:{after}"]
    answer = _output_of("qsub", *dependency, script=script)
    if answer.code != 0:
        raise ConfigurationError(
            f"PBS refused the job (qsub, exit code {answer.code}): {answer.complaint}; change the option that PBS "
            "names, or see `qstat -Q` for queues and their limits"
        )
    return answer.output.strip()


def cancel(job: str) -> None:
    """End ``job`` with qdel, which sends SIGTERM and later SIGKILL. Raises MissingCapabilityError if qdel fails."""
    answer = _output_of("qdel", job)
    if answer.code != 0 and "job has finished" not in answer.complaint.lower():
        raise MissingCapabilityError(
            f"qdel {job} failed, exit code {answer.code}: {answer.complaint}; see `qstat {job}`"
        )


def states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return {job id: `JobState`} for the ids ``jobs`` that PBS knows. Raises MissingCapabilityError if qstat fails."""
    numbers = list(jobs)
    answer = _output_of("qstat", "-x", "-f", "-F", "json", *numbers)
    if answer.code != 0 and "job history" in answer.complaint.lower():  # history is off: ask without -x
        answer = _output_of("qstat", "-f", "-F", "json", *numbers)
    if not answer.output.strip():
        if answer.code == 0 or "unknown job id" in answer.complaint.lower():
            return {}
        raise MissingCapabilityError(f"qstat failed, exit code {answer.code}: {answer.complaint}; {_HINT}")
    try:
        records = json.loads(answer.output, strict=False).get("Jobs", {})
        return {job: _state(job, records[job]) for job in numbers if job in records}
    except (ValueError, AttributeError, TypeError) as error:
        raise MissingCapabilityError(
            f"unexpected output of qstat -F json ({error}); hpcdist needs PBS Pro 18, OpenPBS 19, or later"
        ) from error


def _output_of(program: str, *options: str, script: str = "") -> base.CommandResult:
    answer = base.run_command([program, *options], _MISSING_COMMAND.format(program), _HINT, script)
    if answer.code != 0 and any(words in answer.complaint.lower() for words in _UNREACHABLE):
        raise MissingCapabilityError(f"PBS does not answer: {answer.complaint}; {_HINT}, and submit from a login node")
    return answer


def _state(job: str, record: Mapping[str, Any]) -> JobState:
    used, requested = record.get("resources_used", {}), record.get("Resource_List", {})
    letter, status = str(record.get("job_state", "")), _whole(record.get("Exit_status"))
    over = letter in ("F", "X")
    state, code, reason = _ended(status, record) if over else (_STATES.get(letter, letter), None, "")
    elapsed_s, limit_s = _seconds(used.get("walltime")), _seconds(requested.get("walltime"))
    runs = _whole(record.get("run_count"))
    return JobState(
        id=job,
        state=state,
        name=str(record.get("Job_Name", "")),
        reason=reason or str(record.get("comment", "")),
        restarts=None if runs is None else max(0, runs - 1),
        elapsed_s=elapsed_s,
        time_left_s=None if over or limit_s is None or elapsed_s is None else max(0.0, limit_s - elapsed_s),
        nodes=_whole(requested.get("nodect")),
        exit_code=code,
        energy_reason="PBS has no energy counter that hpcdist reads",
        begun_utc=_utc(record.get("stime")),
        ended_utc=(_utc(record.get("obittime")) or _utc(record.get("mtime"))) if over else "",
        log=_log(job, record),
    )


def _log(job: str, record: Mapping[str, Any]) -> str:
    variables = record.get("Variable_List", {})
    folder = variables.get("PBS_O_WORKDIR", "") if isinstance(variables, dict) else ""
    path = Path(str(folder)) / f"hpcdist-{job}.out"
    return str(path) if folder and path.exists() else ""


def _ended(status: int | None, record: Mapping[str, Any]) -> tuple[SchedulerState, int | None, str]:
    code = status
    if status is not None and status >= _SIGNALLED:
        code = 128 + status - _SIGNALLED
    if status is not None and status < 0:
        reason = _LIMITS.get(status, "PBS could not start it, or ended it")
        return _ENDED_BY.get(status, SchedulerState.FAILED), None, f"{reason} (PBS exit status {status})"
    if _whole(record.get("substate")) == _DELETED:
        return SchedulerState.CANCELLED, code, ""
    return (SchedulerState.COMPLETED if status == 0 else SchedulerState.FAILED), code, ""


def _whole(value: object) -> int | None:
    try:
        return int(str(value))
    except ValueError:
        return None


def _seconds(value: object) -> float | None:
    clock = _CLOCK.fullmatch(str(value))
    if clock is None:
        seconds = _whole(value)
        return None if seconds is None else float(seconds)
    return float((int(clock[1]) * 60 + int(clock[2])) * 60 + int(clock[3]))


def _utc(value: object) -> str:
    try:
        local = datetime.strptime(str(value), "%a %b %d %H:%M:%S %Y")
    except ValueError:
        return ""
    return local.astimezone(UTC).isoformat(timespec="seconds")
