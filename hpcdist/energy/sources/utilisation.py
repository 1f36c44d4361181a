"""Utilisation of a node during a job (processors, memory, GPUs, network), and the energy model by TDP.

Unknown values are NaN. Slingshot traffic that bypasses the kernel's network interfaces is not counted. The energy model
is linear in the utilisation, although a busy processor may draw half or all of its TDP.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.energy.sources import counters
from hpcdist.energy.sources.counters import IntegratedPower, NoPowerReading, SensorReadError, SourceInfo
from hpcdist.energy.sources.nvml import GpuSensor

STAT: Final = Path("/proc/stat")
CPU_NOTE: Final = "TDP x utilisation of all processors of the node"
GPU_NOTE: Final = "TDP x utilisation"
_IDLE: Final = (3, 4)  # columns of /proc/stat: idle, iowait
_COUNTED: Final = 8  # user nice system idle iowait irq softirq steal; user and nice include the time of guests


def power_w(tdp_w: float, idle_fraction: float, utilisation: float) -> float:
    """Return the modelled watts of a device, from ``idle_fraction * tdp_w`` when idle to ``tdp_w`` when busy."""
    return tdp_w * (idle_fraction + (1 - idle_fraction) * utilisation)


def busy_seconds(line: str, ticks: float) -> tuple[float, float]:
    """Return (busy, total) processor seconds from a ``line`` of /proc/stat. ``ticks``: clock ticks per second."""
    values = [int(word) for word in line.split()[1 : 1 + _COUNTED]]
    idle = sum(values[column] for column in _IDLE if column < len(values))
    return (sum(values) - idle) / ticks, sum(values) / ticks


class TdpProcessors(NoPowerReading):
    """Energy counter of a node's processors in uJ, modelled by thermal design power (TDP) and utilisation."""

    kind = "cpu"
    name = "declared model of the processors"
    per_mj = 1000
    span: int | None = None
    about = SourceInfo(note=CPU_NOTE, declared=True)

    def __init__(
        self, tdp_w: float, idle_fraction: float, stat: Path = STAT, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._tdp_w, self._idle_fraction = tdp_w, idle_fraction
        self._stat, self._clock_ns = stat, clock_ns
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._last: tuple[int, float, float] | None = None
        self._share = 0.0  # utilisation between the last two ticks of the kernel's clock
        self._joules = 0.0

    def read(self) -> int:
        now_ns = self._clock_ns()
        busy_s, all_s = self._seconds()
        if self._last is None:
            self._last = now_ns, busy_s, all_s
        else:
            then_ns, busy_before_s, all_before_s = self._last
            if all_s > all_before_s:  # otherwise the kernel's clock (10 ms) has not ticked, and the last share is used
                self._share = min(1.0, max(0.0, (busy_s - busy_before_s) / (all_s - all_before_s)))
                busy_before_s, all_before_s = busy_s, all_s
            self._joules += power_w(self._tdp_w, self._idle_fraction, self._share) * (now_ns - then_ns) / 1e9
            self._last = now_ns, busy_before_s, all_before_s
        return round(self._joules * 1e6)

    def _seconds(self) -> tuple[float, float]:
        try:
            return busy_seconds(counters.read_text(self._stat).partition("\n")[0], self._ticks)
        except (OSError, ValueError) as error:
            raise SensorReadError(counters.unreadable_reason(self._stat, error)) from None


def tdp_gpu(
    sensor: GpuSensor, about: SourceInfo, tdp_w: float, idle_fraction: float, interval_s: float
) -> IntegratedPower:
    """Return a GPU energy counter that models the power by `power_w` from the utilisation of ``sensor``.

    ``about``: description of the GPU. ``tdp_w``, ``idle_fraction``: see `power_w`. ``interval_s``: seconds between
    readings.
    """
    declared = SourceInfo(about.model, about.ranks, note=about.note, declared=True)

    def power_mw() -> int:
        return round(1e3 * power_w(tdp_w, idle_fraction, sensor.use()))

    return IntegratedPower(sensor.uuid, power_mw, declared, interval_s, label=GPU_NOTE)


WORD_BYTES: Final = 4  # InfiniBand counts words of four bytes
INFINIBAND: Final = "32"  # ARPHRD_INFINIBAND, of an interface for IP over InfiniBand; its port counts the same bytes
_RECEIVED: Final = 0  # column of /proc/net/dev
_SENT: Final = 8


class NetworkCounters:
    """Counters of the bytes sent and received by the network interfaces of this node. Local."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._dev, self._sys = proc / "net" / "dev", sys
        self._ports = sorted((sys / "class" / "infiniband").glob("*/ports/*/counters"))
        self._interfaces = frozenset(self._real())
        self._last: dict[str, int] = {}
        self._sums = [0, 0]
        self.read()

    def read(self) -> tuple[int, int] | None:
        """Return (bytes sent, bytes received) by this node since this object was created; None if unreadable. Local."""
        # If a counter was reset, for example after a port went down, counting continues from its new value.
        now = self._counters()
        if not now:
            return None
        for name, value in now.items():
            used = value - self._last.get(name, value)
            self._sums[name.endswith("received")] += max(0, used)
        self._last = now
        return self._sums[0], self._sums[1]

    def _counters(self) -> dict[str, int]:
        totals = {}
        for name, columns in _interface_table(self._dev).items():
            if name in self._interfaces:
                totals[f"{name} sent"], totals[f"{name} received"] = columns[_SENT], columns[_RECEIVED]
        for port in self._ports:
            try:
                totals[f"{port} sent"] = WORD_BYTES * int(counters.read_text(port / "port_xmit_data"))
                totals[f"{port} received"] = WORD_BYTES * int(counters.read_text(port / "port_rcv_data"))
            except (OSError, ValueError):
                continue  # a port without these counters
        return totals

    def _real(self) -> list[str]:
        folder = self._sys / "class" / "net"
        names = [name for name in _interface_table(self._dev) if name != "lo"]
        devices = [name for name in names if (folder / name / "device").exists()]
        interfaces = devices or [name for name in names if not (folder / name / "bridge").exists()]
        types = {name: counters.read_word(folder / name / "type") for name in interfaces}
        return [name for name in interfaces if not (self._ports and types[name] == INFINIBAND)]


def _interface_table(path: Path) -> dict[str, list[int]]:
    try:
        lines = counters.read_text(path).splitlines()[2:]
        split = [line.partition(":") for line in lines]
        return {name.strip(): [int(word) for word in rest.split()] for name, _, rest in split}
    except (OSError, ValueError):
        return {}


PROC: Final = Path("/proc")
SYS: Final = Path("/sys")
# Columns of `look`. "cpu" is the busy share of the processors that the ranks may use, "node_cpu" of all processors.
SHARES: Final = ("cpu", "node_cpu", "memory", "node_memory", "gpu", "gpu_memory")
BYTES: Final = ("memory_bytes", "available_bytes", "sent_bytes", "received_bytes")
COLUMNS: Final = (*SHARES, *BYTES)
_STARTED: Final = 19  # index of the start time in the words of /proc/<pid>/stat after the name


@dataclass(frozen=True)
class RankProcess:
    """Process of a rank on its node."""

    pid: int
    started: str  # start time, to detect a later process with the same pid
    space: str  # PID namespace of `pid`
    cpus: frozenset[int] = field(default_factory=frozenset)  # processors that the process may run on


def this_process() -> RankProcess:
    """Return the `RankProcess` of this process: pid, start time, PID namespace and CPU affinity. Local."""
    pid = os.getpid()
    return RankProcess(pid, _started(PROC, pid), _space(), frozenset(os.sched_getaffinity(0)))


def _started(proc: Path, pid: int) -> str:
    try:
        return counters.read_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()[_STARTED]
    except (OSError, IndexError):
        return ""


def _space() -> str:
    try:
        return os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        return ""


class NodeUtilisation:
    """Utilisation of the processors, memory, GPUs and network of a node. ``gpus``: sensors of the ranks' GPUs."""

    def __init__(
        self, processes: Sequence[RankProcess], gpus: Sequence[GpuSensor] = (), proc: Path = PROC, sys: Path = SYS
    ) -> None:
        self._processes, self._gpus, self._proc = processes, gpus, proc
        self._ours = all(process.space == _space() for process in processes)
        self._cpus = frozenset(cpu for process in processes for cpu in process.cpus)
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._last = self._seconds()
        self._network = NetworkCounters(proc, sys)

    def look(self) -> np.ndarray:
        """Return a float64 array with a value per name in `COLUMNS`. Processor shares are means since the last call."""
        figures = dict.fromkeys(COLUMNS, math.nan)
        figures |= self._processors() | self._memory() | self._devices()
        network = self._network.read()
        if network is not None:
            figures["sent_bytes"], figures["received_bytes"] = map(float, network)
        return np.array([figures[name] for name in COLUMNS])

    def _seconds(self) -> dict[str, tuple[float, float]]:
        try:
            lines = [line for line in counters.read_text(self._proc / "stat").splitlines() if line.startswith("cpu")]
            return {line.partition(" ")[0]: busy_seconds(line, self._ticks) for line in lines}
        except (OSError, ValueError):
            return {}

    def _processors(self) -> dict[str, float]:
        now, before = self._seconds(), self._last
        self._last = now
        return {
            "cpu": _share(now, before, [f"cpu{number}" for number in self._cpus]),
            "node_cpu": _share(now, before, ["cpu"]),
        }

    def _memory(self) -> dict[str, float]:
        node = _kibibytes(self._proc / "meminfo", ("MemTotal", "MemAvailable"))
        total, available = node["MemTotal"], node["MemAvailable"]
        rank_bytes = self._rank_bytes()
        return {
            "memory": rank_bytes / total,
            "node_memory": 1 - available / total,
            "memory_bytes": rank_bytes,
            "available_bytes": available,
        }

    def _rank_bytes(self) -> float:
        if not self._ours or not self._processes:
            return math.nan
        private, shared = 0.0, 0.0
        for process in self._processes:
            if _started(self._proc, process.pid) != process.started:
                continue  # the process has ended, or another process has its pid
            held = _kibibytes(self._proc / str(process.pid) / "status", ("RssAnon", "RssShmem"))
            private += held["RssAnon"]
            shared = max(shared, held["RssShmem"])  # the ranks share these pages
        return private + shared

    def _devices(self) -> dict[str, float]:
        shares = [(_ask_or_nan(gpu.use), _ask_or_nan(gpu.memory_share)) for gpu in self._gpus]
        if not shares:
            return {}
        busy, filled = np.mean(np.array(shares), axis=0)  # NaN if a GPU is unknown
        return {"gpu": float(busy), "gpu_memory": float(filled)}


def _share(
    now: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]], names: Collection[str]
) -> float:
    if not names or not all(name in now and name in before for name in names):
        return math.nan
    busy = sum(now[name][0] - before[name][0] for name in names)
    total = sum(now[name][1] - before[name][1] for name in names)
    # The kernel's idle time may go back a little.
    return min(1.0, max(0.0, busy / total)) if total > 0 else math.nan


def _kibibytes(path: Path, names: Sequence[str]) -> dict[str, float]:
    # Lines like "MemTotal:  16314260 kB". The sizes are in bytes.
    sizes = dict.fromkeys(names, math.nan)
    try:
        for line in counters.read_text(path).splitlines():
            name, _, rest = line.partition(":")
            if name in sizes:
                sizes[name] = float(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # the kernel uses another format, or hides the file: missing values are NaN
    return sizes


def _ask_or_nan(question: Callable[[], float]) -> float:
    try:
        return question()
    except SensorReadError:
        return math.nan
