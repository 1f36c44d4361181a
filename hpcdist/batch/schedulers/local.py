"""Jobs without a scheduler, for a workstation: a script that runs on by itself and can be queried and cancelled.

A job is a folder in ``$XDG_STATE_HOME/hpcdist/local``, named by its id:

    job.json   where it runs and where its log is     script     what bash runs
    began      is made when the script starts         code       its exit code and when it ended (atomic)
    cancelled  is made by the process that cancels it

The id, ``local-<pid>-<start>``, has the process id of its supervising shell and when that started, in ticks since the
machine was booted: another process may get the same number one day, but not the same start.
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
# Leads the session of the job, waits for its time and for its end, and outlives the signals that are meant for it.
_SUPERVISOR_SCRIPT: Final = r"""
IFS= read -r folder || exit 1 # nobody has said where the job is kept: it was not submitted
exec </dev/null
export HPCDIST_JOB_ID=${folder##*/}
terminated='' signalled=''
trap 'signalled=yes terminated=yes' TERM
trap 'signalled=yes' HUP INT USR1 USR2
exec 3>&- # whoever submits it waits for this: from now on it can be cancelled
end() {
  printf '%s %s\n' "$1" "$(date +%s)" >"$folder/code.new" && mv "$folder/code.new" "$folder/code"
  exit "$1"
}
attend() {
  while true; do
    signalled='' code=0
    wait "$1" || code=$?
    [[ -n $signalled ]] || break
  done
}
while [[ -z $terminated ]] && left=$(($1 - $(date +%s))) && ((left > 0)); do
  sleep $((left < 10 ? left : 10)) & # a signal before `wait` would be seen only when it ends
  wait $! || kill $! 2>/dev/null
done
[[ -z $terminated ]] || end 143
: >"$folder/began"
bash "$folder/script" &
attend $!
end "$code"
"""


def submit(script: str, log: Path, begin: datetime | None = None) -> str:
    """Start ``script`` with bash and return the id of the job, which goes on when this process and its terminal end.

    It runs in this directory with this environment, and HPCDIST_JOB_ID, its id. What it prints is appended to ``log``.
    It waits for ``begin`` (aware) where that is not None. Raises StorageError and MissingCapabilityError.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise MissingCapabilityError("there is no bash on PATH, which runs the jobs of a machine without a scheduler")
    begin_s = 0 if begin is None else math.ceil(begin.timestamp())
    folder, place = _home(), {"host": socket.gethostname(), "boot": boot_id(), "log": os.path.abspath(log)}
    try:
        with open(log, "ab") as file:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
            (new / "script").write_bytes(os.fsencode(script))
            (new / "job.json").write_text(json.dumps({**place, "begin_s": begin_s}))
            return _start([bash, "-c", _SUPERVISOR_SCRIPT, "hpcdist", str(begin_s)], new, file.fileno())
    except OSError as error:
        raise StorageError(
            f"the job was not started: {error}; its log {log} and {folder}, where it is kept, must be writable, and "
            "XDG_STATE_HOME names another place for the latter"
        ) from error


def _start(line: list[str], new: Path, log_fd: int) -> str:
    """Start the supervising shell of the job in ``new``, and tell it the folder of its id, to which ``new`` moves.

    The id has the process id of that shell, so the shell runs before its folder has a name: it reads the name from a
    pipe, and closes another one when it has set its traps. From then on the job can be cancelled.
    """
    listens, tells = os.pipe()
    waits, ready = os.pipe()
    try:
        ends = ((listens, 0), (log_fd, 1), (log_fd, 2), (ready, 3))
        try:
            pid = os.posix_spawn(
                line[0],
                line,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, source, to) for source, to in ends],
                setsid=True,  # of no terminal, whose end would end it
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
            )
        finally:
            os.close(ready)
        job = f"{PREFIX}{pid}-{_stat(pid)[1]}"  # it is our child: even if it has ended, it is in /proc until we wait
        new.rename(_home() / job)
        os.write(tells, os.fsencode(f"{_home() / job}\n"))
        os.read(waits, 1)
    finally:
        for fd in (listens, tells, waits):
            os.close(fd)
    return job


def state(job: str) -> JobState:
    """Return how ``job`` is: PENDING up to its begin, RUNNING, COMPLETED, FAILED or CANCELLED with its exit code.

    FAILED without an exit code is one whose supervising shell was killed, NODE_FAIL one that a reboot has ended, and
    UNKNOWN one of another machine, or that nothing is known of; the reason says so.
    """
    alive = _alive(job)  # first: it may end right after this, and its code is there then
    record = _job_record(job)
    if record is None:
        return JobState(id=job, state=SchedulerState.UNKNOWN, reason=f"{_home()} has no such job")
    begun, (code, ended) = _modified_utc(_home() / job / "began"), _code(job)
    until = ended or (datetime.now(UTC) if alive else None)
    word, reason = _state_of(job, record, alive, begun is not None, code)
    return JobState(
        id=job,
        state=word,
        reason=reason,
        elapsed_s=None if begun is None or until is None else max(0.0, (until - begun).total_seconds()),
        exit_code=code,
        energy_reason="no scheduler measures it",
        begun_utc=_text(begun),
        ended_utc=_text(ended),
        log=str(record.get("log", "")),
    )


def _state_of(
    job: str, record: Mapping[str, Any], alive: bool, begun: bool, code: int | None
) -> tuple[SchedulerState, str]:
    """Return the state, and the reason where it needs one."""
    host = str(record.get("host", ""))
    if code == 0:
        return SchedulerState.COMPLETED, ""
    if code is not None:
        return (SchedulerState.CANCELLED if (_home() / job / "cancelled").exists() else SchedulerState.FAILED), ""
    if record.get("boot") != boot_id():
        if host != socket.gethostname():
            return SchedulerState.UNKNOWN, f"it runs, or ran, on {host}: ask there"
        return SchedulerState.NODE_FAIL, "this machine was started again before the job had ended"
    if not alive:
        return SchedulerState.FAILED, "it was killed before it could say its exit code"
    if not begun:
        begin_s = record.get("begin_s") or 0  # 0: at once, and its script has not come so far
        return SchedulerState.PENDING, f"begins at {_text(datetime.fromtimestamp(begin_s, UTC))}" if begin_s else ""
    return SchedulerState.RUNNING, ""


def cancel(job: str) -> bool:
    """Send SIGTERM to all processes of ``job``, so that it saves and ends; returns whether it was there to get it.

    Raises UsageError for what is no such job, and MissingCapabilityError for one of another machine.
    """
    record = _job_record(job)
    if record is None:
        raise UsageError(f"{_home()} has no job {job!r}; see `hpcdist jobs status`")
    before = record.get("boot") != boot_id()  # of another machine, or of an earlier start of this one
    if before and record.get("host") != socket.gethostname():
        raise MissingCapabilityError(f"{job} runs, or ran, on {record.get('host')}: cancel it there")
    if before or not _alive(job) or _code(job)[0] is not None:
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
    """Return the process id and the start of ``job``; it is no id of a job where they are 0."""
    match = _ID.fullmatch(job)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of process ``pid`` and when it started, in ticks since the boot; "X", 0 where there is none."""
    try:
        fields = process_fields(pid)
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def _alive(job: str) -> bool:
    pid, start = _pid_and_start(job)
    letter, started = _stat(pid)
    return started == start and letter not in "ZX"  # Z: it has ended, and its parent has not asked how


def _job_record(job: str) -> dict[str, Any] | None:
    """Return what is kept of ``job``, None where nothing is."""
    if not _ID.fullmatch(job):
        return None
    try:
        value = regular.json_value(_home() / job / "job.json")
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _code(job: str) -> tuple[int | None, datetime | None]:
    """Return the exit code of ``job`` and when it ended, None where it has not."""
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
