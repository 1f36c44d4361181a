"""Energy by a model: the declared TDP of a device times its utilisation; only on request, and labelled as one.

    power = tdp * (idle_fraction + (1 - idle_fraction) * utilisation)

The utilisation of a node's processors is that of all of them, including other users' processes, from /proc/stat; that
of a GPU is the driver's. Neither knows what the device computes: a busy processor may draw half or all of its TDP.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hpcdist.energy.sources import counters
from hpcdist.energy.sources.counters import IntegratedPower, SensorReadError, SourceInfo
from hpcdist.energy.sources.nvml import GpuSensor

STAT: Final = Path("/proc/stat")
CPU_NOTE: Final = "TDP x utilisation of all processors of the node"
GPU_NOTE: Final = "TDP x utilisation"
_IDLE: Final = (3, 4)  # of /proc/stat: idle, waiting for a device
_COUNTED: Final = 8  # user nice system idle iowait irq softirq steal; what guests used is in user and nice


def power_w(tdp_w: float, idle_fraction: float, utilisation: float) -> float:
    """Return the watts of a device that is busy for a share ``utilisation`` of the time, 0 to 1."""
    return tdp_w * (idle_fraction + (1 - idle_fraction) * utilisation)


def busy_seconds(line: str, ticks: float) -> tuple[float, float]:
    """Return the seconds that a line of /proc/stat counts as busy, and all of its seconds."""
    values = [int(word) for word in line.split()[1 : 1 + _COUNTED]]
    idle = sum(values[place] for place in _IDLE if place < len(values))
    return (sum(values) - idle) / ticks, sum(values) / ticks


class TdpProcessors:
    """The model of a node's processors, in uJ since its first read. ``tdp_w`` is that of all of them together."""

    kind = "cpu"
    name = "declared model of the processors"
    per_mj = 1000
    span: int | None = None
    gaps = 0
    about = SourceInfo(note=CPU_NOTE, declared=True)

    def __init__(
        self,
        tdp_w: float,
        idle_fraction: float,
        stat: Path = STAT,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tdp_w, self._idle_fraction = tdp_w, idle_fraction
        self._stat, self._clock_ns = stat, clock_ns
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._last: tuple[int, float, float] | None = None
        self._joules = 0.0

    def read(self) -> int:
        """Return the energy so far in uJ. Raises ReadError."""
        now_ns = self._clock_ns()
        busy_s, all_s = self._seconds()
        if self._last is None:
            self._last = now_ns, busy_s, all_s
        else:
            then_ns, busy_before_s, all_before_s = self._last
            if all_s > all_before_s:  # else the kernel's clock, of 10 ms, has not ticked
                share = min(1.0, max(0.0, (busy_s - busy_before_s) / (all_s - all_before_s)))
                self._joules += power_w(self._tdp_w, self._idle_fraction, share) * (now_ns - then_ns) / 1e9
                self._last = now_ns, busy_s, all_s
        return round(self._joules * 1e6)

    def power_mw(self) -> int | None:
        """Return None: the model has energy at once."""
        return None

    def _seconds(self) -> tuple[float, float]:
        try:
            return busy_seconds(counters.read_text(self._stat).partition("\n")[0], self._ticks)
        except (OSError, ValueError) as error:
            raise SensorReadError(counters.unreadable_reason(self._stat, error)) from None


def tdp_gpu(
    sensor: GpuSensor, about: SourceInfo, tdp_w: float, idle_fraction: float, interval_s: float
) -> IntegratedPower:
    """Return the model of a GPU of ``tdp_w`` watts, of its utilisation every ``interval_s`` seconds."""
    declared = SourceInfo(about.model, about.ranks, note=about.note, declared=True)

    def power_mw() -> int:
        return round(1e3 * power_w(tdp_w, idle_fraction, sensor.use()))

    return IntegratedPower(sensor.uuid, "gpu", power_mw, declared, interval_s, label=GPU_NOTE)
