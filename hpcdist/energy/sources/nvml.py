"""NVIDIA GPUs through NVML: the GPUs of this job, their energy counters and power. Only this module loads pynvml.

A GPU is known by its UUID, since the indices of CUDA are not those of NVML; `cuda_visible` resolves
CUDA_VISIBLE_DEVICES to UUIDs and is pure. pynvml is imported at the first use, never at import; where it is missing,
`load_pynvml` raises MissingCapabilityError.
"""

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

from hpcdist.energy.sources.counters import EnergyCounter, IntegratedPower, SensorReadError, SourceInfo
from hpcdist.errors import MissingCapabilityError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
INSTANCE = "MIG-"


@dataclass(frozen=True)
class NvmlGpu:
    """GPU of this node, in the order of NVML (that of the PCI bus). ``partitioned``: it is in MIG mode."""

    uuid: str
    name: str
    partitioned: bool


def cuda_visible(
    gpus: Sequence[NvmlGpu], environment: Mapping[str, str], parent: Callable[[str], str | None]
) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES names, in its order; none when it is not set.

    As CUDA reads it: comma separated indices or (beginnings of) UUIDs, ended by the first that names no GPU. A MIG
    instance stands for the GPU that it is a part of: ``parent`` returns that. Raises MissingCapabilityError where the
    indices cannot be understood.
    """
    seen: list[str] = []  # entries so far: one that comes twice ends the list, as one that names no GPU
    chosen: list[str] = []
    for entry in (environment.get(VISIBLE) or "").split(","):
        name = entry.strip()
        uuid = parent(name) if name.startswith(INSTANCE) else _resolve_entry(name, gpus, environment)
        same = name if name.startswith(INSTANCE) else uuid  # two instances may be parts of one GPU
        if uuid is None or same is None or same in seen:
            break
        seen.append(same)
        if uuid not in chosen:
            chosen.append(uuid)
    return tuple(chosen)


def _resolve_entry(entry: str, gpus: Sequence[NvmlGpu], environment: Mapping[str, str]) -> str | None:
    """Return the UUID that ``entry`` of CUDA_VISIBLE_DEVICES names, None where it names no GPU."""
    if entry.startswith("GPU-"):
        fits = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        return fits[0] if len(fits) == 1 else None
    if not (entry.isascii() and entry.isdigit()) or int(entry) >= len(gpus):
        return None
    # CUDA's default order is by speed (FASTEST_FIRST), NVML's that of the bus: the same where all GPUs are alike.
    if environment.get(ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise MissingCapabilityError(
            f"{VISIBLE} names a GPU by index, and CUDA numbers unlike GPUs by speed; export {ORDER}=PCI_BUS_ID, "
            "or name it by UUID"
        )
    return gpus[int(entry)].uuid


MIG_NOTE: Final = "MIG: of all its instances together, also those of others"
# Fields of power, best first: the constant of NVML, its scope (0: the GPU, 1: the module), and the names of both here.
POWER_FIELDS: Final = (
    ("NVML_FI_DEV_POWER_INSTANT", 0, "instant", "gpu"),
    ("NVML_FI_DEV_POWER_AVERAGE", 0, "average", "gpu"),
    ("NVML_FI_DEV_POWER_INSTANT", 1, "instant", "module"),
    ("NVML_FI_DEV_POWER_AVERAGE", 1, "average", "module"),
)
USAGE: Final = ("usage", "gpu")  # nvmlDeviceGetPowerUsage: of Ampere and later, but GA100, an average over a second


@functools.cache
def load_pynvml() -> ModuleType:
    """Return the pynvml module. Raises MissingCapabilityError, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MissingCapabilityError(f"pynvml cannot be imported ({error}); install hpcdist[nvml]") from error


class GpuSensor:
    """Sensor of a GPU's power, utilisation and memory. The field of power is chosen once: see `POWER_FIELDS`."""

    def __init__(self, nvml: ModuleType, handle: Any, uuid: str) -> None:
        self.uuid = uuid
        self._nvml, self._handle = nvml, handle
        self.field, self.scope, self._field = self._best()

    def _best(self) -> tuple[str, str, tuple[int, int] | None]:
        for name, scope_id, field, scope in POWER_FIELDS:
            number = getattr(self._nvml, name, None)
            if number is not None and self._value((number, scope_id)) is not None:
                return field, scope, (number, scope_id)
        try:
            self._nvml.nvmlDeviceGetPowerUsage(self._handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return "", "", None
        except self._nvml.NVMLError:
            pass  # there is such a reading, which fails now
        return *USAGE, None

    def _value(self, field: tuple[int, int]) -> int | None:
        """Return the value of a field of power in mW, None where the GPU does not have it."""
        try:
            reply = self._nvml.nvmlDeviceGetFieldValues(self._handle, [field])[0]
        except self._nvml.NVMLError:
            return None
        return int(reply.value.uiVal) if reply.nvmlReturn == self._nvml.NVML_SUCCESS else None

    def power_mw(self) -> int:
        """Return the power now. Raises SensorReadError."""
        if self._field is not None:
            value = self._value(self._field)
            if value is None:
                raise SensorReadError(f"the driver no longer tells the {self.field} power of {self.uuid}")
            return value
        return int(self._ask(self._nvml.nvmlDeviceGetPowerUsage))

    def use(self) -> float:
        """Return the share of the driver's last sample period in which a kernel ran, 0 to 1. Raises SensorReadError."""
        return float(self._ask(self._nvml.nvmlDeviceGetUtilizationRates).gpu) / 100

    def memory_share(self) -> float:
        """Return the share of memory in use by any process; NaN where there is none. Raises SensorReadError."""
        info = self._ask(self._nvml.nvmlDeviceGetMemoryInfo)
        return info.used / info.total if info.total else math.nan

    def energy_mj(self) -> int:
        """Return the energy since the driver was loaded. Raises SensorReadError."""
        return int(self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._handle)
        except self._nvml.NVMLError as error:
            raise SensorReadError(f"the driver says: {error}") from None


class GpuCounter:
    """Energy counter of a GPU, in mJ since the driver was loaded; Volta and later have one."""

    kind = "gpu"
    per_mj = 1
    span: int | None = None  # 64 bits: it never wraps
    gaps = 0

    def __init__(self, about: SourceInfo, sensor: GpuSensor) -> None:
        self.name, self.about, self.read = sensor.uuid, about, sensor.energy_mj
        self._sensor = sensor

    def power_mw(self) -> int | None:
        """Return the power in mW, None where this GPU has no such reading. Raises SensorReadError."""
        return self._sensor.power_mw() if self._sensor.field else None


class NvmlDriver:
    """NVIDIA driver, open until `close`. Raises MissingCapabilityError, with the reason, where there is none."""

    def __init__(self) -> None:
        self._nvml = load_pynvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"no NVIDIA driver answers ({error})") from error

    def __enter__(self) -> "NvmlDriver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the driver back; counters must not be read any more."""
        self._nvml.nvmlShutdown()

    def gpus(self) -> list[NvmlGpu]:
        """Return the GPUs that this process may see."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
            return [self._gpu(self._nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"the GPUs cannot be listed ({error})") from error

    def _gpu(self, handle: Any) -> NvmlGpu:
        try:
            partitioned = bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except self._nvml.NVMLError:
            partitioned = False  # a GPU without MIG
        return NvmlGpu(self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle), partitioned)

    def at(self, bus_id: str) -> str:
        """Return the UUID of the GPU at a PCI address."""
        try:
            return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id)))
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"NVML does not find the GPU at {bus_id} ({error})") from error

    def parent(self, instance: str) -> str | None:
        """Return the UUID of the GPU that a MIG instance is a part of; None where there is no such instance."""
        if instance.startswith(f"{INSTANCE}GPU-"):  # as drivers before 470 named them: MIG-GPU-<uuid>/<gi>/<ci>
            return instance.removeprefix(INSTANCE).partition("/")[0]
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(instance)
            return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))
        except (self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
            return None
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"{instance}: the GPU it is a part of is not known ({error})") from error

    def _look_up(self, uuid: str) -> tuple[Any, NvmlGpu]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return handle, self._gpu(handle)
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"{uuid}: this process cannot see it ({error})") from error

    def sensor(self, uuid: str) -> GpuSensor:
        """Return the sensor of power and utilisation of a GPU. Raises MissingCapabilityError."""
        return GpuSensor(self._nvml, self._look_up(uuid)[0], uuid)

    def about(self, uuid: str, ranks: int = 0) -> SourceInfo:
        """Return the properties of a GPU that so many ``ranks`` use. Raises MissingCapabilityError."""
        gpu = self._look_up(uuid)[1]
        shared = f"shared by {ranks} ranks" if ranks > 1 else ""
        return SourceInfo(gpu.name, ranks, note="; ".join(filter(None, (shared, MIG_NOTE if gpu.partitioned else ""))))

    def counter(self, uuid: str, ranks: int = 0, interval_s: float = 0.1) -> EnergyCounter:
        """Return the energy counter of a GPU that so many ``ranks`` use, having read it once.

        Where the GPU has none (before Volta), its power is integrated, read every ``interval_s`` seconds.
        A GPU in MIG mode has one counter for all of its instances, and so one source. Raises MissingCapabilityError.
        """
        handle, gpu = self._look_up(uuid)
        sensor = GpuSensor(self._nvml, handle, uuid)
        about = replace(self.about(uuid, ranks), power_field=sensor.field, power_scope=sensor.scope)
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            if not sensor.field:
                why = f"{uuid}: a {gpu.name} has no energy counter, and tells no power"
                raise MissingCapabilityError(why) from None
            return IntegratedPower(uuid, sensor.power_mw, about, interval_s)
        except self._nvml.NVMLError:
            pass  # there is one, which fails now: its reads will be counted as failed
        return GpuCounter(about, sensor)


def gpus_in_use(driver: NvmlDriver, bus_id: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this rank uses (local). Raises MissingCapabilityError.

    For a rank that computes on a GPU that is the one at ``bus_id``. A rank that computes on the processor (None) still
    holds the GPUs that CUDA_VISIBLE_DEVICES names: no other job can use them meanwhile.
    """
    if bus_id is not None:
        return (driver.at(bus_id),)
    return cuda_visible(driver.gpus(), environment, driver.parent)
