"""What can be read on this node, and why the rest cannot."""

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hpcdist.energy import declared, nvml, pm_counters, rapl
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.counters import Counter
from hpcdist.energy.utilisation import Process
from hpcdist.errors import MissingCapabilityError

NO_GPU: Final = f"the job uses none: run.device = 'cpu', and {nvml.VISIBLE} names none"


@dataclass(frozen=True)
class Claim:
    """The GPUs that one rank uses; ``reason`` says why they are not known. ``process`` is the rank, for its node."""

    gpus: tuple[str, ...] = ()
    reason: str = ""
    process: Process | None = None


@dataclass
class Sources:
    """The counters of a node; ``missing`` says by kind why there are none, or not all that are needed.

    ``needed`` are the kinds without which a total would be too small: a job that uses GPUs is not measured without
    theirs. ``unused`` are those of which the ranks of this node have nothing, and so nothing to measure. ``sensors``
    tell how busy the GPUs are.
    """

    counters: list[Counter] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    sensors: list[nvml.GpuSensor] = field(default_factory=list)
    driver: nvml.Driver | None = None

    def close(self) -> None:
        """Give the sensors back."""
        if self.driver is not None:
            self.driver.close()
            self.driver = None


def claim(
    config: EnergyConfig, bus_id: str | None, environment: Mapping[str, str], process: Process | None = None
) -> Claim:
    """Return the GPUs that this rank uses; ``bus_id`` is the PCI address of the one it computes on (local)."""
    asked = config.wants("nvml") or config.gpu_tdp_w > 0 or config.utilisation_s > 0
    if not asked or (bus_id is None and nvml.VISIBLE not in environment):
        return Claim(process=process)
    try:
        with nvml.Driver() as driver:
            return Claim(nvml.used(driver, bus_id, environment), process=process)
    except MissingCapabilityError as error:
        # Without a driver, a rank that computes on the processor holds no GPU, whatever the variable says.
        return Claim(reason=str(error), process=process)


def of_node(config: EnergyConfig, claims: Iterable[Claim], computing: bool) -> Sources:
    """Open the sources of this node for the ranks that made ``claims``, each GPU once (local).

    ``computing``: the ranks compute on GPUs.
    """
    found = Sources()
    claims = list(claims)
    ranks = Tally(uuid for claim in claims for uuid in claim.gpus)
    reasons = [claim.reason for claim in claims if claim.reason]
    if config.wants("nvml") or config.sources == "declared":  # else nobody asked for GPUs
        found.needed |= {"gpu"} if ranks or computing else set()
        found.unused |= set() if ranks or reasons else {"gpu"}
    no_gpu = reasons[0] if reasons else "" if ranks else NO_GPU
    _open(found, ranks)
    if config.sources == "declared":
        _add_declared(found, config, ranks, no_gpu)
        return found
    if config.wants("nvml"):
        _add_gpus(found, config, ranks, no_gpu)
    else:
        found.missing["gpu"] = f"energy.sources = {config.sources!r}"
    if config.wants("rapl"):
        zones, missing = rapl.find(Path(config.powercap))
        found.counters += zones
        found.missing |= missing
    else:
        found.missing |= dict.fromkeys(("cpu", "dram"), f"energy.sources = {config.sources!r}")
    if config.wants("cray"):
        _add_cray(found, config)
    return found


def _open(found: Sources, ranks: Mapping[str, int]) -> None:
    """Open the driver for the GPUs that are used, and what tells how busy they are; without it, others say why."""
    try:
        if ranks:
            found.driver = nvml.Driver()
            found.sensors = [found.driver.sensor(uuid) for uuid in sorted(ranks)]
    except MissingCapabilityError:
        found.sensors = []


def _add_gpus(found: Sources, config: EnergyConfig, ranks: Mapping[str, int], no_gpu: str) -> None:
    if no_gpu:
        found.missing["gpu"] = no_gpu
        return
    try:
        driver = found.driver = found.driver or nvml.Driver()
        found.counters += [driver.counter(uuid, ranks[uuid], config.interval_s) for uuid in sorted(ranks)]
    except MissingCapabilityError as error:
        found.missing["gpu"] = str(error)


def _add_cray(found: Sources, config: EnergyConfig) -> None:
    """Add the counter of the whole node, and as its parts what the node itself does not know better.

    Of the processors and memories those of the Cray, of the GPUs the driver's own, which are of this job's alone.
    """
    counters, missing = pm_counters.find(Path(config.pm_counters))
    if not counters:
        if config.sources == "cray":
            found.missing |= missing
        return
    kinds = {counter.kind for counter in counters}
    found.counters = [counter for counter in found.counters if counter.kind == "gpu" or counter.kind not in kinds]
    better = {counter.kind for counter in found.counters}
    found.counters += [counter for counter in counters if counter.kind not in better]
    for counter in found.counters:
        found.missing.pop(counter.kind, None)


def _add_declared(found: Sources, config: EnergyConfig, ranks: Mapping[str, int], no_gpu: str) -> None:
    found.missing["dram"] = "the declared model has no memory"
    if config.cpu_tdp_w > 0:
        found.counters.append(declared.DeclaredProcessors(config.cpu_tdp_w, config.idle_fraction))
    else:
        found.missing["cpu"] = "energy.cpu_tdp_w = 0"
    if no_gpu or not config.gpu_tdp_w:
        found.missing["gpu"] = no_gpu or "energy.gpu_tdp_w = 0"
        return
    try:
        driver = found.driver = found.driver or nvml.Driver()
        for uuid in sorted(ranks):
            about, sensor = driver.about(uuid, ranks[uuid]), driver.sensor(uuid)
            found.counters.append(
                declared.gpu(sensor, about, config.gpu_tdp_w, config.idle_fraction, config.interval_s)
            )
    except MissingCapabilityError as error:
        found.missing["gpu"] = str(error)
