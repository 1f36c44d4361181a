"""What a scheduler says of a job, in one vocabulary for all schedulers. Light: imports nothing of the house."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """The states that hpcdist knows. A scheduler's other words are kept as they are."""

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


WAITING: Final = frozenset({State.PENDING, State.REQUEUED, State.REQUEUE_HOLD, State.SPECIAL_EXIT})
OVER: Final = frozenset(
    {
        State.COMPLETED,
        State.FAILED,
        State.CANCELLED,
        State.TIMEOUT,
        State.NODE_FAIL,
        State.PREEMPTED,
        State.OUT_OF_MEMORY,
        State.BOOT_FAIL,
        State.DEADLINE,
        State.REVOKED,
        State.GONE,
    }
)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job, or one task of an array, as its scheduler has it now; None and "" are what it does not say.

    ``state`` is one of `State`, or the scheduler's own word. ``exit_code`` is that of a shell: 128 + the signal where
    one ended the job. ``energy_j`` is of all nodes of the job, None with the reason where it was not measured.
    ``ended_utc`` is "" while the job is not over.
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
        return self.state in OVER or (self.state not in State.__members__ and bool(self.ended_utc))

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue and does not run."""
        return self.state in WAITING
