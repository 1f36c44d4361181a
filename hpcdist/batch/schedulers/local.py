"""Jobs without a scheduler: background scripts that can be queried and cancelled.

A job is a folder in ``$XDG_STATE_HOME/hpcdist/local``, named by its id:

    job.json   host, boot id and log path          script     text that bash runs
    began      created when the script starts      code       exit code and end time (atomic)
    cancelled  created by the cancelling process

The id ``local-<pid>-<start>`` has the process id and start time (clock ticks since boot) of the supervising shell.
"""

import json
import math
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.batch import ledger
from hpcdist.batch.schedulers.base import JobState, SchedulerState
from hpcdist.comm.launch.environment import boot_id, process_fields
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import regular

PREFIX: Final = "local-"

_ID: Final = re.compile(PREFIX + r"(\d+)-(\d+)", re.ASCII)
# Session leader: waits for the start time and for the end of the script, and survives signals meant for the script.
_SUPERVISOR_SCRIPT: Final = r"""
IFS= read -r folder || exit 1 # nobody has said where the job is kept: it was not submitted
exec </dev/null
export HPCDIST_JOB_ID=${folder##*/}
terminated=''
trap terminated=yes TERM
trap : HUP INT USR1 USR2
exec 3>&- # whoever submits it waits for this: from now on it can be cancelled
end() {
  printf '%s %s\n' "$1" "$(date +%s)" >"$folder/code.new" && mv "$folder/code.new" "$folder/code"
  exit "$1"
}
while [[ -z $terminated ]] && left=$(($1 - $(date +%s))) && ((left > 0)); do
  sleep $((left < 10 ? left : 10)) & # a signal before `wait` would be seen only when it ends
  wait $! || kill $! 2>/dev/null
done
[[ -z $terminated ]] || end 143
: >"$folder/began"
bash "$folder/script" # in the foreground: a trap that interrupts `wait` can lose the exit code
end $?
"""


def submit(script: str, log: Path, begin: datetime | None = None) -> str:
    """Start a background job that runs the bash script text ``script``. Return the job id. Raises StorageError.

    ``log``: file to which the job's output is appended. ``begin``: start time, or None to start now.
    """
    # The job continues when this process ends. It inherits the environment, plus HPCDIST_JOB_ID.
    bash = shutil.which("bash")
    if bash is None:
        raise MissingCapabilityError("bash is not on PATH; install bash, which runs jobs if there is no scheduler")
    begin_s = 0 if begin is None else math.ceil(begin.timestamp())
    folder, job_info = _home(), {"host": socket.gethostname(), "boot": boot_id(), "log": os.path.abspath(log)}
    try:
        with open(log, "ab") as file:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
            (new / "script").write_bytes(os.fsencode(script))
            (new / "job.json").write_text(json.dumps({**job_info, "begin_s": begin_s}))
            return _start([bash, "-c", _SUPERVISOR_SCRIPT, "hpcdist", str(begin_s)], new, file.fileno())
    except OSError as error:
        raise StorageError(
            f"the job was not started: {error}; make the log {log} and the job folder in {folder} writable, or set "
            "XDG_STATE_HOME to move the job folder"
        ) from error


def _start(line: list[str], new: Path, log_fd: int) -> str:
    name_reader, name_writer = os.pipe()  # the shell's final folder name, which contains its process id
    ready_reader, ready_writer = os.pipe()  # the shell closes it when the job can be cancelled
    try:
        ends = ((name_reader, 0), (log_fd, 1), (log_fd, 2), (ready_writer, 3))
        try:
            pid = os.posix_spawn(
                line[0],
                line,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in ends],
                setsid=True,  # independent of the terminal
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by Python
            )
        finally:
            os.close(ready_writer)
        job = f"{PREFIX}{pid}-{_stat(pid)[1]}"  # a child stays in /proc until it is waited for
        new.rename(_home() / job)
        os.write(name_writer, os.fsencode(f"{_home() / job}\n"))
        os.read(ready_reader, 1)
    finally:
        for fd in (name_reader, name_writer, ready_reader):
            os.close(fd)
    return job


def state(job: str) -> JobState:
    """Return the state of the local job with the id ``job``, which runs on this machine without a scheduler."""
    # UNKNOWN: the job is on another machine or does not exist. NODE_FAIL: the machine was rebooted. FAILED without an
    # exit code: the supervising shell was killed.
    alive = _alive(job)  # before reading the code: the job may end in between
    record = _job_record(job)
    if record is None:
        return JobState(id=job, state=SchedulerState.UNKNOWN, reason=f"{_home()} has no such job")
    started, (code, ended) = _modified_utc(_home() / job / "began"), _code(job)
    until = ended or (datetime.now(UTC) if alive else None)
    word, reason = _state_of(job, record, alive, started is not None, code)
    return JobState(
        id=job,
        state=word,
        reason=reason,
        elapsed_s=None if started is None or until is None else max(0.0, (until - started).total_seconds()),
        exit_code=code,
        energy_reason="not measured without a scheduler",
        begun_utc=_text(started),
        ended_utc=_text(ended),
        log=str(record.get("log", "")),
    )


def _state_of(
    job: str, record: Mapping[str, Any], alive: bool, begun: bool, code: int | None
) -> tuple[SchedulerState, str]:
    host = str(record.get("host", ""))
    if code == 0:
        return SchedulerState.COMPLETED, ""
    if code is not None:
        return (SchedulerState.CANCELLED if (_home() / job / "cancelled").exists() else SchedulerState.FAILED), ""
    if record.get("boot") != boot_id():
        if host != socket.gethostname():
            return SchedulerState.UNKNOWN, f"it runs, or ran, on {host}: query it there"
        return SchedulerState.NODE_FAIL, "this machine was rebooted before the job had ended"
    if not alive:
        return SchedulerState.FAILED, "it was killed before it could write its exit code"
    if not begun:
        begin_s = record.get("begin_s") or 0  # 0: starts at once
        return SchedulerState.PENDING, f"begins at {_text(datetime.fromtimestamp(begin_s, UTC))}" if begin_s else ""
    return SchedulerState.RUNNING, ""


def cancel(job: str) -> bool:
    """Send SIGTERM to all processes of the local job ``job``. Return False if the job has already ended."""
    record = _job_record(job)
    if record is None:
        raise UsageError(f"there is no job {job!r} in {_home()}; run `hpcdist jobs status` to list the jobs")
    is_foreign = record.get("boot") != boot_id()  # of another machine, or before a reboot of this machine
    if is_foreign and record.get("host") != socket.gethostname():
        raise MissingCapabilityError(f"job {job} was started on {record.get('host')}; cancel the job on that machine")
    if is_foreign or not _alive(job) or _code(job)[0] is not None:
        return False
    (_home() / job / "cancelled").touch()
    try:
        os.killpg(_pid_and_start(job)[0], signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def _home() -> Path:
    return ledger.registry().parent / "local"


def _pid_and_start(job: str) -> tuple[int, int]:
    match = _ID.fullmatch(job)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _stat(pid: int) -> tuple[str, int]:
    try:
        fields = process_fields(pid)
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def _alive(job: str) -> bool:
    pid, start = _pid_and_start(job)
    letter, started = _stat(pid)
    return started == start and letter not in "ZX"  # Z: ended, but not yet waited for


def _job_record(job: str) -> dict[str, Any] | None:
    if not _ID.fullmatch(job):
        return None
    try:
        value = regular.json_value(_home() / job / "job.json")
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _code(job: str) -> tuple[int | None, datetime | None]:
    try:
        code, ended_s = (int(word) for word in regular.text(_home() / job / "code", 64).split())
    except (OSError, ValueError):
        return None, None
    return code, datetime.fromtimestamp(ended_s, UTC)


def _modified_utc(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return None


def _text(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat(timespec="seconds")
