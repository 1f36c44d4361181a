"""Record of the starts of a run and how they ended, and the mean time between failures from it.

A start that was not ended by the run itself is a failure: its work since the last checkpoint is lost. (A rank failure
that the others survived is noted and does not count: their state came from memory, so it is no reason to save more
often.) With T seconds of all starts together, r of which have failed, the estimate is

    mtbf = T / (r + 1)

which is finite and grows with T while nothing fails. It is the time over the mean of the failure rate's posterior,
Gamma(r + 1, T), for failures at random times (a Poisson count) and a flat prior: A. Gelman et al., Bayesian Data
Analysis, 3rd ed. 2013, section 2.6. The time of maximum likelihood, T / r, does not exist before the first failure.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from hpcdist.comm.launch.exit_file import LAUNCH_DIR, SURVIVE
from hpcdist.reporting import atomic, regular

STARTS_FILE: Final = "starts.json"
HEARTBEAT_S: Final = 10.0  # how old the last sign of life may become
FINISHED: Final = "finished"
STOPPED: Final = "stopped"  # saved, and left by request
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # in seconds since 1970; no clock shows the upper limit


class StartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Start of a run: ``began`` and last ``seen`` in seconds since 1970; ``end`` is "" while it has not ended.

    ``launch`` is the same for all processes of a start, whichever of them writes; "" where the launcher gave it no
    name. ``survives`` is the mode in which it survives rank failures, one of `exit_file.SURVIVE_MODES`, "" for none;
    ``deaths`` counts the ranks that it survived.
    """

    began: Moment
    seen: Moment
    end: str = ""
    launch: str = ""
    survives: str = ""
    deaths: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def seconds(self) -> float:
        """The length of the start; 0 where the clock was put back."""
        return max(0.0, self.seen - self.began)


class StartRecord:
    """Record of the starts of the run in ``directory``, on the rank that writes it (local). This start is added."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, launch: str | None = None) -> None:
        if launch is None:
            launch = os.fsencode(Path(os.environ.get(LAUNCH_DIR, "")).name).decode(errors="backslashreplace")
        self._path, self._clock, self._warn = directory / STARTS_FILE, clock, True
        self._writes = True  # unless the record cannot be read: a new one would lack what is in it
        starts, now = self._read(), clock()
        # After the death of the rank that wrote it, another one goes on with the same start.
        survives = os.environ.get(SURVIVE, "")
        resumed = bool(starts) and bool(launch) and starts[-1].launch == launch and not starts[-1].end
        self.own = starts.pop() if resumed else StartEntry(now, now, launch=launch, survives=survives)
        self.before = tuple(starts)
        self._seen(now)

    @property
    def failures(self) -> int:
        """The number of starts before this one that ended without a request."""
        return sum(not start.end for start in self.before)

    @property
    def seconds(self) -> float:
        """The length of all starts together, this one up to now."""
        now = replace(self.own, seen=self._clock())
        return sum(start.seconds for start in (*self.before, now))

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures by the estimate above; 0 in the first moment of a run."""
        return self.seconds / (self.failures + 1)

    def alive(self, certainly: bool = False) -> None:
        """Record that the run goes on: every `HEARTBEAT_S` at most, or ``certainly``."""
        now = self._clock()
        if certainly or not 0 <= now - self.own.seen < HEARTBEAT_S:
            self._seen(now)

    def survived(self, deaths: int) -> None:
        """Record that the others go on without ``deaths`` ranks."""
        self.own = replace(self.own, deaths=self.own.deaths + deaths)
        self._seen(self._clock())

    def ended(self, end: str) -> None:
        """Record that this start ends as it should, by FINISHED or STOPPED."""
        self.own = replace(self.own, end=end)
        self._seen(self._clock())

    def _seen(self, now: float) -> None:
        self.own = replace(self.own, seen=now)
        if not self._writes:
            return
        try:
            atomic.write(self._path, msgspec.json.encode([*self.before, self.own]))
        except OSError as error:  # no reason to end a run that can go on
            self._tell(f"{self._path} cannot be written ({error.strerror}): this start may count as failed")

    def _read(self) -> list[StartEntry]:
        try:
            return read_starts(self._path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self._writes, now = regular.set_aside_damaged(self._path, error)
            self._tell(f"{self._path} cannot be read ({reason}): the time between failures counts from this start{now}")
            return []

    def _tell(self, text: str) -> None:
        if self._warn:
            print(f"hpcdist: {text}", file=sys.stderr, flush=True)
        self._warn = False


def read_starts(path: Path) -> list[StartEntry]:
    """Return the starts in the record ``path``, none where there is none. Raises OSError, ValueError if damaged."""
    try:
        return msgspec.convert(regular.json_value(path), list[StartEntry])
    except FileNotFoundError:
        return []
    except msgspec.ValidationError as error:
        raise ValueError(f"it holds no list of starts: {error}") from error


def known_starts(run_dir: Path) -> list[StartEntry]:
    """Return the starts of the run in ``run_dir``, none where its record cannot be read."""
    try:
        return read_starts(run_dir / STARTS_FILE)
    except (OSError, ValueError):
        return []
