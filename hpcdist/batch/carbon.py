"""Choose the start time of a job with the least emissions, from a forecast of the grid's carbon intensity.

Assumes that a job uses constant power. A forecast is a CSV file with one column named in _TIME and one in _INTENSITY
(case-insensitive):

    time,gCO2/kWh
    2026-11-22T00:00:00Z,312.5

The intensity of a row holds until the time of the next row.
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
# All names include the unit: a column named "intensity" could be in g/MJ or lbs/MWh.
_INTENSITY: Final = tuple(
    gas + per for gas in ("gco2", "gco2e", "gco2eq", "g_co2", "g_co2e", "g_co2eq") for per in ("/kwh", "_per_kwh")
)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_US: Final = timedelta(microseconds=1)
_DURATION: Final = re.compile(r"(\d{1,6})([dhm])", re.ASCII)
_UNIT_S: Final = {"d": 86400, "h": 3600, "m": 60}
_BEGIN: Final = {"slurm": "%Y-%m-%dT%H:%M:%S", "pbs": "%Y%m%d%H%M.%S"}  # formats of sbatch --begin and qsub -a


@dataclass(frozen=True)
class CarbonForecast:
    """Carbon intensity forecast. ``g_per_kwh[i]`` (gCO2/kWh) is valid from ``times[i]`` to ``times[i + 1]``."""

    path: Path
    times: tuple[datetime, ...]
    g_per_kwh: tuple[float, ...]

    @property
    def begin(self) -> datetime:
        """Start time of the forecast's first row."""
        return self.times[0]

    @property
    def end(self) -> datetime:
        """End time of the forecast's last row, which is assumed to be as long as the row before it."""
        return self.times[-1] + (self.times[-1] - self.times[-2])

    def covers(self, begin: datetime, end: datetime) -> bool:
        """Return True if the forecast covers the whole interval from ``begin`` to ``end``."""
        return self.begin <= begin and end <= self.end

    def mean(self, begin: datetime, duration: timedelta) -> float:
        """Return the mean intensity in gCO2/kWh from ``begin`` to ``begin + duration``.

        The forecast must cover this interval.
        """
        return float(self.total(begin, duration) / (duration // _US))

    def total(self, begin: datetime, duration: timedelta) -> Fraction:
        """Return the exact integral of the intensity over ``duration``, from ``begin``, in gCO2/kWh x microseconds."""
        return self._until(begin + duration) - self._until(begin)

    @cached_property
    def _sums(self) -> list[Fraction]:
        # Integral of the carbon intensity up to the start of each row, in gCO2/kWh x microseconds.
        lengths = [(later - sooner) // _US for sooner, later in itertools.pairwise(self.times)]
        rows = (Fraction(value) * length for value, length in zip(self.g_per_kwh, lengths, strict=False))
        return list(itertools.accumulate(rows, initial=Fraction(0)))

    def _until(self, moment: datetime) -> Fraction:
        row = bisect.bisect_right(self.times, moment) - 1
        return self._sums[row] + Fraction(self.g_per_kwh[row]) * ((moment - self.times[row]) // _US)


def read_forecast(path: Path) -> CarbonForecast:
    """Read a carbon forecast from a CSV file. Raises ConfigurationError or StorageError for an unusable file."""
    try:
        with io.StringIO(regular.read(path).decode("utf-8-sig"), newline="") as file:
            return _parsed(path, csv.reader(file, strict=True))
    except OSError as error:
        raise StorageError(f"cannot read the forecast {path}: {error.strerror or error}; check the file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(
            f"cannot read the forecast {path}: {error}; give a CSV file with the header time,gCO2/kWh"
        ) from error


def _parsed(path: Path, lines: Iterable[list[str]]) -> CarbonForecast:
    reader = iter(lines)
    header = next(reader, [])
    time_at, intensity_at = _column(path, header, _TIME), _column(path, header, _INTENSITY)
    times: list[datetime] = []
    values: list[float] = []
    for line in reader:
        if not line:
            continue
        where = f"{path} line {getattr(reader, 'line_num', len(times) + 2)}"
        if len(line) != len(header):
            raise ConfigurationError(
                f"{where}: {len(line)} values, but the header has {len(header)} columns; give one value per column"
            )
        times.append(_moment(where, line[time_at].strip()))
        values.append(_intensity(where, line[intensity_at].strip()))
        if len(times) > 1 and times[-2] >= times[-1]:
            raise ConfigurationError(
                f"{where}: {times[-1].isoformat()} is not after {times[-2].isoformat()} of the previous row; sort the "
                "rows by time, and keep only one forecast of one zone in the file"
            )
    if len(times) < 2:
        raise ConfigurationError(
            f"the forecast {path} has {len(times)} rows; give at least 2 rows: the time between rows is also the "
            "duration of the last row"
        )
    return CarbonForecast(path, tuple(times), tuple(values))


def _column(path: Path, header: list[str], accepted: tuple[str, ...]) -> int:
    names = [name.strip().casefold() for name in header]
    columns = [index for index, name in enumerate(names) if name in accepted]
    if len(columns) == 1:
        return columns[0]
    present = ", ".join(header) or "nothing"
    if columns:
        same = ", ".join(header[index] for index in columns)
        raise ConfigurationError(f"{path} line 1: {len(columns)} columns hold {accepted[0]}: {same}; keep one column")
    near = [name for name in names if nearest(name, accepted)]
    hint = f" ({near[0]!r} is similar)" if near else ""
    raise ConfigurationError(
        f"{path} line 1: no column is named {accepted[0]} or {accepted[1]}; columns: {present}{hint}. Rename a column"
    )


def _moment(where: str, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{where}: {text!r} is not an ISO 8601 time, such as 2026-11-22T14:00:00Z") from None
    if moment.tzinfo is None:
        raise ConfigurationError(f"{where}: {text!r} has no time zone; append Z for UTC, or an offset such as +01:00")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ConfigurationError(f"{where}: {text!r} is not in the years 1 to 9999 in UTC; correct the time") from None


def _intensity(where: str, text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"{where}: intensity {text!r} must be a number of at least 0, in gCO2/kWh")
    return value


@dataclass(frozen=True)
class CarbonWindow:
    """Best interval to run a job: start and end in UTC, and the mean carbon intensity in gCO2/kWh."""

    begin: datetime
    end: datetime
    mean_g_per_kwh: float
    now_g_per_kwh: float | None  # if the job starts now; None: the forecast does not cover such a job
    why_not_now: str = ""  # reason for None

    @property
    def saving_percent(self) -> float | None:
        """CO2 saving of this window compared with a start now, in percent, or None if unknown."""
        if self.now_g_per_kwh is None:
            return None
        return 100 * (1 - self.mean_g_per_kwh / self.now_g_per_kwh) if self.now_g_per_kwh else 0.0

    def saving_g(self, power_w: float) -> float | None:
        """Return the CO2 saving of a job of ``power_w`` watts in g, compared with a start now, or None if unknown."""
        if not (math.isfinite(power_w) and power_w > 0):
            raise UsageError(f"--power {power_w} is invalid; give the power of the whole job in W, above 0, e.g. 2400")
        if self.now_g_per_kwh is None:
            return None
        return (
            (self.now_g_per_kwh - self.mean_g_per_kwh) * power_w / 1000 * (self.end - self.begin) / timedelta(hours=1)
        )


def best_window(forecast: CarbonForecast, now: datetime, duration_s: float, deadline: datetime) -> CarbonWindow:
    """Return the `CarbonWindow` with the lowest mean carbon intensity for a job of ``duration_s`` seconds.

    ``now``: earliest start. ``deadline``: latest end. Raises UsageError if the deadline is too soon, and
    ConfigurationError if the forecast does not cover the job.
    """
    duration = timedelta(seconds=duration_s)
    if duration <= timedelta(0):
        raise UsageError(f"the job duration must be above 0 s, got {duration_s}")
    now, deadline = now.astimezone(UTC), deadline.astimezone(UTC)
    if now + duration > deadline:
        raise UsageError(
            f"the deadline {_time_text(deadline)} is too soon: a job of {_duration_text(duration)} that starts now "
            f"ends at {_time_text(now + duration)}; give a later deadline, or a shorter --time"
        )
    first, last = max(now, forecast.begin), min(deadline, forecast.end) - duration
    if first > last:
        raise ConfigurationError(
            f"a job of {_duration_text(duration)} must run between now, {_time_text(now)}, and the deadline, "
            f"{_time_text(deadline)}, but the forecast {forecast.path} covers too little of this time. It covers "
            f"{_time_text(forecast.begin)} to {_time_text(forecast.end)}; get a newer or longer forecast, or submit "
            "without --carbon"
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
    """Return (start time with the least CO2 for a job of ``walltime_s`` seconds, text lines that explain the start).

    ``path``: carbon forecast (CSV). ``deadline_text``: latest end of the job, in a format of `deadline_of`.
    ``power_w``: power of the job, or None. Raises UsageError, ConfigurationError or StorageError.
    """
    if walltime_s is None:
        raise UsageError("--carbon averages the forecast over the duration of the job; give the duration with --time")
    if deadline_text is None:
        raise UsageError("--carbon needs a deadline for the end of the job: --within 24h, or --deadline TIME")
    window = best_window(read_forecast(path), now, walltime_s, deadline_of(deadline_text, now))
    when = f"start not before {_time_text(window.begin)}, end by {_time_text(window.end)}"
    return window.begin, [f"{when}: {window.mean_g_per_kwh:.1f} gCO2/kWh on average", _comparison_text(window, power_w)]


def _comparison_text(window: CarbonWindow, power_w: float | None) -> str:
    grams = None if power_w is None else window.saving_g(power_w)
    if window.saving_percent is None:
        return f"the saving is unknown: the forecast does not cover a job that starts now, {window.why_not_now}"
    comparison = f"{window.saving_percent:.1f} % less than {window.now_g_per_kwh:.1f} gCO2/kWh of a job that starts now"
    return comparison if grams is None else f"{comparison}: saves {grams:.0f} g of CO2 at a constant {power_w:g} W"


def deadline_of(text: str, now: datetime) -> datetime:
    """Convert ``text`` to a time: a duration from ``now`` (24h, D-HH:MM:SS), or an ISO time. Raises UsageError."""
    # Durations: 2d, 24h, 90m, D-HH:MM:SS, HH:MM:SS or whole minutes. An ISO time without a zone is local; of two equal
    # local times (clock change), use the first.
    short = _DURATION.fullmatch(text)
    if short is not None:
        return now + timedelta(seconds=int(short[1]) * _UNIT_S[short[2]])
    if "T" in text or " " in text.strip():
        try:
            return datetime.fromisoformat(text).astimezone(UTC)
        except (ValueError, OverflowError):
            raise UsageError(f"--deadline {text!r} is not a time; use 2026-11-24T08:00 or 2026-11-24T08:00Z") from None
    try:
        return now + timedelta(seconds=seconds_of(text))
    except UsageError:
        raise UsageError(
            f"{text!r}, given as --deadline or --within, is neither a duration (24h, 2d, 90m, 1-12:00:00, or a number "
            "of minutes) nor a date with a time (2026-11-24T08:00, which is local time, or 2026-11-24T08:00Z)"
        ) from None


def begin_text(begin: datetime, scheduler: str = "slurm") -> str:
    """Format the start time ``begin`` as local time, in the format of ``scheduler``, "slurm" or "pbs".

    Raises ConfigurationError if the local time occurs twice because the clocks change.
    """
    # An ambiguous time is an error only if the command would use the wrong occurrence.
    moment = begin.replace(microsecond=0)
    local = moment.astimezone()
    text = local.strftime(_BEGIN[scheduler])
    if time.mktime((*local.timetuple()[:8], -1)) != moment.timestamp():
        raise ConfigurationError(
            f"{text}, the local time of the start {moment.isoformat()}, occurs twice because the clocks change; the "
            "scheduler would use the wrong occurrence: submit with TZ=UTC in the environment"
        )
    return text


def _time_text(moment: datetime) -> str:
    return moment.astimezone().isoformat(sep=" ", timespec="minutes")


def _duration_text(duration: timedelta) -> str:
    return f"{duration / timedelta(hours=1):g} h"
