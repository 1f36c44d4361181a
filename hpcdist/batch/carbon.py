"""Choose the begin of a job with the least emissions, from a forecast of the grid's carbon intensity.

A job is taken to run for its whole walltime, at the same power all the time, and to end before a deadline. The begin
is requested of the scheduler, which may start later: the saving is a forecast too.

A forecast is a CSV file with a header, of which two columns are read:

    time,gCO2/kWh
    2026-11-22T00:00:00Z,312.5
    2026-11-22T01:00:00+00:00,298

One column has a name of _TIME, the other one of _INTENSITY, in any case. A row's intensity holds from its time to
that of the next row, and the last row's for as long as the one before it. Times need their zone, since neither that
of the grid's operator nor that of the cluster can be guessed.
"""

import bisect
import csv
import io
import itertools
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Final

from hpcdist.batch.job import walltime_s as seconds_of
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import nearest

_TIME: Final = ("time", "datetime", "timestamp")
# All of them say the unit: a number named "intensity" may as well be g/MJ, or lbs/MWh.
_INTENSITY: Final = tuple(
    gas + per for gas in ("gco2", "gco2e", "gco2eq", "g_co2", "g_co2e", "g_co2eq") for per in ("/kwh", "_per_kwh")
)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_US: Final = timedelta(microseconds=1)
_DURATION: Final = re.compile(r"(\d{1,6})([dhm])", re.ASCII)
_UNIT_S: Final = {"d": 86400, "h": 3600, "m": 60}
_BEGIN: Final = {"slurm": "%Y-%m-%dT%H:%M:%S", "pbs": "%Y%m%d%H%M.%S"}  # of sbatch --begin, and of qsub -a


@dataclass(frozen=True)
class CarbonForecast:
    """Piecewise constant forecast: ``g_per_kwh[i]`` gCO2/kWh from ``times[i]`` (aware, increasing) to the next."""

    path: Path
    times: tuple[datetime, ...]
    g_per_kwh: tuple[float, ...]

    @property
    def begin(self) -> datetime:
        """The begin of the first row."""
        return self.times[0]

    @property
    def end(self) -> datetime:
        """The end of the last row, which is as long as the one before it."""
        return self.times[-1] + (self.times[-1] - self.times[-2])

    def covers(self, begin: datetime, end: datetime) -> bool:
        """Return whether every moment from ``begin`` to ``end`` has an intensity."""
        return self.begin <= begin and end <= self.end

    def mean(self, begin: datetime, duration: timedelta) -> float:
        """Return the mean gCO2/kWh of ``duration`` from ``begin`` on, all of which it has to cover."""
        return float(self.total(begin, duration) / (duration // _US))

    def total(self, begin: datetime, duration: timedelta) -> Fraction:
        """Return the exact integral over the same time, in gCO2/kWh x microseconds."""
        return self._until(begin + duration) - self._until(begin)

    @cached_property
    def _sums(self) -> list[Fraction]:
        """Integrals from the first row to each."""
        lengths = [(later - sooner) // _US for sooner, later in itertools.pairwise(self.times)]
        rows = (Fraction(value) * length for value, length in zip(self.g_per_kwh, lengths, strict=False))
        return list(itertools.accumulate(rows, initial=Fraction(0)))

    def _until(self, moment: datetime) -> Fraction:
        row = bisect.bisect_right(self.times, moment) - 1
        return self._sums[row] + Fraction(self.g_per_kwh[row]) * ((moment - self.times[row]) // _US)


def read_forecast(path: Path) -> CarbonForecast:
    """Return the forecast in ``path``, see above. Raises ConfigurationError that names the line, or the file."""
    try:
        with io.StringIO(regular.read(path).decode("utf-8-sig"), newline="") as file:
            return _parsed(path, csv.reader(file, strict=True))
    except OSError as error:
        raise StorageError(f"cannot read the forecast {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"cannot read the forecast {path}: {error}; give a CSV file: time,gCO2/kWh") from error


def _parsed(path: Path, lines: Iterable[list[str]]) -> CarbonForecast:
    reader = iter(lines)
    header = next(reader, [])
    time_at, intensity_at = _column(path, header, _TIME), _column(path, header, _INTENSITY)
    times: list[datetime] = []
    values: list[float] = []
    for line in reader:
        if not line:
            continue  # an empty line
        where = f"{path} line {getattr(reader, 'line_num', len(times) + 2)}"
        if len(line) != len(header):
            raise ConfigurationError(f"{where}: {len(line)} values under {len(header)} names of columns")
        times.append(_moment(where, line[time_at].strip()))
        values.append(_intensity(where, line[intensity_at].strip()))
        if len(times) > 1 and times[-2] >= times[-1]:
            raise ConfigurationError(
                f"{where}: {times[-1].isoformat()} is not after {times[-2].isoformat()} of the row before; sort the "
                "rows by time, and leave one forecast, of one zone, in the file"
            )
    if len(times) < 2:
        raise ConfigurationError(f"{path} has {len(times)} rows; at least two say how long one of them holds")
    return CarbonForecast(path, tuple(times), tuple(values))


def _column(path: Path, header: list[str], accepted: tuple[str, ...]) -> int:
    """Return which column has one of the names that are ``accepted``."""
    names = [name.strip().casefold() for name in header]
    columns = [index for index, name in enumerate(names) if name in accepted]
    if len(columns) == 1:
        return columns[0]
    present = ", ".join(header) or "nothing"
    if columns:
        raise ConfigurationError(f"{path} line 1: more than one column may be meant: {present}; keep one of them")
    near = [name for name in names if nearest(name, accepted)]
    hint = f" ({near[0]!r} is close)" if near else ""
    raise ConfigurationError(
        f"{path} line 1: no column named {accepted[0]} or {accepted[1]}, in any case, but {present}{hint}: say its unit"
    )


def _moment(where: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{where}: {text!r} is no time; expected ISO 8601: 2026-11-22T14:00:00Z") from None
    if moment.tzinfo is None:
        raise ConfigurationError(
            f"{where}: {text!r} has no time zone, and an hour that is off moves the job; write Z for UTC, or +01:00"
        )
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ConfigurationError(f"{where}: {text!r} is not between the years 1 and 9999 in UTC") from None


def _intensity(where: str, text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"{where}: intensity {text!r}; expected a number of gCO2/kWh, 0 or more")
    return value


@dataclass(frozen=True)
class CarbonWindow:
    """Time to run at: aware UTC times, the mean of that time, and that of a job which begins now.

    ``now_g_per_kwh`` is None where the forecast does not cover that one, with the reason in ``why_not_now``.
    """

    begin: datetime
    end: datetime
    mean_g_per_kwh: float
    now_g_per_kwh: float | None
    why_not_now: str = ""

    @property
    def saving_percent(self) -> float | None:
        """The saving against now, in percent; None where that is not known."""
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


def best_window(forecast: CarbonForecast, now: datetime, duration_s: float, deadline: datetime) -> CarbonWindow:
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
            f"the deadline {_time_text(deadline)} is too soon: a job of {_duration_text(duration)} that begins now "
            f"ends at {_time_text(now + duration)}; give a later deadline, or a shorter --time"
        )
    first, last = max(now, forecast.begin), min(deadline, forecast.end) - duration
    if first > last:
        raise ConfigurationError(
            f"{forecast.path} covers {_time_text(forecast.begin)} to {_time_text(forecast.end)}: no "
            f"{_duration_text(duration)} of it lie between now, {_time_text(now)}, and the deadline, "
            f"{_time_text(deadline)}; get a newer or longer forecast, or submit without --carbon"
        )
    ends = (moment for row in forecast.times for moment in (row, row - duration))
    begins = {first, last, *(moment for moment in ends if first <= moment <= last)}
    begin = min(begins, key=lambda moment: (forecast.total(moment, duration), moment))
    if forecast.covers(now, now + duration):
        compared, why = forecast.mean(now, duration), ""
    else:
        compared, why = None, f"the forecast covers {_time_text(forecast.begin)} to {_time_text(forecast.end)}"
    return CarbonWindow(begin, begin + duration, forecast.mean(begin, duration), compared, why)


def plan_begin(
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
    window = best_window(read_forecast(path), now, walltime_s, deadline_of(deadline_text, now))
    when = f"not before {_time_text(window.begin)}, to end by {_time_text(window.end)}"
    return window.begin, [f"{when}: {window.mean_g_per_kwh:.1f} gCO2/kWh on average", _comparison_text(window, power_w)]


def _comparison_text(window: CarbonWindow, power_w: float | None) -> str:
    grams = None if power_w is None else window.saving_g(power_w)
    if window.saving_percent is None:
        return f"the saving is not known: a job that begins now is not all forecast, {window.why_not_now}"
    comparison = f"{window.saving_percent:.1f} % less than {window.now_g_per_kwh:.1f} gCO2/kWh of a job that begins now"
    return comparison if grams is None else f"{comparison}: {grams:.0f} g of CO2 less, at {power_w:g} W all the time"


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


def _time_text(moment: datetime) -> str:
    return moment.astimezone().isoformat(sep=" ", timespec="minutes")


def _duration_text(duration: timedelta) -> str:
    return f"{duration / timedelta(hours=1):g} h"
