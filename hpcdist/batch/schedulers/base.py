"""Job states in one vocabulary for all schedulers, and the call of a scheduler's command. Light."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from hpcdist.errors import MissingCapabilityError


class SchedulerState(StrEnum):
    """States of jobs that hpcdist knows; a scheduler's other words are kept as they are."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"  # its nodes boot
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"  # its processes have ended, its nodes are cleaned up
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"  # requeued and held, since its exit code says so
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    REVOKED = "REVOKED"  # another cluster of the federation has started it
    GONE = "GONE"  # its scheduler remembers it no more: it ended long ago, or never was
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
    """State of one job, or of one task of an array, as its scheduler has it; None and "" are what it does not say.

    ``state`` is one of `SchedulerState`, or the scheduler's own word. ``exit_code`` is that of a shell: 128 + the
    signal where one ended the job. ``energy_j`` is of all nodes of the job, None with the reason where it was not
    measured. ``ended_utc`` is "" while the job is not over.
    """

    id: str
    state: str
    name: str = ""
    reason: str = ""
    restarts: int | None = None
    elapsed_s: float | None = None
    time_left_s: float | None = None
    nodes: int | None = None
    exit_code: int | None = None
    energy_j: float | None = None
    energy_reason: str = ""
    begun_utc: str = ""
    ended_utc: str = ""
    log: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended and does not start again; by its end where hpcdist does not know the word."""
        return self.state in FINAL_STATES or (self.state not in SchedulerState.__members__ and bool(self.ended_utc))

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue and does not run."""
        return self.state in WAITING_STATES


COMMAND_LIMIT_S: Final = 120.0  # a busy controller answers late


class CommandResult(NamedTuple):
    """Output of a command: its exit code, its output as it is, and its errors for people."""

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
    """Run ``line`` with ``script`` as its input and return its output, whatever its exit code (local).

    It has the variables of this process, or ``environment`` in their place.

    Raises MissingCapabilityError: ``absent`` where there is no such program on PATH; and, with ``cure``, where it does
    not run, or does not answer within ``limit_s``.
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
        raise MissingCapabilityError(f"{program} did not run ({error}); {cure}") from error
    complaint = process.stderr.decode(errors="replace").strip()
    return CommandResult(process.returncode, process.stdout.decode(errors="replace"), complaint)
