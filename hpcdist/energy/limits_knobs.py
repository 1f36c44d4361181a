"""What limits of power and clocks have in common, be they those of GPUs or of processors."""

from dataclasses import dataclass
from typing import Final, Protocol

from hpcdist.errors import ConfigurationError

CURE: Final = "sweep what needs no permission: --sweep KEY=V1,V2"
AS_ROOT: Final = "run this as root (sudo -E env PATH=$PATH ...), ask the site to let jobs do so"
ROUNDED: Final = 0.5  # of a unit: RAPL keeps eighths of a watt, NVML whole mW


@dataclass(frozen=True)
class Allowed:
    """What a device takes, in W or MHz; None is what it does not tell. ``values``: only these."""

    least: float | None = None
    most: float | None = None
    default: float | None = None
    values: tuple[float, ...] = ()


class Knob(Protocol):
    """One limit of one device. ``device`` and ``place`` are what a record knows it by; ``name`` is for people."""

    kind: str
    device: str
    place: str
    name: str
    unit: str
    per_unit: int  # of the driver's own in one of ``unit``

    def allowed(self) -> Allowed:
        """Return what may be asked for. Raises MissingCapabilityError where there is no such limit."""

    def now(self) -> int | None:
        """Return what is set, in the driver's unit; None where the driver does not tell. Raises like `allowed`."""

    def in_force(self) -> float | None:
        """Return the limit that holds, in W or MHz; None where nobody can tell."""

    def put(self, value: int | None) -> None:
        """Set the limit, in the driver's unit; None: free it. Raises MissingCapabilityError with the reason."""

    def cure(self, value: int | None) -> str:
        """Return the command by which a person would put ``value``."""


def check(knob: Knob, value: float) -> None:
    """Raise ConfigurationError where ``value``, in W or MHz, is none that ``knob`` takes."""
    allowed = knob.allowed()
    if allowed.values and value not in allowed.values:
        nearest = min(allowed.values, key=lambda known: abs(known - value))
        raise ConfigurationError(
            f"{value:g} {knob.unit} for {knob.name}: it takes {allowed.least:g} to {allowed.most:g} {knob.unit} in "
            f"steps; the nearest is {nearest:g} {knob.unit}"
        )
    least, most = allowed.least or 0.0, allowed.most
    if not (value > 0 and value >= least and (most is None or value <= most)):
        raise ConfigurationError(
            f"{value:g} {knob.unit} for {knob.name}: it takes {ranged(allowed, knob.unit)}; choose values in there"
        )


def ranged(allowed: Allowed, unit: str) -> str:
    """Return what is allowed as people write it."""
    least = "more than 0" if allowed.least is None else f"{allowed.least:g}"
    if allowed.most is None:
        return f"{least} {unit} and more (it does not tell the most)"
    return f"{least} to {allowed.most:g} {unit}"


def same(one: float | None, other: float | None) -> bool:
    """Whether two limits, in W or MHz, are the same but for what devices round; what is not known is."""
    return one is None or other is None or abs(one - other) <= ROUNDED
