"""Stop requests (signals, stop file, end of the job) for programs with their own loop: `hpcdist.should_stop`.

The path of a signal through the modules is in `training.run.stop_requests`.
"""

import os
import time
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.launch.environment import RUN_DIR
from hpcdist.comm.mpi.world import AnyComm, communicator_of
from hpcdist.constants import STOP_FILE
from hpcdist.training.run.stop_requests import (
    EXIT_CODES,
    StopReason,
    StopRequests,
    agreed_reason,
    end_of_job,
)

MARGIN_S: Final = 60.0


class _Watch:
    def __init__(self) -> None:
        folder = os.environ.get(RUN_DIR)
        ends = end_of_job(None, time.time(), os.environ)
        self.requests = StopRequests(Path(folder) / STOP_FILE if folder else None, ends)
        self.requests.listen()
        self.longest_s, self.last = 0.0, time.monotonic()

    def counts(self, margin_s: float) -> np.ndarray:
        now = time.monotonic()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        counts = self.requests.current()
        if time.time() + self.longest_s + margin_s > self.requests.ends:
            counts[StopReason.REQUEUE] = 1.0
        return counts.copy()


_watches: Final[list[_Watch]] = []  # at most one per process


def should_stop(margin_s: float = MARGIN_S, *, comm: AnyComm = None) -> int:
    """Return 0, or the exit code with which all ranks should save and exit. Collective: all ranks get the same result.

    Call this once per iteration, from the main thread. ``margin_s``: seconds to reserve before the end of the Slurm
    job. Code 130: Ctrl-C. Code 75 (requeue): SIGTERM, SIGHUP or SIGUSR1 on a rank, a file ``stop``, or little time
    left.
    Raises ConfigurationError if SLURM_JOB_END_TIME is not a time.
    """
    # The first call installs signal handlers. The time is nearly up if the longest iteration until now plus
    # ``margin_s`` would pass SLURM_JOB_END_TIME.
    communicator = communicator_of(comm)
    if not _watches:
        _watches.append(_Watch())
    counts = _watches[0].counts(margin_s)
    communicator.allreduce(counts, "sum")
    reason = agreed_reason(counts)
    if reason is None:
        return 0
    if communicator.rank == 0:
        _watches[0].requests.answered()  # delete the stop file, so that the next start does not stop again
    return EXIT_CODES[reason]
