"""Power limits and locked clocks of NVIDIA GPUs.

NVML takes power in mW and clocks in MHz, by the UUID of a GPU. It forgets both at a restart of the machine, and where
the GPU is not in persistence mode when its last user closes it: `Driver` stays open as long as a limit is to hold.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from hpcdist.energy import nvml
from hpcdist.energy.limits_knobs import AS_ROOT, CURE, Allowed, Knob
from hpcdist.errors import ConfigurationError, MissingCapabilityError

GPU_POWER: Final = "nvml-power"
GPU_CLOCK: Final = "nvml-clock"
FASTEST: Final = 0  # the performance state of a GPU at work


class GpuPower:
    """The power limit of a GPU (nvmlDeviceSetPowerManagementLimit): an average that its firmware keeps to."""

    kind, place, unit, per_unit = GPU_POWER, "", "W", 1000
    what: Final = "power limit"

    def __init__(self, uuid: str) -> None:
        self._nvml = nvml.binding()
        self.device = uuid
        self._handle, self.name = _gpu(uuid)

    def allowed(self) -> Allowed:
        """Return the constraints of the driver, and its default."""
        try:
            least, most = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(self._handle)
            default = self._nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle)
        except self._nvml.NVMLError as error:
            _refused(self.name, self.what, error)
        return Allowed(least / self.per_unit, most / self.per_unit, default / self.per_unit)

    def now(self) -> int | None:
        """Return the limit in mW."""
        try:
            return int(self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))
        except self._nvml.NVMLError as error:
            _refused(self.name, self.what, error)

    def in_force(self) -> float | None:
        """Return the least of all limits of the GPU, in W: the enforced one where the driver tells it."""
        try:
            return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / self.per_unit
        except self._nvml.NVMLError:
            found = self.now()
            return None if found is None else found / self.per_unit

    def put(self, value: int | None) -> None:
        """Set the limit in mW."""
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._handle, value)
        except self._nvml.NVMLError as error:
            _refused(self.name, self.what, error)

    def cure(self, value: int | None) -> str:
        """Return nvidia-smi's command."""
        return f"sudo nvidia-smi -i {self.device} -pl {(value or 0) / self.per_unit:g}"


class GpuClock:
    """The clock of a GPU, locked at one frequency (nvmlDeviceSetGpuLockedClocks).

    The driver does not tell whether clocks are locked, so an earlier lock cannot be put back: at the end they are free.
    """

    kind, place, unit, per_unit = GPU_CLOCK, "", "MHz", 1
    what: Final = "clock"

    def __init__(self, uuid: str) -> None:
        self._nvml = nvml.binding()
        self.device = uuid
        self._handle, self.name = _gpu(uuid)

    def allowed(self) -> Allowed:
        """Return the graphics clocks that go with the highest clock of the memory, where the driver lists them."""
        try:
            memory = max(self._nvml.nvmlDeviceGetSupportedMemoryClocks(self._handle))
            values = sorted(self._nvml.nvmlDeviceGetSupportedGraphicsClocks(self._handle, memory))
            return Allowed(values[0], values[-1], values=tuple(map(float, values)))
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound, ValueError, IndexError):
            pass  # it does not list them
        except self._nvml.NVMLError as error:
            _refused(self.name, self.what, error)
        state = (self._nvml.NVML_CLOCK_GRAPHICS, FASTEST)
        try:
            least, most = self._nvml.nvmlDeviceGetMinMaxClockOfPState(self._handle, *state)
            return Allowed(float(least), float(most))
        except self._nvml.NVMLError:
            return Allowed()

    def now(self) -> int | None:
        """Return None: nobody can tell."""
        return None

    def in_force(self) -> float | None:
        """Return None: nobody can tell."""
        return None

    def put(self, value: int | None) -> None:
        """Lock the clock at ``value`` MHz, or free it."""
        try:
            if value is None:
                self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
            else:
                self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, value, value)
        except self._nvml.NVMLError as error:
            _refused(self.name, self.what, error)

    def cure(self, value: int | None) -> str:
        """Return nvidia-smi's command."""
        return f"sudo nvidia-smi -i {self.device} " + ("-rgc" if value is None else f"-lgc {value},{value}")


def _gpu(uuid: str) -> tuple[Any, str]:
    """Return the handle of a GPU and what to call it. Raises MissingCapabilityError."""
    binding = nvml.binding()
    try:
        handle = binding.nvmlDeviceGetHandleByUUID(uuid)
        return handle, f"{uuid} ({binding.nvmlDeviceGetName(handle)})"
    except binding.NVMLError as error:
        raise MissingCapabilityError(f"{uuid}: this process cannot see it ({error})") from error


def _refused(name: str, what: str, error: Exception) -> NoReturn:
    """Raise what the driver's ``error`` means for a person."""
    binding = nvml.binding()
    if isinstance(error, binding.NVMLError_NoPermission):
        raise MissingCapabilityError(
            f"{name}: its {what} may be changed by root only (the driver says: {error}); {AS_ROOT}, or {CURE}"
        ) from None
    if isinstance(error, binding.NVMLError_NotSupported | binding.NVMLError_FunctionNotFound):
        raise MissingCapabilityError(f"{name}: its {what} cannot be changed ({error}); {CURE}") from None
    if isinstance(error, binding.NVMLError_InvalidArgument):
        raise ConfigurationError(f"{name}: the driver does not take this {what} ({error})") from None
    raise MissingCapabilityError(f"{name}: its {what} cannot be read or changed: the driver says: {error}") from None


KINDS: Final[Mapping[str, Callable[[str], Knob]]] = {GPU_POWER: GpuPower, GPU_CLOCK: GpuClock}


def gpus(driver: nvml.Driver, uuids: Sequence[str], kind: str) -> list[Knob]:
    """Return the knobs of some GPUs, each once, which work while ``driver`` is open.

    Raises MissingCapabilityError for one in MIG mode, or not visible.
    """
    partitioned = {gpu.uuid for gpu in driver.gpus() if gpu.partitioned}
    for uuid in uuids:
        if uuid in partitioned:
            raise MissingCapabilityError(
                f"{uuid}: in MIG mode its limits hold for all of its instances, also those of others; {CURE}"
            )
    return [KINDS[kind](uuid) for uuid in dict.fromkeys(uuids)]
