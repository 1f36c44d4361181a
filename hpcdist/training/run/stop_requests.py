"""Stop requests: signals, a stop file and the clock set flags that all ranks agree on at a step boundary."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist import errors
from hpcdist.checkpoint.config import OBSERVED, CheckpointConfig
from hpcdist.comm.launch.exit_file import STOP_CODES, ImmediateExit
from hpcdist.comm.record.run_journal import FINISHED, STOPPED, StartRecord
from hpcdist.errors import ConfigurationError
from hpcdist.reporting import regular
from hpcdist.strategies.core.daly_interval import daly

ASSUMED_SAVE_S: Final = 1.0
ASSUMED_BYTES_PER_S: Final = 100e6
LEAVING_S: Final = 2.0  # time after the last save: metrics, a barrier, MPI finalize
TIMINGS_KEPT: Final = 1000  # number of recent steps, and of saves
JOB_END: Final = "SLURM_JOB_END_TIME"  # seconds since 1970, which Slurm sets


class CheckpointTimer:
    """Timer that decides when to save checkpoints, and whether the job's time is up. Local; only one rank needs it.

    ``state_bytes``: size of this rank's state. ``ends``: end of the job, in seconds since 1970.
    """

    # ``say`` prints a message. ``clock`` returns the time. ``starts``: record of the starts and failures of the run.
    def __init__(
        self,
        config: CheckpointConfig,
        state_bytes: int,
        ends: float = math.inf,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        starts: StartRecord | None = None,
    ) -> None:
        self._starts = starts
        self._config, self._ends, self._say, self._clock = config, ends, say, clock
        self._up = False
        self._guess_s = ASSUMED_SAVE_S + state_bytes / ASSUMED_BYTES_PER_S
        self._steps: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._saves: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._complete: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._saved = clock()

    def stepped(self, seconds: float) -> None:
        """Record that a step took ``seconds``, and that the run is alive."""
        self._steps.append(seconds)
        if self._starts is not None:
            self._starts.alive()

    def ended(self, stopped: bool) -> None:
        """Record that the run ended without error. ``stopped``: True if a stop request ended it early."""
        if self._starts is not None:
            self._starts.ended(STOPPED if stopped else FINISHED)

    def saved(self, seconds: float) -> None:
        """Record that saving a checkpoint delayed the steps by ``seconds``."""
        self._saves.append(seconds)
        self._saved = self._clock()
        if self._starts is not None:
            self._starts.alive(certainly=True)

    def completed(self, seconds: float) -> None:
        """Record that a checkpoint was complete on disk ``seconds`` after its save began."""
        self._complete.append(seconds)

    @property
    def cost_s(self) -> float:
        """Median delay of training by one save, in seconds. Before the first save, an estimate."""
        return quantile(self._saves, 0.5) if self._saves else self._guess_s

    @property
    def interval_s(self) -> float:
        """Seconds of training between two saves, by Daly's formula; infinite if `mtbf_s` is 0."""
        return daly(self.cost_s, self.mtbf_s) if self.mtbf_s else math.inf

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures in seconds: set by the recipe, or from the start record. 0 if unknown."""
        configured = self._config.mtbf_s
        if configured != OBSERVED:
            return float(configured)
        return 0.0 if self._starts is None else max(self._starts.mtbf_s, self.cost_s)

    def due(self) -> bool:
        """Return True if a checkpoint should be saved after the next step."""
        if math.isinf(self.interval_s):
            return False
        step_s = quantile(self._steps, 0.5) if self._steps else 0.0
        return self._clock() - self._saved + step_s / 2 >= self.interval_s  # at the nearest step boundary

    def time_up(self) -> bool:
        """Return True if too little time is left in the job for one more step and a save."""
        if self._up or math.isinf(self._ends):
            return self._up
        cost_s = quantile(self._complete, 0.95) if self._complete else self._guess_s
        step_s = quantile(self._steps, 0.99) if self._steps else 0.0
        left_s = self._ends - LEAVING_S - self._clock()
        if left_s < cost_s + step_s:
            self._up = True
            need = f"a step takes up to {step_s:.2f} s and a save {cost_s:.2f} s"
            self._say(f"the job ends in {left_s + LEAVING_S:.1f} s, so it stops now: {need}")
        return self._up


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest v in ``values`` for which at least the fraction ``share`` of ``values`` is <= v."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def end_of_job(limit_s: float | None, started: float, environment: Mapping[str, str]) -> float:
    """Return the end of the job in seconds since 1970: ``started`` + ``limit_s`` or Slurm's limit, the earlier one.

    The result is infinite without both limits. Raises ConfigurationError if SLURM_JOB_END_TIME is not a time.
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


STOP_FILE = "stop"
GROW_FILE = "grow"


class StopReason(IntEnum):
    """Reason to stop. Its value is its index in the array of stop requests, which is summed over ranks in each step."""

    REQUEUE = 0  # signals but Ctrl-C, the stop file, the end of the job: save, and let the scheduler restart the job
    INTERRUPT = 1  # Ctrl-C: save and exit


EXIT_CODES = {StopReason.REQUEUE: errors.REQUEUE, StopReason.INTERRUPT: errors.INTERRUPTED}


class StopRequests:
    """Stop requests of this rank: from signals, from the stop file, and because the job's time is up.

    ``stop_file``: file that requests a stop. ``ends``: end of the job, in seconds since 1970.
    """

    # A signal requests a stop at the end of a step. Before the first step, a signal can end the process at once.
    def __init__(self, stop_file: Path | None = None, ends: float = math.inf) -> None:
        self.ends = ends
        self._stop_file = stop_file  # only one rank checks the stop and grow files
        self.grow_file: Path | None = None
        self._time_up: Callable[[], bool] = lambda: False
        self._wanted = np.zeros(len(StopReason))
        self._before: dict[signal.Signals, Any] = {}
        self._at_once = ImmediateExit()

    @classmethod
    def listening(cls, limit_s: float | None, *lets_go: Callable[[], object]) -> "StopRequests":
        """Return a `StopRequests` that handles signals. Main thread only.

        ``limit_s``: seconds to the end of the job, or None. ``*lets_go``: functions to call before a signal ends the
        process. Raises ConfigurationError if SLURM_JOB_END_TIME is not a time.
        """
        # Until `begun` is called, a signal ends the process at once, after calls of ``lets_go``.
        requests = cls(ends=end_of_job(limit_s, time.time(), os.environ))
        requests.listen()
        requests.starts(*lets_go)
        return requests

    def consult(self, stop_file: Path, time_up: Callable[[], bool]) -> None:
        """Request a stop as soon as the file ``stop_file`` exists or the function ``time_up`` returns True.

        Call this on one rank only. Each call of `current` checks both.
        """
        self._stop_file, self._time_up = stop_file, time_up

    def listen(self) -> None:
        """Install the signal handlers. Main thread only."""
        for number in STOP_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                self._before[number] = signal.signal(number, self._on_signal)

    def starts(self, *lets_go: Callable[[], object]) -> None:
        """Let signals end this process at once, until the method `begun` is called. Main thread only.

        ``*lets_go``: functions to call before the exit, e.g. to release a lock.
        """
        for action in lets_go:
            self._at_once.before(action)
        self._at_once.switch(True)

    def let_go(self, action: Callable[[], object]) -> None:
        """Add the function ``action``, to be called before a signal ends this process at once. Local."""
        self._at_once.before(action)

    def begun(self) -> None:
        """From now on, signals no longer end the process at once: they request a stop after the current step. Local."""
        if self._at_once.on:
            self._at_once.switch(False)

    @contextmanager
    def all_saved(self) -> Iterator[None]:
        """Context manager for work after the last save: signals end this process at once. Local.

        It has no effect without an earlier call of `starts`.
        """
        self._at_once.switch(self._at_once.started)
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
        """Return this rank's stop requests as an array, 0 or 1 per `StopReason`, for the sum over the ranks. Local."""
        if self._time_up() or (self._stop_file is not None and self._stop_file.is_file()):
            self._wanted[StopReason.REQUEUE] = 1.0
        return self._wanted

    def ranks(self) -> float:
        """Return the number of training ranks that a user requested with `hpcdist grow`, or 0. Local."""
        if self.grow_file is None or not self.grow_file.is_file():
            return 0.0
        try:
            return float(max(0, int(regular.text(self.grow_file, 64))))
        except (OSError, ValueError, OverflowError):
            return 0.0  # not written by `hpcdist grow`, or removed meanwhile

    def grown(self) -> None:
        """Remove the request file of `hpcdist grow`, after the ranks have been added. Local."""
        if self.grow_file is not None:
            self.grow_file.unlink(missing_ok=True)

    def answered(self) -> None:
        """Remove the stop file, so that the run does not stop again when it is restarted."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)


class Ballot(NamedTuple):
    """One rank's requests for the end of a step, or their sums over all ranks, which all ranks obey.

    ``stops``: requests by `StopReason`. ``flush``: above 0, write metrics; above 1, also compare clocks. ``save``:
    above 0, save a checkpoint. ``ranks``: number of ranks to add. ``saver``: result of `CheckpointSaver.numbers`.
    """

    # Every step sums the requests over all ranks together with its own numbers, without another message.
    stops: np.ndarray
    flush: float
    save: float
    ranks: float
    saver: np.ndarray

    def array(self) -> np.ndarray:
        """Return all requests as one flat array, to be summed over the ranks."""
        return np.concatenate([self.stops, [self.flush, self.save, self.ranks], self.saver])

    @classmethod
    def of(cls, sums: np.ndarray) -> "Ballot":
        """Return a `Ballot` from ``sums``, the sum of all ranks' `array`."""
        count = len(StopReason)
        flush, save, ranks = sums[count : count + 3].tolist()
        return cls(sums[:count], flush, save, ranks, sums[count + 3 :])


def agreed_reason(counts: np.ndarray) -> StopReason | None:
    """Return INTERRUPT if any rank requests it, else REQUEUE, or None without requests. ``counts``: sums over ranks."""
    if counts[StopReason.INTERRUPT] > 0:
        return StopReason.INTERRUPT
    return StopReason.REQUEUE if counts[StopReason.REQUEUE] > 0 else None
