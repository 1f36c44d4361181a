"""Energy counters that Linux shows as files: RAPL in /sys/class/powercap, and a Cray node in /sys/cray/pm_counters.

RAPL measures processors and their memory. Only the zones "package" and "dram" are read: "core" and "uncore" are parts
of a package, and "psys" contains all zones. Since CVE-2020-8694, only root may read zones by default.

A Cray file has a number, its unit and, on later machines, the time: "81147367 J 1700061210920464 us". The files are
readable by everybody, and updated ten times a second. Source: HPE, "User Access to Compute Node Power Data".

    freshness     number of updates: values are consistent if this number is equal before and after the reads
    startup       changes when the blade's controller starts, and resets its counters
    generation    changes with the power cap
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from hpcdist.energy.sources import counters
from hpcdist.energy.sources.counters import (
    CounterResetError,
    EnergyCounter,
    NoPowerReading,
    SensorReadError,
    SourceInfo,
)

ZONES = "intel-rapl:*"  # also for AMD; intel-rapl-mmio shows the same package again


class RaplZone(NoPowerReading):
    """RAPL counter of the energy of a processor package or its memory, in uJ. It wraps within minutes."""

    per_mj = 1000

    def __init__(self, path: Path, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._energy = path / "energy_uj"
        try:
            self.span: int | None = int((path / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            self.span = None  # readable until its first wrap

    def read(self) -> int:
        try:
            return int(counters.read_text(self._energy))
        except (OSError, ValueError) as error:
            raise SensorReadError(counters.unreadable_reason(self._energy, error)) from None


def find_rapl(root: Path) -> tuple[list[EnergyCounter], dict[str, str]]:
    """Return (readable RAPL counters in ``root``, {"cpu" or "dram": reason why these counters are missing}). Local."""
    missing: dict[str, str] = {}
    by_kind: dict[str, list[RaplZone]] = {"cpu": [], "dram": []}
    for zone in _zones(root):
        by_kind[zone.kind].append(zone)
        try:
            zone.read()
        except SensorReadError as error:
            missing.setdefault(zone.kind, f"{zone.name}: {error}")
    for kind, zones in by_kind.items():
        if not zones:
            missing[kind] = f"{root} shows no {kind} zone of RAPL" if root.is_dir() else f"{root} does not exist"
    # Half of a machine is no measurement: a kind is read completely, or not at all.
    return [zone for kind, zones in by_kind.items() if kind not in missing for zone in zones], missing


def _zones(root: Path) -> list[RaplZone]:
    paths = {path.name: path for pattern in (f"{ZONES}/{ZONES}", ZONES) for path in root.glob(pattern)}
    names = {zone: counters.read_word(path / "name") for zone, path in sorted(paths.items())}
    zones = []
    for zone, name in names.items():
        if name.startswith("package"):
            zones.append(RaplZone(paths[zone], name, "cpu"))
        elif name == "dram":
            package = names.get(zone.rpartition(":")[0], zone)
            zones.append(RaplZone(paths[zone], f"{package} dram", "dram"))
    return zones


ATTEMPTS: Final = 4
STALE_NS: Final = 3_000_000_000  # thirty missing updates: the controller stands still
MICRO: Final = {"J": 10**6, "mJ": 10**3, "uJ": 1, "W": 10**6, "mW": 10**3, "uW": 1}
CAPPED: Final = "its power cap was changed meanwhile"
NODE: Final = ("node", "energy", "power")
PARTS: Final = (("cpu", "cpu_energy", "cpu_power"), ("dram", "memory_energy", "memory_power"))


class PmCounterFiles:
    """Counter files of a Cray node, read at the same moment. ``capped``: True once the power cap has changed."""

    def __init__(self, directory: Path, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._directory, self._clock_ns = directory, clock_ns
        self._values: dict[str, int | SensorReadError] = {}
        self._freshness = ""
        self._renewed_ns = clock_ns()
        self._startup = self._read("startup", optional=True)
        self._generation = self._read("generation", optional=True)
        self.capped = False
        self.files: tuple[str, ...] = ()

    def watch(self, *files: str) -> None:
        """Add file names to the set of files that `value` reads at the same moment."""
        self.files = tuple(dict.fromkeys((*self.files, *files)))
        self._freshness = ""

    def value(self, file: str) -> int:
        """Return the value of ``file`` in uJ or uW. Raises SensorReadError, and CounterResetError after a reset."""
        # Like a seqlock: the values are consistent if freshness is equal before and after the reads.
        for _ in range(ATTEMPTS):
            before = self._read("freshness")
            if before == self._freshness:
                break
            values = {name: self._number(name) for name in self.files}
            startup, generation = (self._read(name, optional=True) for name in ("startup", "generation"))
            if self._read("freshness") == before:
                if startup and self._startup and startup != self._startup:
                    raise CounterResetError(
                        f"pm_counters/startup changed from {self._startup} to {startup}: the power controller of the "
                        "node was restarted"
                    )
                self._values, self._freshness, self._renewed_ns = values, before, self._clock_ns()
                self.capped = self.capped or generation != self._generation
                break
        else:
            raise SensorReadError(
                f"{self._directory}/freshness changed during each of {ATTEMPTS} reads of the counters; try again later"
            )
        waited_ns = self._clock_ns() - self._renewed_ns
        if waited_ns > STALE_NS:
            raise SensorReadError(
                f"the counters are no longer updated: {self._directory}/freshness has been {before} for "
                f"{waited_ns / 1e9:.0f} s, but should change ten times per second; ask the site to restart the counters"
            )
        value = self._values[file]
        if isinstance(value, SensorReadError):
            raise value
        return value

    def _number(self, name: str) -> int | SensorReadError:
        try:
            words = self._read(name).split()
        except SensorReadError as error:
            return error
        try:
            return int(words[0]) * MICRO[words[1] if len(words) > 1 else ("J" if name.endswith("energy") else "W")]
        except (IndexError, KeyError, ValueError):
            return SensorReadError(f"{self._directory}/{name} contains {' '.join(words)!r}, not a number and its unit")

    def _read(self, name: str, *, optional: bool = False) -> str:
        try:
            return counters.read_text(f"{self._directory}/{name}").strip()
        except OSError as error:
            if optional and isinstance(error, FileNotFoundError):
                return ""
            raise SensorReadError(counters.unreadable_reason(f"{self._directory}/{name}", error)) from None


class PmCounter:
    """Energy counter of a Cray node, in uJ. If its value decreases, the counter is not read any more."""

    per_mj = 1000
    span: int | None = None
    gaps = 0

    def __init__(self, group: PmCounterFiles, kind: str, energy: str, power: str) -> None:
        self.name, self.kind = f"pm_counters/{energy}", kind
        self._about = SourceInfo(power_field="instant" if power else "", power_scope=kind if power else "")
        self._group, self._energy, self._power = group, energy, power

    @property
    def about(self) -> SourceInfo:
        return replace(self._about, note=CAPPED) if self._group.capped else self._about

    def read(self) -> int:
        return self._group.value(self._energy)

    def power_mw(self) -> int | None:
        return self._group.value(self._power) // 1000 if self._power else None


def find_cray(directory: Path) -> tuple[list[EnergyCounter], dict[str, str]]:
    """Return (readable Cray counters, first the whole node; {"node": reason} if there are no counters). Local."""
    if not directory.is_dir():
        return [], {"node": f"{directory} does not exist: this is not a Cray, or its node does not show its counters"}
    try:
        group = PmCounterFiles(directory)
        group.watch("energy")
        group.value("energy")
    except SensorReadError as error:
        return [], {"node": str(error)}
    counters: list[EnergyCounter] = []
    for kind, energy, power in (NODE, *PARTS, *_accelerators(directory)):
        files = [name for name in (energy, power) if _readable(directory, name)]
        if energy in files:
            group.watch(*files)
            counters.append(PmCounter(group, kind, energy, power if power in files else ""))
    return counters, {}


def _accelerators(directory: Path) -> list[tuple[str, str, str]]:
    names = [path.name.removesuffix("_energy") for path in directory.glob("accel[0-9]*_energy")]
    numbered = sorted((int(name[5:]), name) for name in names if name[5:].isdigit())
    return [("gpu", f"{name}_energy", f"{name}_power") for _, name in numbered]


def _readable(directory: Path, name: str) -> bool:
    group = PmCounterFiles(directory)
    group.watch(name)
    try:
        group.value(name)
    except SensorReadError:
        return False
    return True
