"""Stop requests: signals, a stop file and the clock set flags that all ranks agree on at a step boundary.

The file ``grow`` asks for further ranks in the same way.
"""

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
from typing import Any, Final

import numpy as np

from hpcdist import errors
from hpcdist.checkpoint.config import OBSERVED, CheckpointConfig
from hpcdist.comm.launch.exit_file import STOP_CODES, ImmediateExit
from hpcdist.errors import ConfigurationError
from hpcdist.reporting import regular
from hpcdist.strategies.core.daly_interval import daly
from hpcdist.training.run.start_record import FINISHED, STOPPED, StartRecord

ASSUMED_SAVE_S: Final = 1.0
ASSUMED_BYTES_PER_S: Final = 100e6
LEAVING_S: Final = 2.0  # after the last save: metrics, a barrier, MPI's own end
TIMINGS_KEPT: Final = 1000  # steps, and saves
JOB_END: Final = "SLURM_JOB_END_TIME"  # seconds since 1970, which Slurm sets


class CheckpointTimer:
    """Timer of the checkpoints of one rank (local), which saves ``state_bytes``; ``ends`` is the end of the job.

    ``starts`` is the record of the run, on the rank that decides.
    """

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
        """Record a step."""
        self._steps.append(seconds)
        if self._starts is not None:
            self._starts.alive()

    def ended(self, stopped: bool) -> None:
        """Record that this start ends as it should: ``stopped`` by a request, or with the run."""
        if self._starts is not None:
            self._starts.ended(STOPPED if stopped else FINISHED)

    def saved(self, seconds: float) -> None:
        """Record a save that held the steps up for ``seconds``."""
        self._saves.append(seconds)
        self._saved = self._clock()
        if self._starts is not None:
            self._starts.alive(certainly=True)

    def completed(self, seconds: float) -> None:
        """Record a save that was complete after ``seconds``, in the background or not."""
        self._complete.append(seconds)

    @property
    def cost_s(self) -> float:
        """The length of a save: the median, so that one on a busy disk does not count for all."""
        return quantile(self._saves, 0.5) if self._saves else self._guess_s

    @property
    def interval_s(self) -> float:
        """Seconds of work between two saves by `daly`; infinite where ``checkpoint.mtbf_s`` is not used."""
        return daly(self.cost_s, self.mtbf_s) if self.mtbf_s else math.inf

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures that counts, 0 for none.

        The observed one is at least the cost of a save: a run that is shorter than that has seen nothing yet.
        """
        configured = self._config.mtbf_s
        if configured != OBSERVED:
            return float(configured)
        return 0.0 if self._starts is None else max(self._starts.mtbf_s, self.cost_s)

    def due(self) -> bool:
        """Whether the next step should be followed by a save, by the work since the last one."""
        if math.isinf(self.interval_s):
            return False
        step_s = quantile(self._steps, 0.5) if self._steps else 0.0
        return self._clock() - self._saved + step_s / 2 >= self.interval_s  # the step boundary next to it

    def time_up(self) -> bool:
        """Whether one more step and a save might not end in time, by the 99th and the 95th percentile of theirs."""
        if self._up or math.isinf(self._ends):
            return self._up
        cost_s = quantile(self._complete, 0.95) if self._complete else self._guess_s
        step_s = quantile(self._steps, 0.99) if self._steps else 0.0
        left_s = self._ends - LEAVING_S - self._clock()
        if left_s < cost_s + step_s:
            self._up = True
            known = f"a step takes up to {step_s:.2f} s and a save {cost_s:.2f} s"
            self._say(f"the job ends in {left_s + LEAVING_S:.1f} s, so it stops now: {known}")
        return self._up


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least of ``values`` that no more than ``1 - share`` of them exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def end_of_job(limit_s: float | None, started: float, environment: Mapping[str, str]) -> float:
    """Return when the job is over, in seconds since 1970: its own limit or Slurm's, whichever comes first.

    Raises ConfigurationError when the environment holds something else than a time.
    """
    ends = math.inf if limit_s is None else started + limit_s
    job_end = environment.get(JOB_END, "")
    if job_end:
        if not job_end.isascii() or not job_end.isdecimal():
            raise ConfigurationError(f"{JOB_END}={job_end!r}: expected seconds since 1970; unset it")
        ends = min(ends, float(job_end))
    return ends


STOP_FILE = "stop"
GROW_FILE = "grow"


class StopReason(IntEnum):
    """Reason why a rank wants to stop; the index of its count in the numbers that a step agrees on."""

    REQUEUE = 0  # signals but Ctrl-C, the stop file, the job's time: save, and let the scheduler start the job again
    INTERRUPT = 1  # Ctrl-C: save and exit


EXIT_CODES = {StopReason.REQUEUE: errors.REQUEUE, StopReason.INTERRUPT: errors.INTERRUPTED}


class StopRequests:
    """Stop requests of this rank. Signals only set a flag: a handler must neither communicate nor write files.

    While there is nothing to save, which a rank says by `starts`, a signal ends the process at once instead. ``ends``
    is when the job is over, in seconds since 1970.
    """

    def __init__(self, stop_file: Path | None = None, ends: float = math.inf) -> None:
        self.ends = ends
        self._stop_file = stop_file  # both files are looked at by one rank only
        self.grow_file: Path | None = None
        self._time_up: Callable[[], bool] = lambda: False
        self._wanted = np.zeros(len(StopReason))
        self._before: dict[signal.Signals, Any] = {}
        self._at_once = ImmediateExit()

    @classmethod
    def listening(cls, limit_s: float | None, *lets_go: Callable[[], object]) -> "StopRequests":
        """Return the requests of a process that starts, for ``limit_s`` seconds at most (main thread only).

        It `listen`s, and `starts`. Raises ConfigurationError as `end_of_job`.
        """
        requests = cls(ends=end_of_job(limit_s, time.time(), os.environ))
        requests.listen()
        requests.starts(*lets_go)
        return requests

    def consult(self, stop_file: Path, time_up: Callable[[], bool]) -> None:
        """Ask for a stop from now on where ``stop_file`` exists, or ``time_up`` returns true (one rank only)."""
        self._stop_file, self._time_up = stop_file, time_up

    def listen(self) -> None:
        """Install the handlers (main thread only)."""
        for number in STOP_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._on_signal)

    def starts(self, *lets_go: Callable[[], object]) -> None:
        """Let a signal end this process from now on, until `begun`, after calls of ``lets_go`` (main thread only)."""
        for action in lets_go:
            self._at_once.before(action)
        self._at_once.switch(True)

    def let_go(self, action: Callable[[], object]) -> None:
        """Call ``action``, too, where a signal ends this process at once (local)."""
        self._at_once.before(action)

    def begun(self) -> None:
        """Let a signal be a request from now on, granted at the end of a step: there is something to save (local)."""
        if self._at_once.on:
            self._at_once.switch(False)

    @contextmanager
    def all_saved(self) -> Iterator[None]:
        """Let a signal end this process at once inside, where `starts` was called before: all is saved (local)."""
        self._at_once.switch(self._at_once.started)
        try:
            yield
        finally:
            self._at_once.switch(False)

    def ignore(self) -> None:
        """Restore the signal handlers from before `listen` (main thread only)."""
        self._at_once.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stop_request = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.REQUEUE
        if stop_request is StopReason.INTERRUPT and self._wanted[stop_request]:
            raise KeyboardInterrupt  # asked twice: do not wait for the end of the step
        self._wanted[stop_request] = 1.0

    def current(self) -> np.ndarray:
        """Return this rank's requests as numbers to be summed over the ranks."""
        if self._time_up() or (self._stop_file is not None and self._stop_file.is_file()):
            self._wanted[StopReason.REQUEUE] = 1.0
        return self._wanted

    def ranks(self) -> float:
        """Return the number of further ranks in the file that `hpcdist grow` writes; 0 for none (local)."""
        if self.grow_file is None or not self.grow_file.is_file():
            return 0.0
        try:
            return float(max(0, int(regular.text(self.grow_file, 64))))
        except (OSError, ValueError, OverflowError):
            return 0.0  # not written by `hpcdist grow`, or removed meanwhile

    def grown(self) -> None:
        """Remove the file of `hpcdist grow`: the request is granted, or cannot be (local)."""
        if self.grow_file is not None:
            self.grow_file.unlink(missing_ok=True)

    def answered(self) -> None:
        """Remove the stop file: the request is granted, and the next start must not see it."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)


def agreed_reason(counts: np.ndarray) -> StopReason | None:
    """Return the reason to stop by the ``counts`` of all ranks, None for none: an interrupt wins over a requeue."""
    if counts[StopReason.INTERRUPT] > 0:
        return StopReason.INTERRUPT
    return StopReason.REQUEUE if counts[StopReason.REQUEUE] > 0 else None
