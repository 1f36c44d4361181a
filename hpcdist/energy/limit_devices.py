"""Limits of devices: power and locked clocks of NVIDIA GPUs, power of processor packages.

Limits hold for the whole node, until a restart. Without persistence mode, NVML also forgets a limit when the last user
closes the GPU: keep `NvmlDriver` open while a limit must hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hpcdist.energy.sources import nvml, sysfs
from hpcdist.energy.sources.counters import read_word
from hpcdist.errors import ConfigurationError, MissingCapabilityError

UNPRIVILEGED_HINT: Final = "vary a recipe key, which needs no permission: --sweep KEY=V1,V2"
ROOT_HINT: Final = "run this as root (sudo -E env PATH=$PATH ...), ask the site to permit this to jobs"
ROUNDING: Final = 0.5  # W or MHz: RAPL rounds to eighths of a watt, NVML to whole mW


@dataclass(frozen=True)
class LimitRange:
    """Range of the limits to which a device can be set, in W or MHz. None: unknown."""

    least: float | None = None
    most: float | None = None
    default: float | None = None
    values: tuple[float, ...] = ()  # the only allowed limits, if there are such


class DeviceLimit(Protocol):
    """Protocol of a power limit or clock limit of a device. Each driver has a unit for the limit, such as mW."""

    kind: str
    device: str
    place: str  # RAPL directory of a processor, or "" for a GPU
    name: str
    unit: str
    per_unit: int  # driver units per ``unit``

    def allowed(self) -> LimitRange:
        """Return the range of allowed values. Raises MissingCapabilityError if the device does not have this limit."""

    def now(self) -> int | None:
        """Return the current limit in the driver's unit, or None if unknown. Raises MissingCapabilityError."""

    def in_force(self) -> float | None:
        """Return the limit that the device enforces, in W or MHz, or None if it is unreadable."""

    def put(self, value: int | None) -> None:
        """Set the limit to ``value`` in the driver's unit; None removes the limit. Raises MissingCapabilityError."""

    def cure(self, value: int | None) -> str:
        """Return a shell command by which the user can set this limit to ``value``."""


def check_value(knob: DeviceLimit, value: float) -> None:
    """Raise ConfigurationError unless the limit ``knob`` of a device may be set to ``value``, in W or MHz."""
    allowed = knob.allowed()
    if allowed.values and value not in allowed.values:
        nearest = min(allowed.values, key=lambda choice: abs(choice - value))
        raise ConfigurationError(
            f"{value:g} {knob.unit} is invalid for {knob.name}: expected one of the {len(allowed.values)} values from "
            f"{allowed.least:g} to {allowed.most:g} {knob.unit} that the device supports; set the nearest value, "
            f"{nearest:g} {knob.unit}"
        )
    least, most = allowed.least or 0.0, allowed.most
    if not (value > 0 and value >= least and (most is None or value <= most)):
        limits = range_text(allowed, knob.unit)
        raise ConfigurationError(f"{value:g} {knob.unit} is invalid for {knob.name}: expected {limits}")


def range_text(allowed: LimitRange, unit: str) -> str:
    """Return ``allowed`` as text, such as "100 to 400 W"."""
    least = "more than 0" if allowed.least is None else f"{allowed.least:g}"
    if allowed.most is None:
        return f"{least} {unit} and more (its maximum is unknown)"
    return f"{least} to {allowed.most:g} {unit}"


def is_equal_limit(first: float | None, second: float | None) -> bool:
    """Return True if two limits in W or MHz are equal up to rounding, or if one of them is None (unknown)."""
    return first is None or second is None or abs(first - second) <= ROUNDING


GPU_POWER: Final = "nvml-power"
GPU_CLOCK: Final = "nvml-clock"
HIGHEST_PERFORMANCE_STATE: Final = 0  # the performance state of a GPU at work


class _GpuLimit:
    place, what = "", ""

    def __init__(self, uuid: str) -> None:
        self._nvml = nvml.load_pynvml()
        self.device = uuid
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.name = f"{uuid} ({self._nvml.nvmlDeviceGetName(self._handle)})"
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(
                f"{uuid}: this process cannot access the GPU ({error}); request the GPU from the batch system"
            ) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        binding, name, setting = self._nvml, self.name, self.what
        try:
            yield
        except binding.NVMLError_NoPermission as error:
            raise MissingCapabilityError(
                f"{name}: the {setting} may be changed by root only (the driver says: {error}); "
                f"{ROOT_HINT}, or {UNPRIVILEGED_HINT}"
            ) from None
        except (binding.NVMLError_NotSupported, binding.NVMLError_FunctionNotFound) as error:
            suggestion = UNPRIVILEGED_HINT
            raise MissingCapabilityError(f"{name}: the {setting} cannot be changed ({error}); {suggestion}") from None
        except binding.NVMLError_InvalidArgument as error:
            raise ConfigurationError(
                f"{name}: the driver rejects the requested {setting} ({error}); choose a value that `nvidia-smi -q -i "
                f"{self.device} -d POWER,SUPPORTED_CLOCKS` allows"
            ) from None
        except binding.NVMLError as error:
            raise MissingCapabilityError(
                f"{name}: the {setting} cannot be read or changed ({error}); check the GPU with nvidia-smi"
            ) from None


class GpuPowerLimit(_GpuLimit):
    """Limit of the mean power of a GPU, which the GPU's firmware enforces (nvmlDeviceSetPowerManagementLimit)."""

    kind, unit, per_unit, what = GPU_POWER, "W", 1000, "power limit"

    def allowed(self) -> LimitRange:
        with self._explained():
            least, most = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
            default = self._nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle)
        return LimitRange(least / self.per_unit, most / self.per_unit, default / self.per_unit)

    def now(self) -> int:
        with self._explained():
            return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))

    def in_force(self) -> float | None:
        """Return the smallest of the GPU's power limits, in W."""
        try:
            return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / self.per_unit
        except self._nvml.NVMLError:
            return self.now() / self.per_unit

    def put(self, value: int | None) -> None:
        with self._explained():
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, value)

    def cure(self, value: int | None) -> str:
        return f"sudo nvidia-smi -i {self.device} -pl {(value or 0) / self.per_unit:g}"


class GpuClockLimit(_GpuLimit):
    """Limit that locks the clock of a GPU to one frequency (nvmlDeviceSetGpuLockedClocks)."""

    kind, unit, per_unit, what = GPU_CLOCK, "MHz", 1, "clock"

    def allowed(self) -> LimitRange:
        """Return the range of the GPU's graphics clocks in MHz, and all allowed clocks if the driver lists them."""
        unlisted = (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound, ValueError, IndexError)
        with self._explained(), suppress(*unlisted):
            memory = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
            values = sorted(self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory))
            return LimitRange(values[0], values[-1], values=tuple(map(float, values)))
        state = (self._nvml.NVML_CLOCK_GRAPHICS, HIGHEST_PERFORMANCE_STATE)
        try:
            least, most = self._nvml.nvmlDeviceGetMinMaxClockOfPState(self._handle, *state)
            return LimitRange(float(least), float(most))
        except self._nvml.NVMLError:
            return LimitRange()

    def now(self) -> int | None:
        """Return None, because the driver does not report locked clocks."""
        return None

    def in_force(self) -> float | None:
        return None

    def put(self, value: int | None) -> None:
        with self._explained():
            if value is None:
                self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
            else:
                self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, value, value)

    def cure(self, value: int | None) -> str:
        return f"sudo nvidia-smi -i {self.device} " + ("-rgc" if value is None else f"-lgc {value},{value}")


GPU_LIMIT_KINDS: Final[Mapping[str, Callable[[str], DeviceLimit]]] = {
    GPU_POWER: GpuPowerLimit,
    GPU_CLOCK: GpuClockLimit,
}


def gpu_limits(driver: nvml.NvmlDriver, uuids: Sequence[str], kind: str) -> list[DeviceLimit]:
    """Return the limits of ``kind`` (`GPU_POWER` or `GPU_CLOCK`) of GPUs ``uuids``. Raises MissingCapabilityError."""
    partitioned = {gpu.uuid for gpu in driver.gpus() if gpu.partitioned}
    for uuid in uuids:
        if uuid in partitioned:
            raise MissingCapabilityError(
                f"{uuid}: this GPU is in MIG mode, so that a limit would also apply to instances of other users; "
                f"{UNPRIVILEGED_HINT}"
            )
    return [GPU_LIMIT_KINDS[kind](uuid) for uuid in dict.fromkeys(uuids)]


CPU_POWER: Final = "rapl-power"
LONG_TERM: Final = "long_term"


class CpuPowerLimit:
    """Long-term power limit of a processor package, which limits the mean power over ``window_s`` seconds."""

    kind, unit, per_unit = CPU_POWER, "W", 1_000_000

    def __init__(self, root: Path, zone: str) -> None:
        self.place, self.device = str(root), zone
        self._zone = root / zone
        self.name = f"{zone} ({self._text('name') or 'no name'})"
        self._limit = self._zone / f"constraint_{self._number()}_power_limit_uw"

    @property
    def window_s(self) -> float | None:
        """Averaging time of the limit in seconds, or None if the kernel does not report it."""
        value = self._text(f"constraint_{self._number()}_time_window_us")
        return int(value) / 1e6 if value.isdecimal() else None

    def _number(self) -> int:
        named = {number: self._text(f"constraint_{number}_name") for number in (0, 1, 2)}
        return next((number for number, name in named.items() if name == LONG_TERM), 0)

    def _text(self, file: str) -> str:
        return read_word(self._zone / file)

    def allowed(self) -> LimitRange:
        """Return the range of allowed limits in W."""
        self.now()
        if self._text("enabled") == "0":
            raise MissingCapabilityError(
                f"{self.name}: the power limits are switched off; write 1 to {self._zone / 'enabled'} as root, or "
                f"{UNPRIVILEGED_HINT}"
            )
        most = self._text(f"constraint_{self._number()}_max_power_uw")
        return LimitRange(most=int(most) / self.per_unit if most.isdecimal() and int(most) else None)

    def now(self) -> int:
        try:
            return int(self._limit.read_text())
        except FileNotFoundError:
            raise MissingCapabilityError(
                f"{self.name}: {self._limit} does not exist: this processor has an energy counter but no power limit; "
                f"{UNPRIVILEGED_HINT}"
            ) from None
        except (OSError, ValueError) as error:
            raise MissingCapabilityError(f"file {self._limit} cannot be read ({error}); {UNPRIVILEGED_HINT}") from None

    def in_force(self) -> float:
        return self.now() / self.per_unit

    def put(self, value: int | None) -> None:
        try:
            # No O_CREAT: if the file has vanished, an ordinary file must not be created instead.
            with open(self._limit, "r+") as file:
                file.write(f"{value}\n")
                file.truncate()
        except PermissionError:
            raise MissingCapabilityError(
                f"the file {self._limit} may be written by root only; {ROOT_HINT} (chmod g+w), or {UNPRIVILEGED_HINT}"
            ) from None
        except OSError as error:
            raise MissingCapabilityError(
                f"{self._limit} cannot be written: {error.strerror}; see `dmesg`: firmware may lock the limit"
            ) from None

    def cure(self, value: int | None) -> str:
        return f"echo {value} | sudo tee {self._limit}"


def cpu_limits(root: Path) -> list[CpuPowerLimit]:
    """Return the power limits of all processor packages in the RAPL folder ``root``. Raises MissingCapabilityError."""
    zones = sorted(path.name for path in root.glob(sysfs.ZONES) if path.name.count(":") == 1)
    limits = [CpuPowerLimit(root, zone) for zone in zones]
    limits = [limit for limit in limits if "(package" in limit.name]
    if not limits:
        problem = "has no processor package" if root.is_dir() else "does not exist"
        raise MissingCapabilityError(f"RAPL directory {root} {problem}: no power limit to change; {UNPRIVILEGED_HINT}")
    return limits
