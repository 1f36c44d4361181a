"""A forecast of the carbon intensity of the grid: a CSV file with a header, of which two columns are read.

    time,gCO2/kWh
    2026-11-22T00:00:00Z,312.5
    2026-11-22T01:00:00+00:00,298

One column has a name of _TIME, the other one of _INTENSITY, in any case. A row's intensity holds from its time to that
of the next row, and the last row's for as long as the one before it. Times need their zone, since neither that of the
grid's operator nor that of the cluster can be guessed.
"""

import bisect
import csv
import difflib
import io
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Final

from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.reporting import regular

_TIME: Final = ("time", "datetime", "timestamp")
# All of them say the unit: a number named "intensity" may as well be g/MJ, or lbs/MWh.
_INTENSITY: Final = tuple(
    gas + per for gas in ("gco2", "gco2e", "gco2eq", "g_co2", "g_co2e", "g_co2eq") for per in ("/kwh", "_per_kwh")
)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)


@dataclass(frozen=True)
class Forecast:
    """Piecewise constant: ``g_per_kwh[i]`` gCO2/kWh from ``times[i]`` (aware, increasing) to the next; two or more."""

    path: Path
    times: tuple[datetime, ...]
    g_per_kwh: tuple[float, ...]

    @property
    def begin(self) -> datetime:
        """When the first row begins."""
        return self.times[0]

    @property
    def end(self) -> datetime:
        """When the last row ends, which is as long as the one before it."""
        return self.times[-1] + (self.times[-1] - self.times[-2])

    def covers(self, begin: datetime, end: datetime) -> bool:
        """Return whether every moment from ``begin`` to ``end`` has an intensity."""
        return self.begin <= begin and end <= self.end

    def mean(self, begin: datetime, duration: timedelta) -> float:
        """Return the mean gCO2/kWh of ``duration`` from ``begin`` on, all of which it has to cover."""
        unit, duration_us = self._sums[0], duration // _US
        return self.total(begin, duration) / (unit * duration_us)

    def total(self, begin: datetime, duration: timedelta) -> int:
        """Return the exact integral over the same time, in a unit of its own."""
        return self._until(begin + duration) - self._until(begin)

    @cached_property
    def _sums(self) -> tuple[int, list[int], list[int], list[int]]:
        """What one g/kWh x microsecond is in units; the times in microseconds; units of each row; integrals up to each.

        A float is an integer over a power of two: times the largest of those powers, all are integers.
        """
        ratios = [value.as_integer_ratio() for value in self.g_per_kwh]
        unit = max(below for _, below in ratios)
        rows = [above * (unit // below) for above, below in ratios]
        times_us = [(moment - _EPOCH) // _US for moment in self.times]
        lengths = [later - sooner for sooner, later in itertools.pairwise(times_us)]
        sums = itertools.accumulate((row * length for row, length in zip(rows, lengths, strict=False)), initial=0)
        return unit, times_us, rows, list(sums)

    def _until(self, moment: datetime) -> int:
        """Return the integral from the first row to ``moment``."""
        _, times_us, rows, sums = self._sums
        moment_us = (moment - _EPOCH) // _US
        row = bisect.bisect_right(times_us, moment_us) - 1
        return sums[row] + rows[row] * (moment_us - times_us[row])


def read(path: Path) -> Forecast:
    """Return the forecast in ``path``, see above. Raises ConfigurationError that names the line, or the file."""
    try:
        with io.StringIO(regular.read(path).decode("utf-8-sig"), newline="") as file:
            return _parsed(path, csv.reader(file, strict=True))
    except OSError as error:
        raise StorageError(f"cannot read the forecast {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"cannot read the forecast {path}: {error}; give a CSV file: time,gCO2/kWh") from error


def _parsed(path: Path, lines: Iterable[list[str]]) -> Forecast:
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
    return Forecast(path, tuple(times), tuple(values))


def _column(path: Path, header: list[str], wanted: tuple[str, ...]) -> int:
    """Return which column has one of the names that are ``wanted``."""
    names = [name.strip().casefold() for name in header]
    found = [index for index, name in enumerate(names) if name in wanted]
    if len(found) == 1:
        return found[0]
    got = ", ".join(header) or "nothing"
    if found:
        raise ConfigurationError(f"{path} line 1: more than one column may be meant: {got}; keep one of them")
    near = [name for name in names if difflib.get_close_matches(name, wanted, 1)]
    said = f" ({near[0]!r} is close)" if near else ""
    raise ConfigurationError(
        f"{path} line 1: no column named {wanted[0]} or {wanted[1]}, in any case, but {got}{said}: say its unit"
    )


def _moment(where: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{where}: {text!r} is no time; expected ISO 8601: 2026-11-22T14:00:00Z") from None
    if found.tzinfo is None:
        raise ConfigurationError(
            f"{where}: {text!r} has no time zone, and an hour that is off moves the job; write Z for UTC, or +01:00"
        )
    try:
        return found.astimezone(UTC)
    except OverflowError:
        raise ConfigurationError(f"{where}: {text!r} is not between the years 1 and 9999 in UTC") from None


def _intensity(where: str, text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"{where}: intensity {text!r}; expected a number of gCO2/kWh, 0 or more")
    return value
