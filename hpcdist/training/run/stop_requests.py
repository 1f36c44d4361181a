"""Stop requests: signals, a stop file and the clock set flags that all ranks agree on at a step boundary.

The path of SIGTERM through the modules, from the signal to the requeue:

    comm/launch/supervisor      `hpcdist run` sends SIGTERM to the ranks of its host, and starts the grace period
    comm/launch/exit_file       before the first step: the rank exits at once with code 75
    training/run/stop_requests  later: the rank's signal handler sets a flag, and the current step continues
    training/run/loop           the next step sums the flags of all ranks; if any is set, all ranks save after this step
    training/run/job            all ranks finalize MPI and exit with code 75
    comm/launch/supervisor      `hpcdist run` exits with code 75; after the grace period, it kills remaining ranks
    batch/requeue               the job script asks with `hpcdist jobs end` whether the job is requeued

The page survival describes each step.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist import errors
from hpcdist.checkpoint.state import advance_saves, background_flags
from hpcdist.comm.launch.environment import RUN_DIR
from hpcdist.comm.launch.exit_file import STOP_CODES, ImmediateExit
from hpcdist.comm.mpi.world import AnyComm, communicator_of
from hpcdist.constants import STOP_FILE
from hpcdist.errors import ConfigurationError
from hpcdist.reporting import regular

JOB_END: Final = "SLURM_JOB_END_TIME"  # seconds since 1970, which Slurm sets


def end_of_job(limit_s: float | None, started: float, environment: Mapping[str, str]) -> float:
    """Return the end time of the job in seconds since 1970, or infinity without a time limit.

    The end time is the earlier of ``started + limit_s`` and SLURM_JOB_END_TIME in ``environment``.
    """
    ends = math.inf if limit_s is None else started + limit_s
    job_end = environment.get(JOB_END, "")
    if job_end:
        if not job_end.isascii() or not job_end.isdecimal():
            raise ConfigurationError(
                f"the environment variable {JOB_END} is {job_end!r}, expected seconds since 1970; unset {JOB_END}"
            )
        ends = min(ends, float(job_end))
    return ends


GROW_FILE = "grow"


class StopReason(IntEnum):
    """Reason to stop the run. The value of a reason is the index into the array of stop requests."""

    REQUEUE = 0  # signals but Ctrl-C, the stop file, the end of the job: save, and let the scheduler restart the job
    INTERRUPT = 1  # Ctrl-C: save and exit


EXIT_CODES = {StopReason.REQUEUE: errors.REQUEUE, StopReason.INTERRUPT: errors.INTERRUPTED}


class StopRequests:
    """Stop requests of this rank, from signals, from the stop file, and from the time limit of the job."""

    # ``ends``: end of the job, in seconds since 1970. A signal requests a stop at the end of a step. Before the first
    # step, a signal can end the process at once.
    def __init__(self, stop_file: Path | None = None, ends: float = math.inf) -> None:
        self.ends = ends
        self._stop_file = stop_file  # only one rank checks the stop and grow files
        self.grow_file: Path | None = None
        self._time_up: Callable[[], bool] = lambda: False
        self._wanted = np.zeros(len(StopReason))
        self._before: dict[signal.Signals, Any] = {}
        self._at_once = ImmediateExit()

    @classmethod
    def listening(cls, limit_s: float | None, *callbacks: Callable[[], object]) -> "StopRequests":
        """Return a `StopRequests` that handles signals. Main thread only.

        ``limit_s``: seconds to the end of the job, or None. ``*callbacks``: functions to call before a signal ends the
        process. Raises ConfigurationError if SLURM_JOB_END_TIME is not a time.
        """
        # Until `begun` is called, a signal ends the process at once, after calls of ``callbacks``. Without callbacks,
        # a signal requests a stop after the first step.
        requests = cls(ends=end_of_job(limit_s, time.time(), os.environ))
        requests.listen()
        if callbacks:
            requests.starts(*callbacks)
        return requests

    def consult(self, stop_file: Path, time_up: Callable[[], bool]) -> None:
        """Let `current` request a stop if the file ``stop_file`` exists or ``time_up()`` is True.

        Call this on one rank only.
        """
        self._stop_file, self._time_up = stop_file, time_up

    def listen(self, *, early: bool = False) -> None:
        """Install the signal handlers. ``early``: only for SIGTERM, unless it has a handler. Main thread only."""
        for number in STOP_CODES:
            handler = signal.getsignal(number)
            if early and (number != signal.SIGTERM or handler is not signal.SIG_DFL):
                continue
            if handler != self._on_signal and (number != signal.SIGHUP or handler is not signal.SIG_IGN):  # nohup
                self._before.setdefault(number, signal.signal(number, self._on_signal))

    def starts(self, *callbacks: Callable[[], object]) -> None:
        """Let a signal call ``*callbacks`` and end this process at once, until `begun` is called. Main thread only."""
        for action in callbacks:
            self._at_once.before(action)
        self._at_once.switch(True)

    def call_before_exit(self, action: Callable[[], object]) -> None:
        """Add ``action`` to the functions that are called before a signal ends this process at once. Local."""
        self._at_once.before(action)

    def begun(self) -> None:
        """Mark the start of the training steps. Later signals request a stop after the current step. Local."""
        if self._at_once.on:
            self._at_once.switch(False)

    @contextmanager
    def all_saved(self) -> Iterator[None]:
        """Let a signal end this process at once in the body of ``with``, which runs after the last save. Local."""
        self._at_once.switch(self._at_once.started)  # no effect without an earlier call of `starts`
        try:
            yield
        finally:
            self._at_once.switch(False)

    def ignore(self) -> None:
        """Stop handling signals, and restore the signal handlers from before `listen`. Main thread only."""
        self._at_once.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stop_request = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.REQUEUE
        if stop_request is StopReason.INTERRUPT and self._wanted[stop_request]:
            raise KeyboardInterrupt  # second Ctrl-C: do not wait for the end of the step
        self._wanted[stop_request] = 1.0

    def current(self) -> np.ndarray:
        """Return an array with 1 for each `StopReason` that this rank requests, and 0 for other reasons. Local."""
        if self._time_up() or (self._stop_file is not None and self._stop_file.is_file()):
            self._wanted[StopReason.REQUEUE] = 1.0
        return self._wanted

    def ranks(self) -> float:
        """Return the number of additional ranks that a user has requested with `hpcdist grow`, or 0. Local."""
        if self.grow_file is None or not self.grow_file.is_file():
            return 0.0
        try:
            return float(max(0, int(regular.text(self.grow_file, 64))))
        except (OSError, ValueError, OverflowError):
            return 0.0  # not written by `hpcdist grow`, or removed meanwhile

    def grown(self) -> None:
        """Remove the request file of `hpcdist grow`, because the requested ranks have been added. Local."""
        if self.grow_file is not None:
            self.grow_file.unlink(missing_ok=True)

    def answered(self) -> None:
        """Remove the stop file, so that the run does not stop again when it is restarted."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)


class StepRequests(NamedTuple):
    """Requests of one rank for the end of a step, or the sums of these requests over all ranks."""

    # Every step sums the requests over all ranks together with its own numbers, without another message.
    stops: np.ndarray  # requests by `StopReason`
    flush: float  # above 0: write metrics; above 1: also compare clocks
    save: float  # above 0: save a checkpoint
    ranks: float  # number of ranks to add
    saver: np.ndarray  # result of `CheckpointSaver.numbers`

    def array(self) -> np.ndarray:
        """Return all requests as one flat array, to be summed over the ranks."""
        return np.concatenate([self.stops, [self.flush, self.save, self.ranks], self.saver])

    @classmethod
    def of(cls, sums: np.ndarray) -> "StepRequests":
        """Return a `StepRequests` from ``sums``, the results of `array` summed over all ranks."""
        count = len(StopReason)
        flush, save, ranks = sums[count : count + 3].tolist()
        return cls(sums[:count], flush, save, ranks, sums[count + 3 :])


def agreed_reason(counts: np.ndarray) -> StopReason | None:
    """Return INTERRUPT if any rank requests INTERRUPT, else REQUEUE if any rank requests REQUEUE, else None.

    ``counts``: array with the number of ranks that request each `StopReason`.
    """
    if counts[StopReason.INTERRUPT] > 0:
        return StopReason.INTERRUPT
    return StopReason.REQUEUE if counts[StopReason.REQUEUE] > 0 else None


MARGIN_S: Final = 60.0


class _Watch:
    def __init__(self) -> None:
        folder = os.environ.get(RUN_DIR)
        ends = end_of_job(None, time.time(), os.environ)
        self.requests = StopRequests(Path(folder) / STOP_FILE if folder else None, ends)
        self.requests.listen(early=True)
        os.register_at_fork(after_in_child=self.requests.ignore)  # or `Process.terminate` would not end a child
        self.longest_s, self.last = 0.0, math.inf
        self._listens = False  # to all signals

    def counts(self, margin_s: float) -> np.ndarray:
        now = time.monotonic()
        if not self._listens:
            self.requests.listen()
            self._listens = True
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        counts = self.requests.current()
        if time.time() + self.longest_s + margin_s > self.requests.ends:
            counts[StopReason.REQUEUE] = 1.0
        return counts.copy()


_watches: Final[list[_Watch]] = []  # at most one per process


def watch_signals() -> None:
    """From now on, let SIGTERM request a stop that `should_stop` reports later. Local.

    A handler that the script has installed stays. Raises ConfigurationError for an invalid SLURM_JOB_END_TIME.
    """
    if not _watches and threading.current_thread() is threading.main_thread():
        _watches.append(_Watch())


def should_stop(margin_s: float = MARGIN_S, *, comm: AnyComm = None) -> int:
    """Return 0, or the exit code with which all ranks should exit after saving. Collective. Equal on all ranks.

    Call this once per iteration, from the main thread. Code 130 means Ctrl-C. Code 75 (requeue) means a signal such as
    SIGTERM, a file ``stop``, or less than ``margin_s`` seconds before the end of the Slurm job.
    """
    # The first call installs signal handlers, and raises ConfigurationError for an invalid SLURM_JOB_END_TIME. The time
    # is nearly up if the longest iteration until now plus ``margin_s`` would pass SLURM_JOB_END_TIME.
    communicator = communicator_of(comm)
    watch_signals()
    counts = _watches[0].counts(margin_s)
    flags = background_flags() if comm is None else np.zeros(2)
    sums = np.concatenate([counts, flags])
    communicator.allreduce(sums, "sum")
    if comm is None:
        advance_saves(sums[counts.size :])
    reason = agreed_reason(sums[: counts.size])
    if reason is None:
        return 0
    if communicator.rank == 0:
        _watches[0].requests.answered()  # delete the stop file, so that the next start does not stop again
    return EXIT_CODES[reason]
