"""Energy counters: the protocol, and readers that unroll wraps, count failures, and integrate power.

A counter counts energy since some moment before the job; only differences mean anything. Counters step: NVIDIA's and
Cray's about ten times a second, RAPL's a thousand times. A difference over less than two steps is noise.

`IntegratedPower` is the fallback where a source has watts and no counter of joules, and is labelled as one: the
trapezoidal rule over the reads. The energy of a time of which the power is not known is not known either: reads that
are further apart than ``bridge_ns`` leave a gap, and a window with a gap has no joules.

`read_text` reads small files of the kernel under /sys and /proc fast: a sampler reads dozens of them ten times a
second.
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
    """Return the content of a small file of the kernel (local). Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Files of /proc and /sys have the size 0, so they are read until nothing comes any more.
        parts = [os.read(handle, MAX_FILE_BYTES)]
        while parts[-1]:
            parts.append(os.read(handle, MAX_FILE_BYTES))
    finally:
        os.close(handle)
    return b"".join(parts).decode(errors="replace")


def unreadable_reason(path: str | Path, error: Exception) -> str:
    """Return why ``path`` could not be read, and what the site can do where its permissions forbid it."""
    if isinstance(error, PermissionError):
        return f"{path} may be read by root only; ask the site to let users read it (chmod a+r {path})"
    return f"{path} cannot be read: {error}"


PROBE_NS: Final = 500_000_000  # a counter is looked at often for so long, to see how often it steps
PROBED_CHANGES: Final = 3
LARGEST_MJ: Final = 1 << 62  # what fits into the tables; a register of ones is no energy
MAX_GAP_NS: Final = 30_000_000_000  # a process that was stopped for longer may have missed a wrap


class SensorReadError(Exception):
    """Failure of one read of a sensor."""


class CounterResetError(SensorReadError):
    """Reset of a counter: differences between reads before it and after it mean nothing."""


@dataclass(frozen=True)
class SourceInfo:
    """Properties of a source that qualify its joules.

    ``model`` is the name of the device, ``ranks`` how many of this job use it (0: it belongs to the whole node), and
    ``power_field`` and ``power_scope`` say what its watts are: "instant" or "average" as the sensor has them, "usage"
    where the driver does not say, of the "gpu", the "module" around it, or the "node". ``note`` is empty for a counter
    of energy that no other job shares; ``declared`` marks the joules of a model.
    """

    model: str = ""
    ranks: int = 0
    power_field: str = ""
    power_scope: str = ""
    note: str = ""
    declared: bool = False


class EnergyCounter(Protocol):
    """Protocol of a cumulative counter of energy. It wraps to 0 at ``span`` counts (None: never); ``per_mj`` are a mJ.

    ``gaps`` is the number of intervals between two reads over which the energy used is not known.
    """

    name: str
    kind: str
    per_mj: int
    span: int | None
    gaps: int

    @property
    def about(self) -> SourceInfo:
        """The traits of the source, as far as they are known by now."""
        ...

    def read(self) -> int:
        """Return the counter (local). Raises SensorReadError."""
        ...

    def power_mw(self) -> int | None:
        """Return the power in mW, None where the source reports none (local). Raises SensorReadError."""
        ...


class NoPowerReading:
    """Base of a counter that has no gaps, and no reading of power."""

    about = SourceInfo()
    gaps = 0

    def power_mw(self) -> int | None:
        """Return None: there is no reading of power."""
        return None


@dataclass
class UpdateInterval:
    """Update interval of a counter as polling shows it: an upper bound."""

    _began_ns: int | None = None
    _value: int = 0
    _changed_ns: list[int] = field(default_factory=list)  # the first change and the last
    changes: int = 0

    def see(self, now_ns: int, value: int) -> None:
        """Take a read, as long as the interval is not settled."""
        if self._began_ns is None:
            self._began_ns, self._value = now_ns, value
        elif not self.settled(now_ns) and value != self._value:
            self._value = value
            self.changes += 1
            self._changed_ns = [*self._changed_ns[:1], now_ns]

    def settled(self, now_ns: int) -> bool:
        """Whether the counter has been looked at for long enough and has moved."""
        if self._began_ns is None:
            return False
        return self.changes >= PROBED_CHANGES and now_ns - self._began_ns >= PROBE_NS

    @property
    def update_s(self) -> float:
        """Mean seconds between changes; NaN before the second change."""
        if self.changes < 2:
            return math.nan
        return (self._changed_ns[-1] - self._changed_ns[0]) / 1e9 / (self.changes - 1)


class CounterReader:
    """Reader of a counter: its energy in mJ without wraps, the number of failed reads, and why it was given up."""

    def __init__(self, counter: EnergyCounter) -> None:
        self.name, self.kind = counter.name, counter.kind
        self._counter = counter
        self._raw: int | None = None
        self._unrolled = 0
        self._read_ns = 0
        self.pace = UpdateInterval()
        self.failed_reads = 0
        self.failing = 0  # reads that have failed since the last good one
        self.failure = ""  # of the last failed read
        self.lost = ""  # why nothing more can be known

    @property
    def about(self) -> SourceInfo:
        """The traits of the source, as far as they are known by now."""
        return self._counter.about

    @property
    def gaps(self) -> int:
        """Number of intervals so far over which the energy used is not known."""
        return self._counter.gaps

    def read(self, now_ns: int) -> int | None:
        """Return the energy in mJ at ``now_ns``; None when the sensor fails or the counter makes no sense (local)."""
        try:
            raw = self._counter.read()
        except CounterResetError as error:
            self.lost = self.lost or str(error)
            return None
        except Exception as error:  # noqa: BLE001 - a binding may raise anything, and the sampler has to go on
            self._failed(str(error) if isinstance(error, SensorReadError) else f"{type(error).__name__}: {error}")
            return None
        if not 0 <= raw // self._counter.per_mj < LARGEST_MJ:
            self._failed(f"it reads {raw}, which no counter reaches")
            return None
        self.failing = 0
        self._unroll(raw, now_ns)
        if self.lost:
            return None
        self.pace.see(now_ns, self._unrolled)
        return self._unrolled // self._counter.per_mj

    def power_mw(self) -> int | None:
        """Return the power in mW; None where the source reports none, or fails (local)."""
        try:
            return self._counter.power_mw()
        except Exception:  # noqa: BLE001 - as above
            return None

    def _failed(self, why: str) -> None:
        self.failed_reads += 1
        self.failing += 1
        self.failure = why

    def _unroll(self, raw: int, now_ns: int) -> None:
        """Add what the counter counted since the last read.

        A value below the last one means that it wrapped, taken to be once: `MAX_GAP_NS` between reads is less than a
        period of any known counter. Without a known range a smaller value cannot be explained, and the counter is lost.
        """
        span = self._counter.span
        if self._raw is None:
            self._unrolled = raw
        elif span is not None and now_ns - self._read_ns > MAX_GAP_NS:
            waited_s = (now_ns - self._read_ns) / 1e9
            self.lost = self.lost or f"it was not read for {waited_s:.0f} s, in which it may have wrapped unseen"
        elif raw >= self._raw:
            self._unrolled += raw - self._raw
        elif span is not None:
            self._unrolled += raw + span - self._raw  # up to the end of its range, and from 0 on
        else:
            self.lost = self.lost or f"it went back from {self._raw} to {raw} and its range is not known"
        self._raw, self._read_ns = raw, now_ns

    def explain(self) -> str:
        """Return what went wrong with this source; "" when nothing did."""
        if self.lost:
            return f"{self.name}: {self.lost}"
        if self.gaps:
            why = f"; the last failed read: {self.failure}" if self.failure else ""
            return f"{self.name}: its power was not known all of the time ({self.gaps} gaps){why}"
        if self.failed_reads:
            return f"{self.name}: {self.failed_reads} failed reads, the last: {self.failure}"
        return ""


INTEGRATED_LABEL: Final = "integrated power"
BRIDGE_S: Final = 1.0  # power that is an average over a second is known from one second to the next
BRIDGED_INTERVALS: Final = 2.5  # one read may be missed


class IntegratedPower:
    """Counter of a GPU that integrates ``power_mw`` from the first read on, in pJ. Its note begins with ``label``."""

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
        self._twice_pj = 0  # sum of (a + b) dt of the trapezia: whole numbers, so that no rounding adds up

    def read(self) -> int:
        """Return the energy so far in pJ, and count a gap after too long a time. Raises SensorReadError."""
        power = self._power_mw()
        now_ns = self._clock_ns()
        if self._last is not None:
            then_ns, before = self._last
            if now_ns - then_ns > self._bridge_ns:
                self.gaps += 1
            else:
                self._twice_pj += (power + before) * (now_ns - then_ns)  # mW x ns = pJ
        self._last = now_ns, power
        return self._twice_pj // 2

    def power_mw(self) -> int | None:
        """Return the power of the last read, mW."""
        return None if self._last is None else self._last[1]
