"""NVIDIA GPUs through NVML: the GPUs of this job, their energy counters and power. Only this module loads pynvml.

GPUs are identified by UUID, because the indices of CUDA and NVML differ.
"""

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

from hpcdist.constants import VISIBLE_GPUS
from hpcdist.energy.sources.counters import EnergyCounter, IntegratedPower, SensorReadError, SourceInfo
from hpcdist.errors import MissingCapabilityError

ORDER = "CUDA_DEVICE_ORDER"
INSTANCE = "MIG-"


@dataclass(frozen=True)
class NvmlGpu:
    """GPU of this node. ``partitioned`` is True if the GPU is in MIG mode."""

    uuid: str
    name: str
    partitioned: bool


def cuda_visible(
    gpus: Sequence[NvmlGpu], environment: Mapping[str, str], parent: Callable[[str], str | None]
) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, or () if it is unset. Raises MissingCapabilityError.

    ``gpus``: GPUs of the node. ``environment``: environment variables. ``parent``: the method `NvmlDriver.parent`.
    """
    # As in CUDA, entries are indices or prefixes of UUIDs, and the first invalid entry ends the list. An index is
    # ambiguous if CUDA may number the GPUs in another order than NVML.
    seen: list[str] = []  # entries so far: a repeated entry ends the list, as an invalid entry does
    chosen: list[str] = []
    for entry in (environment.get(VISIBLE_GPUS) or "").split(","):
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
    if entry.startswith("GPU-"):
        fits = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        return fits[0] if len(fits) == 1 else None
    if not (entry.isascii() and entry.isdigit()) or int(entry) >= len(gpus):
        return None
    # CUDA's default order is by speed (FASTEST_FIRST), NVML's by bus: they agree if all GPUs are alike.
    if environment.get(ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise MissingCapabilityError(
            f"{VISIBLE_GPUS} has a GPU index, but CUDA numbers GPUs of different models by speed, and NVML by PCI "
            f"address; export {ORDER}=PCI_BUS_ID, or set {VISIBLE_GPUS} to UUIDs"
        )
    return gpus[int(entry)].uuid


MIG_NOTE: Final = "MIG: of all its instances together, also those of others"
# Power fields, best first: NVML's constant, its scope (0: the GPU, 1: the module), and the names of both in hpcdist.
POWER_FIELDS: Final = (
    ("NVML_FI_DEV_POWER_INSTANT", 0, "instant", "gpu"),
    ("NVML_FI_DEV_POWER_AVERAGE", 0, "average", "gpu"),
    ("NVML_FI_DEV_POWER_INSTANT", 1, "instant", "module"),
    ("NVML_FI_DEV_POWER_AVERAGE", 1, "average", "module"),
)
USAGE: Final = ("usage", "gpu")  # nvmlDeviceGetPowerUsage: an average over a second on Ampere and later, except GA100


@functools.cache
def load_pynvml() -> ModuleType:
    """Return the module pynvml. Raises MissingCapabilityError if it cannot be imported."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MissingCapabilityError(f"pynvml cannot be imported ({error}); install hpcdist[nvml]") from error


class GpuSensor:
    """Sensor of the power, utilisation and memory of a GPU. It reads the first supported field of `POWER_FIELDS`."""

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
            pass  # the reading exists, but fails now
        return *USAGE, None

    def _value(self, field: tuple[int, int]) -> int | None:
        try:
            reply = self._nvml.nvmlDeviceGetFieldValues(self._handle, [field])[0]
        except self._nvml.NVMLError:
            return None
        return int(reply.value.uiVal) if reply.nvmlReturn == self._nvml.NVML_SUCCESS else None

    def power_mw(self) -> int:
        """Return the present power in mW. Raises SensorReadError."""
        if self._field is not None:
            value = self._value(self._field)
            if value is None:
                raise SensorReadError(f"the NVIDIA driver no longer reports the {self.field} power of GPU {self.uuid}")
            return value
        return int(self._ask(self._nvml.nvmlDeviceGetPowerUsage))

    def use(self) -> float:
        """Return the fraction (0 to 1) of the last sample period in which a kernel ran. Raises SensorReadError."""
        return float(self._ask(self._nvml.nvmlDeviceGetUtilizationRates).gpu) / 100

    def memory_share(self) -> float:
        """Return the fraction of the GPU memory in use, or NaN for a GPU without memory. Raises SensorReadError."""
        info = self._ask(self._nvml.nvmlDeviceGetMemoryInfo)
        return info.used / info.total if info.total else math.nan

    def energy_mj(self) -> int:
        """Return the energy in mJ since the driver was loaded. Raises SensorReadError."""
        return int(self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._handle)
        except self._nvml.NVMLError as error:
            raise SensorReadError(
                f"the NVIDIA driver cannot read a sensor of GPU {self.uuid} ({error}); run nvidia-smi"
            ) from None


class GpuCounter:
    """Energy counter of a Volta or later GPU, in mJ since the driver was loaded."""

    kind = "gpu"
    per_mj = 1
    span: int | None = None  # 64 bits: it never wraps
    gaps = 0

    def __init__(self, about: SourceInfo, sensor: GpuSensor) -> None:
        self.name, self.about, self.read = sensor.uuid, about, sensor.energy_mj
        self._sensor = sensor

    def power_mw(self) -> int | None:
        return self._sensor.power_mw() if self._sensor.field else None


class NvmlDriver:
    """The NVIDIA driver, open until `close`. Raises MissingCapabilityError if there is no driver."""

    def __init__(self) -> None:
        self._nvml = load_pynvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"no NVIDIA driver is available ({error}); run nvidia-smi") from error

    def __enter__(self) -> "NvmlDriver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the driver. Do not read counters afterwards."""
        self._nvml.nvmlShutdown()

    def gpus(self) -> list[NvmlGpu]:
        """Return a list of the GPUs that this process can access."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
            return [self._gpu(self._nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"NVML cannot list the GPUs ({error}); run nvidia-smi") from error

    def _gpu(self, handle: Any) -> NvmlGpu:
        try:
            partitioned = bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except self._nvml.NVMLError:
            partitioned = False  # a GPU without MIG
        return NvmlGpu(self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle), partitioned)

    def at(self, bus_id: str) -> str:
        """Return the UUID of the GPU whose PCI address is ``bus_id``."""
        try:
            return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id)))
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"NVML finds no GPU at PCI {bus_id} ({error}); run nvidia-smi") from error

    def parent(self, instance: str) -> str | None:
        """Return the UUID of the GPU that contains a MIG ``instance``, or None if there is no such instance."""
        if instance.startswith(f"{INSTANCE}GPU-"):  # names before driver 470: MIG-GPU-<uuid>/<gi>/<ci>
            return instance.removeprefix(INSTANCE).partition("/")[0]
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(instance)
            return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))
        except (self._nvml.NVMLError_NotFound, self._nvml.NVMLError_InvalidArgument):
            return None
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(
                f"NVML does not find the GPU of MIG instance {instance} ({error}); run nvidia-smi -L"
            ) from error

    def _look_up(self, uuid: str) -> tuple[Any, NvmlGpu]:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return handle, self._gpu(handle)
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(
                f"{uuid}: this process cannot access the GPU ({error}); run nvidia-smi"
            ) from error

    def sensor(self, uuid: str) -> GpuSensor:
        """Return the sensor of power and utilisation of the GPU ``uuid``. Raises MissingCapabilityError."""
        return GpuSensor(self._nvml, self._look_up(uuid)[0], uuid)

    def about(self, uuid: str, ranks: int = 0) -> SourceInfo:
        """Return the `SourceInfo` of a GPU that ``ranks`` ranks use. Raises MissingCapabilityError."""
        gpu = self._look_up(uuid)[1]
        shared = f"shared by {ranks} ranks" if ranks > 1 else ""
        return SourceInfo(gpu.name, ranks, note="; ".join(filter(None, (shared, MIG_NOTE if gpu.partitioned else ""))))

    def counter(self, uuid: str, ranks: int = 0, interval_s: float = 0.1) -> EnergyCounter:
        """Return the energy counter of the GPU ``uuid``. A GPU older than Volta gets a counter that integrates power.

        ``ranks``: number of ranks that use the GPU. ``interval_s``: seconds between readings. Raises
        MissingCapabilityError.
        """
        # A GPU in MIG mode has one counter for all its instances.
        handle, gpu = self._look_up(uuid)
        sensor = GpuSensor(self._nvml, handle, uuid)
        about = replace(self.about(uuid, ranks), power_field=sensor.field, power_scope=sensor.scope)
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            if not sensor.field:
                why = f"{uuid}: a {gpu.name} has no energy counter, and reports no power"
                raise MissingCapabilityError(why) from None
            return IntegratedPower(uuid, sensor.power_mw, about, interval_s)
        except self._nvml.NVMLError:
            pass  # the counter exists, but fails now: its reads will be counted as failed
        return GpuCounter(about, sensor)


def gpus_in_use(driver: NvmlDriver, bus_id: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of this rank's GPUs. ``bus_id``: PCI address, None on the CPU. Raises MissingCapabilityError."""
    if bus_id is not None:
        return (driver.at(bus_id),)
    # A CPU rank occupies all visible GPUs, because no other job can use them.
    return cuda_visible(driver.gpus(), environment, driver.parent)
