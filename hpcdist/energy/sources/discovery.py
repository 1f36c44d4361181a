"""Discover the energy sources of a node, with the reasons why others cannot be read."""

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpcdist.constants import VISIBLE_GPUS
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.part_time_sensor import UNKNOWN_SENSOR, sensor_of
from hpcdist.energy.sources import nvml, sysfs, utilisation
from hpcdist.energy.sources.counters import EnergyCounter
from hpcdist.energy.sources.nvml import cuda_visible
from hpcdist.energy.sources.utilisation import RankProcess
from hpcdist.errors import MissingCapabilityError

NO_GPU: Final = f"the job computes on the CPU ({VISIBLE_GPUS} is not set or names no GPU)"


@dataclass(frozen=True)
class GpuClaim:
    """GPUs that a rank uses, and the process of the rank."""

    gpus: tuple[str, ...] = ()  # UUIDs
    reason: str = ""  # why the GPUs are unknown
    process: RankProcess | None = None


@dataclass
class NodeSources:
    """Energy sources of a node, opened for reading."""

    counters: list[EnergyCounter] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # kind that is not measured completely: reason
    needed: set[str] = field(default_factory=set)  # contains "gpu" if the job's total energy must include GPUs
    unused: set[str] = field(default_factory=set)  # contains "gpu" if no rank of this node uses a GPU
    sensors: list[nvml.GpuSensor] = field(default_factory=list)  # for the utilisation of the GPUs
    driver: nvml.NvmlDriver | None = None

    def close(self) -> None:
        """Close the GPU driver. Do not read counters or sensors afterwards."""
        if self.driver is not None:
            self.driver.close()
            self.driver = None


def claim_gpus(
    config: EnergyConfig, bus_id: str | None, environment: Mapping[str, str], process: RankProcess | None = None
) -> GpuClaim:
    """Return the GPUs that this rank uses, or the reason why they are unknown, as a `GpuClaim`. Local.

    ``bus_id``: PCI address of the rank's GPU, or None on the CPU. ``environment``: environment variables. ``process``:
    process to store in the result.
    """
    needs_gpus = config.wants("nvml") or config.gpu_tdp_w > 0 or config.utilisation_s > 0
    if not needs_gpus or (bus_id is None and VISIBLE_GPUS not in environment):
        return GpuClaim(process=process)
    try:
        with nvml.NvmlDriver() as driver:
            return GpuClaim(nvml.gpus_in_use(driver, bus_id, environment), process=process)
    except MissingCapabilityError as error:
        # Without a driver, a rank that computes on the CPU holds no GPU, whatever the variable says.
        return GpuClaim(reason=str(error), process=process)


def open_node_sources(config: EnergyConfig, claims: Iterable[GpuClaim], computing: bool) -> NodeSources:
    """Open this node's energy sources. ``claims``: its ranks' GPUs. ``computing``: a rank computes on a GPU. Local."""
    sources = NodeSources()
    claims = list(claims)
    # A GPU of several ranks is opened once.
    ranks = Tally(uuid for claim in claims for uuid in claim.gpus)
    reasons = [claim.reason for claim in claims if claim.reason]
    if config.wants("nvml") or config.sources == "declared":  # otherwise GPUs are not measured
        sources.needed |= {"gpu"} if ranks or computing else set()
        sources.unused |= set() if ranks or reasons else {"gpu"}
    no_gpu = reasons[0] if reasons else "" if ranks else NO_GPU
    _open(sources, ranks)
    if config.sources == "declared":
        _add_declared(sources, config, ranks, no_gpu)
        return sources
    if config.wants("nvml"):
        _add_gpus(sources, config, ranks, no_gpu)
    else:
        sources.missing["gpu"] = f"energy.sources = {config.sources!r}"
    if config.wants("rapl"):
        zones, missing = sysfs.find_rapl(Path(config.powercap))
        sources.counters += zones
        sources.missing |= missing
    else:
        sources.missing |= dict.fromkeys(("cpu", "dram"), f"energy.sources = {config.sources!r}")
    if config.wants("cray"):
        _add_cray(sources, config)
    return sources


def _open(sources: NodeSources, ranks: Mapping[str, int]) -> None:
    try:
        if ranks:
            sources.driver = nvml.NvmlDriver()
            sources.sensors = [sources.driver.sensor(uuid) for uuid in sorted(ranks)]
    except MissingCapabilityError:
        sources.sensors = []


def _add_gpus(sources: NodeSources, config: EnergyConfig, ranks: Mapping[str, int], no_gpu: str) -> None:
    if no_gpu:
        sources.missing["gpu"] = no_gpu
        return
    try:
        driver = sources.driver = sources.driver or nvml.NvmlDriver()
        sources.counters += [driver.counter(uuid, ranks[uuid], config.interval_s) for uuid in sorted(ranks)]
    except MissingCapabilityError as error:
        sources.missing["gpu"] = str(error)


def _add_cray(sources: NodeSources, config: EnergyConfig) -> None:
    counters, missing = sysfs.find_cray(Path(config.pm_counters))
    if not counters:
        if config.sources == "cray":
            sources.missing |= missing
        return
    kinds = {counter.kind for counter in counters}  # Cray counters replace RAPL, but not NVML
    sources.counters = [counter for counter in sources.counters if counter.kind == "gpu" or counter.kind not in kinds]
    better = {counter.kind for counter in sources.counters}
    sources.counters += [counter for counter in counters if counter.kind not in better]
    for counter in sources.counters:
        sources.missing.pop(counter.kind, None)


def _add_declared(sources: NodeSources, config: EnergyConfig, ranks: Mapping[str, int], no_gpu: str) -> None:
    sources.missing["dram"] = "the declared model has no memory"
    if config.cpu_tdp_w > 0:
        sources.counters.append(utilisation.TdpProcessors(config.cpu_tdp_w, config.idle_fraction))
    else:
        sources.missing["cpu"] = "energy.cpu_tdp_w = 0"
    if no_gpu or not config.gpu_tdp_w:
        sources.missing["gpu"] = no_gpu or "energy.gpu_tdp_w = 0"
        return
    try:
        driver = sources.driver = sources.driver or nvml.NvmlDriver()
        for uuid in sorted(ranks):
            about, sensor = driver.about(uuid, ranks[uuid]), driver.sensor(uuid)
            sources.counters.append(
                utilisation.tdp_gpu(sensor, about, config.gpu_tdp_w, config.idle_fraction, config.interval_s)
            )
    except MissingCapabilityError as error:
        sources.missing["gpu"] = str(error)


MODEL_NOTE: Final = (
    "a model, not a measurement: only on request, with energy.sources = 'declared' and the watts of the devices in "
    "energy.cpu_tdp_w or energy.gpu_tdp_w"
)


def survey(config: EnergyConfig, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a list with a dict per energy source of this machine: kind, name, readable, reason, and more for GPUs."""
    # A GPU also has `model`, and `held` (listed in CUDA_VISIBLE_DEVICES). A readable GPU also has `note`, `power`
    # (meaning of a power reading, such as "average of the module") and `sensor`: [seconds between updates, seconds
    # measured per update, source of these numbers] or None.
    rows: list[dict[str, Any]] = []
    try:
        with nvml.NvmlDriver() as driver:
            rows += _gpu_rows(driver, environment)
    except MissingCapabilityError as error:
        rows.append({"kind": "gpu", "name": "nvml", "reason": str(error)})
    rapl, cray = sysfs.find_rapl(Path(config.powercap)), sysfs.find_cray(Path(config.pm_counters))
    for name, (counters, missing) in (("rapl", rapl), ("pm_counters", cray)):
        rows += [{"kind": counter.kind, "name": counter.name, "reason": None} for counter in counters]
        rows += [{"kind": kind, "name": name, "reason": reason} for kind, reason in missing.items()]
    rows.append({"kind": "any", "name": "declared", "reason": MODEL_NOTE})
    return [{**row, "readable": row["reason"] is None} for row in rows]


def _gpu_rows(driver: nvml.NvmlDriver, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    gpus = driver.gpus()
    if not gpus:
        raise MissingCapabilityError(
            "the NVIDIA driver shows no GPU to this process; request a GPU from the batch system or the container"
        )
    held = cuda_visible(gpus, environment, driver.parent)
    return [{**_gpu_row(driver, gpu), "held": gpu.uuid in held} for gpu in gpus]


def _gpu_row(driver: nvml.NvmlDriver, gpu: nvml.NvmlGpu) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "gpu", "name": gpu.uuid, "model": gpu.name, "reason": None}
    try:
        counter = driver.counter(gpu.uuid)
    except MissingCapabilityError as error:
        return row | {"reason": str(error)}
    about, sensor = counter.about, sensor_of(gpu.name)
    sensor_row = None if sensor.source == UNKNOWN_SENSOR else [sensor.update_s, sensor.window_s, sensor.source]
    power = " of the ".join(filter(None, (about.power_field, about.power_scope)))
    return row | {"note": about.note, "power": power, "sensor": sensor_row}
