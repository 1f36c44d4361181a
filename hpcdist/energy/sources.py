"""What can be read on this node, and why the rest cannot."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.energy import nvml, rapl
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.counters import Counter
from hpcdist.errors import MissingCapabilityError

NO_GPU = f"the job uses none: run.device = 'cpu', and {nvml.VISIBLE} names none"


@dataclass(frozen=True)
class Claim:
    """The GPUs that one rank uses; ``reason`` says why they are not known."""

    gpus: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class Sources:
    """The counters of a node; ``missing`` says by kind why there are none, or not all that are needed.

    ``needed`` are the kinds without which a total would be too small: a job that uses GPUs is not measured without
    theirs. ``unused`` are those of which the ranks of this node have nothing, and so nothing to measure.
    """

    counters: list[Counter] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)
    driver: nvml.Driver | None = None

    def close(self) -> None:
        """Give the sensors back."""
        if self.driver is not None:
            self.driver.close()
            self.driver = None


def claim(config: EnergyConfig, bus_id: str | None, environment: Mapping[str, str]) -> Claim:
    """Return the GPUs that this rank uses; ``bus_id`` is the PCI address of the one it computes on (local)."""
    if not config.wants("nvml") or (bus_id is None and nvml.VISIBLE not in environment):
        return Claim()
    try:
        with nvml.Driver() as driver:
            return Claim(nvml.used(driver, bus_id, environment))
    except MissingCapabilityError as error:
        # Without a driver, a rank that computes on the processor holds no GPU, whatever the variable says.
        return Claim(reason=str(error))


def of_node(config: EnergyConfig, claims: Iterable[Claim], computing: bool) -> Sources:
    """Open the sources of this node for the ranks that made ``claims``, each GPU once (local).

    ``computing``: the ranks compute on GPUs.
    """
    found = Sources()
    if config.wants("nvml"):
        _add_gpus(found, list(claims), computing)
    else:
        found.missing["gpu"] = f"energy.sources = {config.sources!r}"
    if config.wants("rapl"):
        zones, missing = rapl.find(Path(config.powercap))
        found.counters += zones
        found.missing |= missing
    else:
        found.missing |= dict.fromkeys(("cpu", "dram"), f"energy.sources = {config.sources!r}")
    return found


def _add_gpus(found: Sources, claims: list[Claim], computing: bool) -> None:
    uuids = sorted({uuid for claim in claims for uuid in claim.gpus})
    reasons = [claim.reason for claim in claims if claim.reason]
    if uuids or computing:
        found.needed.add("gpu")
    if reasons or not uuids:
        found.missing["gpu"] = reasons[0] if reasons else NO_GPU
        found.unused |= set() if reasons else {"gpu"}
        return
    try:
        found.driver = nvml.Driver()
        found.counters += [found.driver.counter(uuid) for uuid in uuids]
    except MissingCapabilityError as error:
        found.missing["gpu"] = str(error)
        found.close()


def survey(powercap: Path, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return every source of this machine as plain values: what it is, whether it can be read, or why not (local).

    ``held``: a job that is started with this environment counts it although it computes on the processor.
    """
    rows = []
    try:
        with nvml.Driver() as driver:
            rows += _survey_gpus(driver, environment)
    except MissingCapabilityError as error:
        rows.append({"kind": "gpu", "name": "nvml", "reason": str(error)})
    zones, missing = rapl.find(powercap)
    rows += [{"kind": zone.kind, "name": zone.name, "reason": None} for zone in zones]
    rows += [{"kind": kind, "name": "rapl", "reason": reason} for kind, reason in missing.items()]
    return [{**row, "readable": row["reason"] is None} for row in rows]


def _survey_gpus(driver: nvml.Driver, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    gpus = driver.gpus()
    if not gpus:
        raise MissingCapabilityError("the NVIDIA driver shows no GPU to this process")
    held = nvml.visible(gpus, environment)
    return [
        {"kind": "gpu", "name": gpu.uuid, "model": gpu.name, "held": gpu.uuid in held, "reason": _refusal(driver, gpu)}
        for gpu in gpus
    ]


def _refusal(driver: nvml.Driver, gpu: nvml.Gpu) -> str | None:
    try:
        driver.counter(gpu.uuid)
    except MissingCapabilityError as error:
        return str(error)
    return None
