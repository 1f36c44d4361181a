"""How busy a node is while a job runs: its processors, its memory, its GPUs and its network. What is not known is NaN.

A look costs a few reads under /proc and two questions a GPU; nothing is asked of the ranks themselves.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.energy import sysfiles
from hpcdist.energy.counters import ReadError
from hpcdist.energy.declared import busy_seconds
from hpcdist.energy.network import Network
from hpcdist.energy.nvml import GpuSensor

PROC: Final = Path("/proc")
SYS: Final = Path("/sys")
# What a look finds. Shares are of what there is: `cpu` of the processors that the ranks may use, `node_cpu` of all.
SHARES: Final = ("cpu", "node_cpu", "memory", "node_memory", "gpu", "gpu_memory")
BYTES: Final = ("memory_bytes", "available_bytes", "sent_bytes", "received_bytes")
COLUMNS: Final = (*SHARES, *BYTES)
_STARTED: Final = 19  # of the words of /proc/<pid>/stat behind the name


@dataclass(frozen=True)
class Process:
    """A rank as its node sees it: ``started`` tells it from a later process of the same number.

    ``space`` is the namespace of its number, outside of which the number means somebody else. ``cpus`` are those it may
    run on.
    """

    pid: int
    started: str
    space: str
    cpus: frozenset[int] = field(default_factory=frozenset)


def this_process() -> Process:
    """Return this process, for the rank that looks after its node (local)."""
    pid = os.getpid()
    return Process(pid, _started(PROC, pid), _space(), frozenset(os.sched_getaffinity(0)))


def _started(proc: Path, pid: int) -> str:
    try:
        return sysfiles.text(f"{proc}/{pid}/stat").rpartition(")")[2].split()[_STARTED]
    except (OSError, IndexError):
        return ""


def _space() -> str:
    try:
        return os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        return ""


class Utilisation:
    """Looks at a node for the ranks ``processes`` and their GPUs. ``proc`` and ``sys`` are where Linux shows itself."""

    def __init__(
        self, processes: Sequence[Process], gpus: Sequence[GpuSensor] = (), proc: Path = PROC, sys: Path = SYS
    ) -> None:
        self._processes, self._gpus, self._proc = processes, gpus, proc
        self._ours = all(process.space == _space() for process in processes)
        self._cpus = frozenset(cpu for process in processes for cpu in process.cpus)
        self._ticks = float(os.sysconf("SC_CLK_TCK"))
        self._last = self._seconds()
        self._network = Network(proc, sys)

    def look(self) -> np.ndarray:
        """Return what has been going on since the last look: (columns,) float64, as `COLUMNS`."""
        found = dict.fromkeys(COLUMNS, math.nan)
        found |= self._processors() | self._memory() | self._devices()
        network = self._network.read()
        if network is not None:
            found["sent_bytes"], found["received_bytes"] = map(float, network)
        return np.array([found[name] for name in COLUMNS])

    def _seconds(self) -> dict[str, tuple[float, float]]:
        """Return the busy and all seconds so far of each processor, and of all of them ("cpu")."""
        try:
            lines = [line for line in sysfiles.text(self._proc / "stat").splitlines() if line.startswith("cpu")]
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
        own = self._own_bytes()
        return {
            "memory": own / total,
            "node_memory": 1 - available / total,
            "memory_bytes": own,
            "available_bytes": available,
        }

    def _own_bytes(self) -> float:
        """Return what the ranks hold: private pages added up, and shared ones of the rank that maps most of them.

        Ranks of a node share what they share with all of the others. Files that are mapped cost nothing when memory is
        short, and do not count.
        """
        if not self._ours or not self._processes:
            return math.nan
        private, shared = 0.0, 0.0
        for process in self._processes:
            if _started(self._proc, process.pid) != process.started:
                continue  # it has ended, or another one has its number
            held = _kibibytes(self._proc / str(process.pid) / "status", ("RssAnon", "RssShmem"))
            private += held["RssAnon"]
            shared = max(shared, held["RssShmem"])
        return private + shared

    def _devices(self) -> dict[str, float]:
        shares = [(_asked(gpu.use), _filled(gpu)) for gpu in self._gpus]
        if not shares:
            return {}
        busy, filled = np.mean(np.array(shares), axis=0)  # NaN where one of them is not known
        return {"gpu": float(busy), "gpu_memory": float(filled)}


def _share(
    now: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]], names: Collection[str]
) -> float:
    """Return how busy ``names`` were on the whole; NaN where one is unknown, or no time has passed."""
    if not names or not all(name in now and name in before for name in names):
        return math.nan
    busy = sum(now[name][0] - before[name][0] for name in names)
    whole = sum(now[name][1] - before[name][1] for name in names)
    # The kernel's idle time may go back a little.
    return min(1.0, max(0.0, busy / whole)) if whole > 0 else math.nan


def _kibibytes(path: Path, names: Sequence[str]) -> dict[str, float]:
    """Return the bytes of lines such as "MemTotal:  16314260 kB"; NaN for those that are not there."""
    found = dict.fromkeys(names, math.nan)
    try:
        for line in sysfiles.text(path).splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = float(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return found


def _asked(question: Callable[[], float]) -> float:
    try:
        return question()
    except ReadError:
        return math.nan


def _filled(gpu: GpuSensor) -> float:
    try:
        used, total = gpu.memory()
    except ReadError:
        return math.nan
    return used / total if total else math.nan
