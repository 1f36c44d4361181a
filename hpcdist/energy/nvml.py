"""NVIDIA GPUs: which ones this job uses, and their energy counters. The one door to pynvml.

The indices of CUDA (under CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER) are not those of NVML, so a GPU is known by its
UUID. pynvml is imported at the first use, never at import; when it is missing, the reason is kept.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hpcdist.energy.counters import ReadError
from hpcdist.errors import MissingCapabilityError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@functools.cache
def binding() -> ModuleType:
    """Return the pynvml module. Raises MissingCapabilityError, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MissingCapabilityError(f"pynvml cannot be imported ({error}); install hpcdist[nvml]") from error


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node, in the order of NVML (that of the PCI bus). ``partitioned``: it is in MIG mode."""

    uuid: str
    name: str
    partitioned: bool


class GpuCounter:
    """The energy counter of a GPU, in mJ since the driver was loaded; Volta and later have one."""

    kind = "gpu"
    per_mj = 1
    span: int | None = None  # 64 bits: it never wraps

    def __init__(self, nvml: ModuleType, handle: Any, uuid: str) -> None:
        self.name = uuid
        self._nvml, self._handle = nvml, handle

    def read(self) -> int:
        """Return the counter in mJ. Raises ReadError."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise ReadError(f"the driver says: {error}") from None


class Driver:
    """The NVIDIA driver, as long as it is open. Raises MissingCapabilityError, with the reason, where there is none."""

    def __init__(self) -> None:
        self._nvml = binding()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"no NVIDIA driver answers ({error})") from error

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the driver back; counters must not be read any more."""
        self._nvml.nvmlShutdown()

    def gpus(self) -> list[Gpu]:
        """Return the GPUs that this process may see."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
            return [self._gpu(self._nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"the GPUs cannot be listed ({error})") from error

    def _gpu(self, handle: Any) -> Gpu:
        try:
            partitioned = bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        except self._nvml.NVMLError:
            partitioned = False  # a GPU without MIG
        return Gpu(self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle), partitioned)

    def at(self, bus_id: str) -> str:
        """Return the UUID of the GPU at a PCI address."""
        try:
            return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByPciBusId(bus_id)))
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"NVML does not find the GPU at {bus_id} ({error})") from error

    def counter(self, uuid: str) -> GpuCounter:
        """Return the energy counter of a GPU, having read it once."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            gpu = self._gpu(handle)
        except self._nvml.NVMLError as error:
            raise MissingCapabilityError(f"{uuid}: this process cannot see it ({error})") from error
        if gpu.partitioned:
            raise MissingCapabilityError(f"{uuid}: in MIG mode its counter belongs to all of its instances together")
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            raise MissingCapabilityError(f"{uuid}: a {gpu.name} has no energy counter") from None
        except self._nvml.NVMLError:
            pass  # it has one, which fails now: reads will be counted as failed
        return GpuCounter(self._nvml, handle, uuid)


def used(driver: Driver, bus_id: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this rank uses (local).

    That is the one at ``bus_id``, where it computes. A rank that computes on the processor (None) still holds the GPUs
    that CUDA_VISIBLE_DEVICES names, and nobody else can use them meanwhile. Raises MissingCapabilityError.
    """
    if bus_id is not None:
        return (driver.at(bus_id),)
    return visible(driver.gpus(), environment)


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES names, in its order; none when it is not set.

    As CUDA reads it: comma separated indices or (beginnings of) UUIDs, ended by the first that names no GPU.
    """
    chosen: list[str] = []
    for entry in (environment.get(VISIBLE) or "").split(","):
        uuid = _named(entry.strip(), gpus, environment)
        if uuid is None or uuid in chosen:
            break
        chosen.append(uuid)
    return tuple(chosen)


def _named(entry: str, gpus: Sequence[Gpu], environment: Mapping[str, str]) -> str | None:
    """Return the UUID that ``entry`` means, None for none."""
    if entry.startswith("MIG-"):
        raise MissingCapabilityError(f"{VISIBLE} names {entry}: a MIG instance has no energy counter of its own")
    if entry.startswith("GPU-"):
        fits = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        return fits[0] if len(fits) == 1 else None
    if not (entry.isascii() and entry.isdigit()) or int(entry) >= len(gpus):
        return None
    if environment.get(ORDER) != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise MissingCapabilityError(
            f"{VISIBLE} names a GPU by index, and CUDA numbers unlike GPUs by speed; export {ORDER}=PCI_BUS_ID, "
            "or name it by UUID"
        )
    return gpus[int(entry)].uuid
