"""When a job emits least: its begin, chosen from a forecast of the grid's carbon intensity, within a deadline.

A job is taken to run for its whole walltime, at the same power all the time. The begin is asked of the scheduler, which
may be later: the saving is a forecast too.
"""

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from hpcdist.batch.forecast import Forecast, read
from hpcdist.batch.job import walltime_s as seconds_of
from hpcdist.errors import ConfigurationError, UsageError

__all__ = ["Forecast", "Window", "begin_text", "best", "deadline_of", "planned", "read"]

_DURATION: Final = re.compile(r"(\d{1,6})([dhm])", re.ASCII)
_UNIT_S: Final = {"d": 86400, "h": 3600, "m": 60}
_BEGIN: Final = {"slurm": "%Y-%m-%dT%H:%M:%S", "pbs": "%Y%m%d%H%M.%S"}  # of sbatch --begin, and of qsub -a


@dataclass(frozen=True)
class Window:
    """When to run: aware UTC times, the mean of that time, and that of a job which begins now.

    ``now_g_per_kwh`` is None where the forecast does not cover that one, with the reason in ``why_not_now``.
    """

    begin: datetime
    end: datetime
    mean_g_per_kwh: float
    now_g_per_kwh: float | None
    why_not_now: str = ""

    @property
    def saving_percent(self) -> float | None:
        """How much less than now, in percent; None where that is not known."""
        if self.now_g_per_kwh is None:
            return None
        return 100 * (1 - self.mean_g_per_kwh / self.now_g_per_kwh) if self.now_g_per_kwh else 0.0

    def saving_g(self, power_w: float) -> float | None:
        """Return the grams of CO2 less than now, at ``power_w`` watts all the time; None where that is not known."""
        if not (math.isfinite(power_w) and power_w > 0):
            raise UsageError(f"--power {power_w}: give the watts that the whole job draws, for example 2400")
        if self.now_g_per_kwh is None:
            return None
        return (
            (self.now_g_per_kwh - self.mean_g_per_kwh) * power_w / 1000 * (self.end - self.begin) / timedelta(hours=1)
        )


def best(forecast: Forecast, now: datetime, duration_s: float, deadline: datetime) -> Window:
    """Return the earliest window with the least mean: now <= begin, begin + duration_s <= deadline, all of it forecast.

    ``now`` and ``deadline`` are aware. The mean is linear in the begin while neither end of the window crosses from one
    row to another: so a least one begins as early or as late as it may, or has an end where a row begins. Sums are
    exact: that two windows have the same mean is no matter of rounding.
    Raises UsageError when the deadline is too soon, ConfigurationError when the forecast leaves no room for the job.
    """
    duration = timedelta(seconds=duration_s)
    if duration <= timedelta(0):
        raise UsageError(f"a job of {duration_s} s has no mean; it must be longer")
    now, deadline = now.astimezone(UTC), deadline.astimezone(UTC)
    if now + duration > deadline:
        raise UsageError(
            f"the deadline {_text(deadline)} is too soon: a job of {_long(duration)} that begins now ends at "
            f"{_text(now + duration)}; give a later deadline, or a shorter --time"
        )
    first, last = max(now, forecast.begin), min(deadline, forecast.end) - duration
    if first > last:
        raise ConfigurationError(
            f"{forecast.path} covers {_text(forecast.begin)} to {_text(forecast.end)}: no {_long(duration)} of it lie "
            f"between now, {_text(now)}, and the deadline, {_text(deadline)}; get a newer or longer forecast, or "
            "submit without --carbon"
        )
    ends = (moment for row in forecast.times for moment in (row, row - duration))
    begins = {first, last, *(moment for moment in ends if first <= moment <= last)}
    begin = min(begins, key=lambda moment: (forecast.total(moment, duration), moment))
    if forecast.covers(now, now + duration):
        compared, why = forecast.mean(now, duration), ""
    else:
        compared, why = None, f"the forecast covers {_text(forecast.begin)} to {_text(forecast.end)}"
    return Window(begin, begin + duration, forecast.mean(begin, duration), compared, why)


def planned(
    path: Path, deadline_text: str | None, walltime_s: int | None, now: datetime, power_w: float | None = None
) -> tuple[datetime, list[str]]:
    """Return when a job of ``walltime_s`` is to begin, and the lines that say why, of the options of `hpcdist submit`.

    ``deadline_text`` is a time, or how long from ``now`` (aware) on, see `deadline_of`. Raises UsageError and
    ConfigurationError.
    """
    if walltime_s is None:
        raise UsageError("--carbon needs --time: the forecast is averaged over the whole job")
    if deadline_text is None:
        raise UsageError("--carbon needs to know by when the job must have ended: --within 24h, or --deadline TIME")
    window = best(read(path), now, walltime_s, deadline_of(deadline_text, now))
    when = f"not before {_text(window.begin)}, to end by {_text(window.end)}"
    return window.begin, [f"{when}: {window.mean_g_per_kwh:.1f} gCO2/kWh on average", _compared(window, power_w)]


def _compared(window: Window, power_w: float | None) -> str:
    grams = None if power_w is None else window.saving_g(power_w)
    if window.saving_percent is None:
        return f"the saving is not known: a job that begins now is not all forecast, {window.why_not_now}"
    said = f"{window.saving_percent:.1f} % less than {window.now_g_per_kwh:.1f} gCO2/kWh of a job that begins now"
    return said if grams is None else f"{said}: {grams:.0f} g of CO2 less, at {power_w:g} W all the time"


def deadline_of(text: str, now: datetime) -> datetime:
    """Return the moment that ``text`` means: a duration from ``now`` (aware) on, or an ISO time, local without a zone.

    Durations: 2d, 24h, 90m, D-HH:MM:SS, HH:MM:SS or whole minutes. Of an hour that a change of the clocks repeats, a
    local time is in the first. Raises UsageError.
    """
    short = _DURATION.fullmatch(text)
    if short is not None:
        return now + timedelta(seconds=int(short[1]) * _UNIT_S[short[2]])
    if "T" in text or " " in text.strip():
        try:
            return datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError):
            raise UsageError(f"--deadline {text!r} is no time; expected e.g. 2026-11-24T08:00 or ...T08:00Z") from None
    try:
        return now + timedelta(seconds=seconds_of(text))
    except UsageError:
        raise UsageError(
            f"--deadline or --within {text!r}: expected a duration, as 24h, 2d, 90m, 1-12:00:00 or whole minutes; or a "
            "day with its time, as 2026-11-24T08:00 (local) or 2026-11-24T08:00Z"
        ) from None


def begin_text(begin: datetime, scheduler: str = "slurm") -> str:
    """Return ``begin`` (aware) as sbatch --begin ("slurm") or qsub -a ("pbs") reads it, without fractions of a second.

    Both have no time zone: they read the local time of the process that submits, so of TZ. Raises ConfigurationError
    for a time that they would read as another, in the hour that a change of the clocks repeats.
    """
    moment = begin.replace(microsecond=0)
    local = moment.astimezone()
    text = local.strftime(_BEGIN[scheduler])
    if time.mktime((*local.timetuple()[:8], -1)) != moment.timestamp():
        raise ConfigurationError(
            f"the local time {text} of {moment.isoformat()} comes twice, when the clocks change, and would be "
            "read as the other one; submit with TZ=UTC in the environment"
        )
    return text


def _text(moment: datetime) -> str:
    return moment.astimezone().isoformat(sep=" ", timespec="minutes")


def _long(duration: timedelta) -> str:
    return f"{duration / timedelta(hours=1):g} h"
