"""Power limits of processors, which Linux shows beside the counters of RAPL under /sys/class/powercap, in uW.

A restart of the machine puts them back. They hold for everything that runs on the node.
"""

from pathlib import Path
from typing import Final

from hpcdist.energy import rapl
from hpcdist.energy.limits_knobs import AS_ROOT, CURE, Allowed
from hpcdist.errors import MissingCapabilityError

CPU_POWER: Final = "rapl-power"
LONG_TERM: Final = "long_term"


class CpuPower:
    """The long-term power limit of a processor package: an average over ``window_s``, above which bursts may go."""

    kind, unit, per_unit = CPU_POWER, "W", 1_000_000

    def __init__(self, root: Path, zone: str) -> None:
        self.place, self.device = str(root), zone
        self._zone = root / zone
        self.name = f"{zone} ({self._text('name') or 'no name'})"
        self._limit = self._zone / f"constraint_{self._number()}_power_limit_uw"

    @property
    def window_s(self) -> float | None:
        """Return over how many seconds the limit is an average; None where the kernel does not tell."""
        value = self._text(f"constraint_{self._number()}_time_window_us")
        return int(value) / 1e6 if value.isdecimal() else None

    def _number(self) -> int:
        named = {number: self._text(f"constraint_{number}_name") for number in (0, 1, 2)}
        return next((number for number, name in named.items() if name == LONG_TERM), 0)

    def _text(self, file: str) -> str:
        try:
            return (self._zone / file).read_text().strip()
        except OSError:
            return ""

    def allowed(self) -> Allowed:
        """Return the most that the kernel tells; some machines show 0, which is no limit of the limit."""
        self.now()
        if self._text("enabled") == "0":
            raise MissingCapabilityError(
                f"{self.name}: its limits are switched off; write 1 to {self._zone / 'enabled'} as root, or {CURE}"
            )
        most = self._text(f"constraint_{self._number()}_max_power_uw")
        return Allowed(most=int(most) / self.per_unit if most.isdecimal() and int(most) else None)

    def now(self) -> int | None:
        """Return the limit in uW."""
        try:
            return int(self._limit.read_text())
        except FileNotFoundError:
            raise MissingCapabilityError(
                f"{self.name}: {self._limit} does not exist: this processor shows energy, and no limit; {CURE}"
            ) from None
        except (OSError, ValueError) as error:
            raise MissingCapabilityError(f"{self._limit} cannot be read: {error}") from None

    def in_force(self) -> float | None:
        """Return what the kernel shows, in W."""
        found = self.now()
        return None if found is None else found / self.per_unit

    def put(self, value: int | None) -> None:
        """Write the limit in uW."""
        try:
            # No O_CREAT: where the file has gone, none of ours must stand in its place.
            with open(self._limit, "r+") as file:
                file.write(f"{value}\n")
                file.truncate()
        except PermissionError:
            raise MissingCapabilityError(
                f"{self._limit} may be written by root only; {AS_ROOT} (chmod g+w), or {CURE}"
            ) from None
        except OSError as error:
            raise MissingCapabilityError(
                f"{self._limit} cannot be written: {error.strerror}; where firmware has locked it, dmesg says so"
            ) from None

    def cure(self, value: int | None) -> str:
        """Return the command of a shell."""
        return f"echo {value} | sudo tee {self._limit}"


def packages(root: Path) -> list[CpuPower]:
    """Return the limits of all processor packages under ``root``. Raises MissingCapabilityError where it shows none."""
    zones = sorted(path.name for path in root.glob(rapl.ZONES) if path.name.count(":") == 1)
    found = [CpuPower(root, zone) for zone in zones]
    found = [one for one in found if "(package" in one.name]
    if not found:
        there = "shows no processor package" if root.is_dir() else "does not exist"
        raise MissingCapabilityError(f"{root} {there}: there is no power limit of a processor to change; {CURE}")
    return found
