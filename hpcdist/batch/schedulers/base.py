"""Job states with common names for all schedulers, and the execution of scheduler commands."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from hpcdist.errors import MissingCapabilityError


class SchedulerState(StrEnum):
    """Job states that several schedulers use. Other states of a scheduler are stored as plain strings."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"  # nodes are booting
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"  # processes have ended, nodes are being cleaned up
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"  # requeued and held because of its exit code
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    REVOKED = "REVOKED"  # started by another cluster of the federation
    GONE = "GONE"  # not known to the scheduler: it ended long ago, or never existed
    UNKNOWN = "UNKNOWN"  # no scheduler answers


WAITING_STATES: Final = frozenset(
    {SchedulerState.PENDING, SchedulerState.REQUEUED, SchedulerState.REQUEUE_HOLD, SchedulerState.SPECIAL_EXIT}
)
FINAL_STATES: Final = frozenset(
    {
        SchedulerState.COMPLETED,
        SchedulerState.FAILED,
        SchedulerState.CANCELLED,
        SchedulerState.TIMEOUT,
        SchedulerState.NODE_FAIL,
        SchedulerState.PREEMPTED,
        SchedulerState.OUT_OF_MEMORY,
        SchedulerState.BOOT_FAIL,
        SchedulerState.DEADLINE,
        SchedulerState.REVOKED,
        SchedulerState.GONE,
    }
)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of one job or array task, as the scheduler reports it. None and "" mean unknown."""

    id: str
    state: str  # a `SchedulerState`, or the scheduler's word
    name: str = ""
    reason: str = ""
    restarts: int | None = None
    elapsed_s: float | None = None
    time_left_s: float | None = None
    nodes: int | None = None
    exit_code: int | None = None  # as in a shell
    energy_j: float | None = None  # of all nodes
    energy_reason: str = ""  # why the energy is missing or incomplete
    begun_utc: str = ""
    ended_utc: str = ""  # "" before the end
    log: str = ""

    @property
    def is_over(self) -> bool:
        """True if the job has ended for good.

        If ``state`` is not a `SchedulerState`, the job has ended if it has an end time.
        """
        return self.state in FINAL_STATES or (self.state not in SchedulerState.__members__ and bool(self.ended_utc))

    @property
    def is_waiting(self) -> bool:
        """True if the job is queued and does not run."""
        return self.state in WAITING_STATES


COMMAND_LIMIT_S: Final = 120.0  # a busy controller responds slowly


class CommandResult(NamedTuple):
    """Exit code, standard output and stripped standard error of a command."""

    code: int
    output: str
    complaint: str


def run_command(
    line: Sequence[str],
    absent: str,
    cure: str,
    script: str = "",
    limit_s: float = COMMAND_LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run the command ``line`` (program and arguments) with ``script`` as input. Return a `CommandResult`.

    ``limit_s``: timeout in seconds. ``environment``: environment variables, or None for the current variables. Raises
    MissingCapabilityError, with text ``absent`` if the program is missing, or advice ``cure`` if it does not run.
    """
    program = shutil.which(line[0])
    if program is None:
        raise MissingCapabilityError(absent)
    try:
        process = subprocess.run(
            [program, *line[1:]],
            input=os.fsencode(script),
            capture_output=True,
            env=environment,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingCapabilityError(f"the command {program} did not run ({error}); {cure}") from error
    complaint = process.stderr.decode(errors="replace").strip()
    return CommandResult(process.returncode, process.stdout.decode(errors="replace"), complaint)
