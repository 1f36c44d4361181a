"""Checkpoint timer: save by the time since the last save, and before the job's walltime is over.

Rank 0 keeps the clock. What it wants travels with the numbers that every step sums over the ranks, so that all save
after the same step. The interval is Daly's, by the given or the observed mean time between failures. Until a save has
been measured, it is assumed to cost `ASSUMED_SAVE_S` and this rank's bytes at `ASSUMED_BYTES_PER_S`. Light.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hpcdist.checkpoint.config import OBSERVED, CheckpointConfig
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.daly_interval import daly
from hpcdist.training.run.start_record import FINISHED, STOPPED, StartRecord

ASSUMED_SAVE_S: Final = 1.0
ASSUMED_BYTES_PER_S: Final = 100e6
LEAVING_S: Final = 2.0  # after the last save: metrics, a barrier, MPI's own end
TIMINGS_KEPT: Final = 1000  # steps, and saves
JOB_END: Final = "SLURM_JOB_END_TIME"  # seconds since 1970, which Slurm sets


class CheckpointTimer:
    """The clock of one rank (local). ``state_bytes`` is what it saves, ``ends`` the time at which the job is over.

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
        """Take note of a step."""
        self._steps.append(seconds)
        if self._starts is not None:
            self._starts.alive()

    def ended(self, stopped: bool) -> None:
        """Take note that this start ends as it should: ``stopped`` by a wish, or with the run."""
        if self._starts is not None:
            self._starts.ended(STOPPED if stopped else FINISHED)

    def saved(self, seconds: float) -> None:
        """Take note of a save that held the steps up for ``seconds``."""
        self._saves.append(seconds)
        self._saved = self._clock()
        if self._starts is not None:
            self._starts.alive(certainly=True)

    def completed(self, seconds: float) -> None:
        """Take note of a save that was complete after ``seconds``, in the background or not."""
        self._complete.append(seconds)

    @property
    def cost_s(self) -> float:
        """What a save takes: the median, so that one on a busy disk does not count for all."""
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
        given = self._config.mtbf_s
        if given != OBSERVED:
            return float(given)
        return 0.0 if self._starts is None else max(self._starts.mtbf_s, self.cost_s)

    def due(self) -> bool:
        """Whether so much work lies behind the last save that the next step should be followed by one."""
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
    told = environment.get(JOB_END, "")
    if told:
        if not told.isascii() or not told.isdecimal():
            raise ConfigurationError(f"{JOB_END}={told!r}: expected seconds since 1970; unset it")
        ends = min(ends, float(told))
    return ends
