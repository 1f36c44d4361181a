"""The end of a job's time, and signals, for programs with a loop of their own: `hpcdist.should_stop`."""

import os
import time
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.launch.environment import RUN_DIR
from hpcdist.comm.mpi.world import AnyComm, communicator_of
from hpcdist.training.run.stop_requests import (
    EXIT_CODES,
    STOP_FILE,
    StopReason,
    StopRequests,
    agreed_reason,
    end_of_job,
)

MARGIN_S: Final = 60.0


class _Watch:
    """Requests of this process, and the longest time between two looks at them."""

    def __init__(self) -> None:
        folder = os.environ.get(RUN_DIR)
        ends = end_of_job(None, time.time(), os.environ)
        self.requests = StopRequests(Path(folder) / STOP_FILE if folder else None, ends)
        self.requests.listen()
        self.longest_s, self.last = 0.0, time.monotonic()

    def counts(self, margin_s: float) -> np.ndarray:
        """Return what this rank wants, by reason (local)."""
        now = time.monotonic()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        counts = self.requests.current()
        if time.time() + self.longest_s + margin_s > self.requests.ends:
            counts[StopReason.REQUEUE] = 1.0
        return counts.copy()


_watches: Final[list[_Watch]] = []  # the one of this process


def should_stop(margin_s: float = MARGIN_S, *, comm: AnyComm = None) -> int:
    """Return 0, or the exit code with which the program should save and end; the same on all ranks. Collective.

    Call it once in each turn of a loop, from the main thread. It is 75 where any rank got SIGTERM, SIGHUP or SIGUSR1,
    where ``hpcdist run --out`` started the program and its run directory has a file ``stop``, and where another turn
    like the longest so far and ``margin_s`` seconds might not end before the job does (SLURM_JOB_END_TIME): a job that
    ends with 75 is requeued. It is 130 after Ctrl-C; a second one ends the program at once. It costs an allreduce of 16
    bytes. Signals are answered from the first call on. Raises ConfigurationError where SLURM_JOB_END_TIME is no time.
    """
    where = communicator_of(comm)
    if not _watches:
        _watches.append(_Watch())
    counts = _watches[0].counts(margin_s)
    where.allreduce(counts, "sum")
    reason = agreed_reason(counts)
    if reason is None:
        return 0
    if where.rank == 0:
        _watches[0].requests.answered()  # the next start must not see the file
    return EXIT_CODES[reason]
