"""Energy counters: the protocol, and readers that unroll wraps, count failures, and integrate power.

Only differences are meaningful, over at least two steps of a counter. NVIDIA's and Cray's counters step about ten times
a second, RAPL's a thousand times.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

MAX_FILE_BYTES: Final = 1 << 16


def read_text(path: str | Path) -> str:
    """Return the content of a small kernel file in /sys or /proc. Raises OSError. Local."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Files in /proc and /sys report size 0, so read until the end.
        parts = [os.read(handle, MAX_FILE_BYTES)]
        while parts[-1]:
            parts.append(os.read(handle, MAX_FILE_BYTES))
    finally:
        os.close(handle)
    return b"".join(parts).decode(errors="replace")


def read_word(path: str | Path) -> str:
    """Return the stripped content of a small kernel file, or "" if it is unreadable. Local."""
    try:
        return read_text(path).strip()
    except OSError:
        return ""


def unreadable_reason(path: str | Path, error: Exception) -> str:
    """Return an error text about the unreadable file ``path``, with a command that lets users read the file."""
    if isinstance(error, PermissionError):
        return f"{path} may be read by root only; ask the site to let users read it (chmod a+r {path})"
    return f"{path} cannot be read: {error}"


PROBE_NS: Final = 500_000_000  # time of frequent reads of a counter, to measure its update interval
PROBED_CHANGES: Final = 3
LARGEST_MJ: Final = 1 << 62  # largest value of the tables; a register of ones is no energy
MAX_GAP_NS: Final = 30_000_000_000  # a process that was stopped for longer may have missed a wrap


class SensorReadError(Exception):
    """Error: a sensor could not be read this time."""


class CounterResetError(SensorReadError):
    """Error: a counter was reset, so new readings cannot be compared with earlier readings."""


@dataclass(frozen=True)
class SourceInfo:
    """Properties that qualify the joules of an energy source: which devices it covers, and how it measures."""

    model: str = ""  # name of the device
    ranks: int = 0  # number of this job's ranks that use the device; 0: it belongs to the whole node
    power_field: str = ""  # "instant", "average", or "usage" if the driver does not specify the kind of power
    power_scope: str = ""  # "gpu", "module" (the GPU and its module) or "node"
    note: str = ""  # limitations of the joules
    declared: bool = False  # the joules are estimates from declared watts


class EnergyCounter(Protocol):
    """Protocol of a cumulative energy counter."""

    name: str
    kind: str
    per_mj: int  # counts per mJ
    span: int | None  # counts at which the counter wraps to 0; None: never, or unknown
    gaps: int  # number of intervals between readings whose energy is unknown

    @property
    def about(self) -> SourceInfo:
        """Description of the source, such as the device model and limitations of the measured joules."""
        ...

    def read(self) -> int:
        """Return the value of the counter, in counts. Raises SensorReadError. Local."""
        ...

    def power_mw(self) -> int | None:
        """Return the power in mW, or None if the source reports no power. Raises SensorReadError. Local."""
        ...


class NoPowerReading:
    """Base class of energy counters that do not report the power."""

    about = SourceInfo()
    gaps = 0

    def power_mw(self) -> int | None:
        return None


@dataclass
class UpdateInterval:
    """Estimated upper bound of the seconds between two updates of a counter."""

    _began_ns: int | None = None
    _value: int = 0
    _changed_ns: list[int] = field(default_factory=list)  # the first change and the last
    changes: int = 0

    def see(self, now_ns: int, value: int) -> None:
        """Update the estimate with the reading ``value`` at the time ``now_ns``, unless the estimate is final."""
        if self._began_ns is None:
            self._began_ns, self._value = now_ns, value
        elif not self.settled(now_ns) and value != self._value:
            self._value = value
            self.changes += 1
            self._changed_ns = [*self._changed_ns[:1], now_ns]

    def settled(self, now_ns: int) -> bool:
        """Return True if the estimate of the update interval is final at the time ``now_ns``."""
        if self._began_ns is None:
            return False
        return self.changes >= PROBED_CHANGES and now_ns - self._began_ns >= PROBE_NS

    @property
    def update_s(self) -> float:
        """Mean seconds between two changes of the counter, or NaN before the second change."""
        if self.changes < 2:
            return math.nan
        return (self._changed_ns[-1] - self._changed_ns[0]) / 1e9 / (self.changes - 1)


class CounterReader:
    """Reader of one energy counter, which corrects wraps and counts failed reads."""

    def __init__(self, counter: EnergyCounter) -> None:
        self.name, self.kind = counter.name, counter.kind
        self._counter = counter
        self._raw: int | None = None
        self._unrolled = 0
        self._read_ns = 0
        self.pace = UpdateInterval()
        self.failed_reads = 0
        self.failing = 0  # failed reads since the last good read
        self.failure = ""  # error of the last failed read
        self.lost = ""  # reason why the counter was given up

    @property
    def about(self) -> SourceInfo:
        return self._counter.about

    @property
    def gaps(self) -> int:
        return self._counter.gaps

    def read(self, now_ns: int) -> int | None:
        """Return the energy in mJ, or None after a failed read. ``now_ns``: present monotonic time. Local."""
        try:
            raw = self._counter.read()
        except CounterResetError as error:
            self.lost = self.lost or str(error)
            return None
        except Exception as error:  # noqa: BLE001 - a binding may raise anything, and the sampler must continue
            self._failed(str(error) if isinstance(error, SensorReadError) else f"{type(error).__name__}: {error}")
            return None
        if not 0 <= raw // self._counter.per_mj < LARGEST_MJ:
            self._failed(f"it reads {raw}, which no counter can reach")
            return None
        self.failing = 0
        self._unroll(raw, now_ns)
        if self.lost:
            return None
        self.pace.see(now_ns, self._unrolled)
        return self._unrolled // self._counter.per_mj

    def power_mw(self) -> int | None:
        try:
            return self._counter.power_mw()
        except Exception:  # noqa: BLE001 - as above
            return None

    def _failed(self, why: str) -> None:
        self.failed_reads += 1
        self.failing += 1
        self.failure = why

    def _unroll(self, raw: int, now_ns: int) -> None:
        span = self._counter.span
        if self._raw is None:
            self._unrolled = raw
        elif span is not None and now_ns - self._read_ns > MAX_GAP_NS:
            waited_s = (now_ns - self._read_ns) / 1e9
            self.lost = self.lost or f"it was not read for {waited_s:.0f} s, in which it may have wrapped unseen"
        elif raw >= self._raw:
            self._unrolled += raw - self._raw
        elif span is not None:
            self._unrolled += raw + span - self._raw  # one wrap: readings are closer than the wrap period
        else:
            self.lost = self.lost or f"it went back from {self._raw} to {raw} and its range is not known"
        self._raw, self._read_ns = raw, now_ns

    def explain(self) -> str:
        """Return an error text about the failed reads, or "" if no read failed."""
        if self.lost:
            return f"{self.name}: {self.lost}"
        if self.gaps:
            why = f"; the last failed read: {self.failure}" if self.failure else ""
            return f"{self.name}: its power was not always known ({self.gaps} gaps){why}"
        if self.failed_reads:
            return f"{self.name}: {self.failed_reads} failed reads, the last: {self.failure}"
        return ""


INTEGRATED_LABEL: Final = "integrated power"
BRIDGE_S: Final = 1.0  # power averaged over a second is known from one second to the next
BRIDGED_INTERVALS: Final = 2.5  # one read may be missed


class IntegratedPower:
    """Energy counter of a GPU in pJ. It integrates the power in mW that the function ``power_mw`` returns."""

    kind = "gpu"
    per_mj = 10**9
    span: int | None = None

    def __init__(
        self,
        name: str,
        power_mw: Callable[[], int],
        about: SourceInfo,
        interval_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        label: str = INTEGRATED_LABEL,
    ) -> None:
        self.name = name
        self.about = replace(about, note="; ".join(filter(None, (label, about.note))))
        self.gaps = 0
        self._power_mw, self._clock_ns = power_mw, clock_ns
        self._bridge_ns = round(max(BRIDGE_S, BRIDGED_INTERVALS * interval_s) * 1e9)
        self._last: tuple[int, int] | None = None
        self._twice_pj = 0  # sum of (a + b) dt of the trapezia, in integers, so that no rounding adds up

    def read(self) -> int:
        """Return the energy in pJ since the first call. Raises SensorReadError."""
        power = self._power_mw()
        now_ns = self._clock_ns()
        if self._last is not None:
            then_ns, before = self._last
            if now_ns - then_ns > self._bridge_ns:
                # The previous call was too long ago: its power says nothing about this interval.
                self.gaps += 1
            else:
                self._twice_pj += (power + before) * (now_ns - then_ns)  # mW x ns = pJ
        self._last = now_ns, power
        return self._twice_pj // 2

    def power_mw(self) -> int | None:
        """Return the power in mW at the last `read`, or None before the first `read`."""
        return None if self._last is None else self._last[1]
