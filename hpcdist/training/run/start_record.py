"""Record of the starts of a run (its executions), and the mean time between failures (MTBF) computed from it.

A start has failed if the run did not end it itself: its work since the last checkpoint is lost. A rank failure that
the other ranks survived does not count, because their state was in memory, so it is no reason to save more often. With
T = seconds of all starts together and r = number of failed starts, the estimate is

    mtbf = T / (r + 1)

It is finite before the first failure, unlike the maximum likelihood estimate T / r. It is 1 / (mean of the failure
rate's posterior distribution Gamma(r + 1, T)), for failures at random times (a Poisson process) and a flat prior: A.
Gelman et al., Bayesian Data Analysis, 3rd ed. 2013, section 2.6.
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
from hpcdist.constants import STARTS_FILE
from hpcdist.reporting import atomic, regular

HEARTBEAT_S: Final = 10.0  # maximum age of the last sign of life
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]  # in seconds since 1970; the upper limit finds damaged files


class StartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record of a start (launch or restart) of a run: ``began`` and last sign of life ``seen``, in seconds since 1970.

    ``end``: "finished", "stopped" or "" (failed, or still running). ``launch``: name of the start, or "". ``survives``:
    value of `hpcdist run --survive`, or "". ``deaths``: number of ranks that died without ending the run.
    """

    began: Moment
    seen: Moment
    end: str = ""
    launch: str = ""
    survives: str = ""
    deaths: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def seconds(self) -> float:
        """Time from the begin to the last sign of life in seconds; 0 if the clock was set back."""
        return max(0.0, self.seen - self.began)


class StartRecord:
    """Record of the starts (launches and restarts) of a run in ``directory``. The constructor adds this start. Local.

    ``clock``: function that returns seconds since 1970. ``launch``: name of this start, by default the launcher's.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, launch: str | None = None) -> None:
        if launch is None:
            launch = os.fsencode(Path(os.environ.get(LAUNCH_DIR, "")).name).decode(errors="backslashreplace")
        self._path, self._clock, self._warn = directory / STARTS_FILE, clock, True
        self._writes = True  # False if the record cannot be read, so that it is not overwritten
        starts, now = self._read(), clock()
        # After the death of the rank that wrote the record, another rank continues the same start.
        survives = os.environ.get(SURVIVE, "")
        resumed = bool(starts) and bool(launch) and starts[-1].launch == launch and not starts[-1].end
        self.current = starts.pop() if resumed else StartEntry(now, now, launch=launch, survives=survives)
        self.before = tuple(starts)
        self._seen(now)

    @property
    def failures(self) -> int:
        """Number of earlier starts of the run that failed."""
        return sum(not start.end for start in self.before)

    @property
    def seconds(self) -> float:
        """Total length of all starts of the run in seconds, including this start until now."""
        now = replace(self.current, seen=self._clock())
        return sum(start.seconds for start in (*self.before, now))

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures in seconds: `seconds` / (`failures` + 1)."""
        return self.seconds / (self.failures + 1)

    def alive(self, certainly: bool = False) -> None:
        """Record that the run is alive. Writes at most every `HEARTBEAT_S` seconds, or always if ``certainly``."""
        now = self._clock()
        if certainly or not 0 <= now - self.current.seen < HEARTBEAT_S:
            self._seen(now)

    def survived(self, deaths: int) -> None:
        """Record that ``deaths`` ranks died, and that the run continues."""
        self.current = replace(self.current, deaths=self.current.deaths + deaths)
        self._seen(self._clock())

    def ended(self, end: str) -> None:
        """Record that this start ended without failure. ``end``: FINISHED or STOPPED."""
        self.current = replace(self.current, end=end)
        self._seen(self._clock())

    def _seen(self, now: float) -> None:
        self.current = replace(self.current, seen=now)
        if not self._writes:
            return
        try:
            atomic.write(self._path, msgspec.json.encode([*self.before, self.current]))
        except OSError as error:  # the run can continue
            self._warn_once(f"{self._path} cannot be written ({error.strerror}): this start may count as failed")

    def _read(self) -> list[StartEntry]:
        try:
            return read_starts(self._path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self._writes, now = regular.set_aside_damaged(self._path, error)
            self._warn_once(
                f"{self._path} cannot be read ({reason}): the time between failures counts from this start{now}"
            )
            return []

    def _warn_once(self, text: str) -> None:
        if self._warn:
            print(f"hpcdist: {text}", file=sys.stderr, flush=True)
        self._warn = False


def read_starts(path: Path) -> list[StartEntry]:
    """Return the entries of the record ``path``, or [] if it is missing. Raises OSError, or ValueError if damaged."""
    try:
        return msgspec.convert(regular.json_value(path), list[StartEntry])
    except FileNotFoundError:
        return []
    except msgspec.ValidationError as error:
        raise ValueError(f"it holds no list of starts: {error}") from error


def known_starts(run_dir: Path) -> list[StartEntry]:
    """Return the entries of the start record in ``run_dir``, or [] if the record cannot be read."""
    try:
        return read_starts(run_dir / STARTS_FILE)
    except (OSError, ValueError):
        return []
