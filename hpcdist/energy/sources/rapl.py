"""RAPL energy counters of processors and their memory, which Linux shows in /sys/class/powercap.

Only the zones "package" and "dram" are read: "core" and "uncore" are parts of a package, and "psys" contains all zones.
Since CVE-2020-8694, only root may read zones by default.
"""

from pathlib import Path

from hpcdist.energy.sources import counters
from hpcdist.energy.sources.counters import EnergyCounter, NoPowerReading, SensorReadError

ZONES = "intel-rapl:*"  # also for AMD; intel-rapl-mmio shows the same package again


class RaplZone(NoPowerReading):
    """Energy counter (RAPL) of a processor package or its memory, in uJ. The counter overflows within minutes."""

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


def find(root: Path) -> tuple[list[EnergyCounter], dict[str, str]]:
    """Return the readable RAPL zones in ``root``, and {"cpu" or "dram": reason why zones are missing}. Local."""
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
    names = {place: _name(path) for place, path in sorted(paths.items())}
    zones = []
    for place, name in names.items():
        if name.startswith("package"):
            zones.append(RaplZone(paths[place], name, "cpu"))
        elif name == "dram":
            package = names.get(place.rpartition(":")[0], place)
            zones.append(RaplZone(paths[place], f"{package} dram", "dram"))
    return zones


def _name(path: Path) -> str:
    try:
        return (path / "name").read_text().strip()
    except OSError:
        return ""
