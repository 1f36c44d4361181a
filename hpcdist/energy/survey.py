"""Every source of this machine as plain values: what can be read, or exactly why not. For people, not for jobs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hpcdist.energy import nvml, pm_counters, rapl
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.counters import Counter
from hpcdist.energy.parttime import UNKNOWN, sensor_of
from hpcdist.energy.visible import visible
from hpcdist.errors import MissingCapabilityError

MODEL: Final = (
    "a model, no measurement: only when asked for, with energy.sources = 'declared' and the watts of the devices in "
    "energy.cpu_tdp_w or energy.gpu_tdp_w"
)


def survey(config: EnergyConfig, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sources, each with ``kind``, ``name``, ``readable`` and ``reason`` (None where it is readable).

    GPUs also have ``model``, ``held`` (a job that is started with this environment counts it although it computes on
    the processor), ``note``, ``power`` (field and scope), and ``sensor``: seconds between updates, seconds of them that
    it looks, and where these are known from; None where they are not known.
    """
    rows: list[dict[str, Any]] = []
    try:
        with nvml.Driver() as driver:
            rows += _gpus(driver, environment)
    except MissingCapabilityError as error:
        rows.append({"kind": "gpu", "name": "nvml", "reason": str(error)})
    zones, missing = rapl.find(Path(config.powercap))
    rows += [_row(zone) for zone in zones]
    rows += [{"kind": kind, "name": "rapl", "reason": reason} for kind, reason in missing.items()]
    counters, missing = pm_counters.find(Path(config.pm_counters))
    rows += [_row(counter) for counter in counters]
    rows += [{"kind": kind, "name": "pm_counters", "reason": reason} for kind, reason in missing.items()]
    rows.append({"kind": "any", "name": "declared", "reason": MODEL})
    return [{**row, "readable": row["reason"] is None} for row in rows]


def _row(counter: Counter) -> dict[str, Any]:
    return {"kind": counter.kind, "name": counter.name, "reason": None}


def _gpus(driver: nvml.Driver, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    gpus = driver.gpus()
    if not gpus:
        raise MissingCapabilityError("the NVIDIA driver shows no GPU to this process")
    held = visible(gpus, environment, driver.parent)
    return [{**_gpu(driver, gpu), "held": gpu.uuid in held} for gpu in gpus]


def _gpu(driver: nvml.Driver, gpu: nvml.Gpu) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": "gpu", "name": gpu.uuid, "model": gpu.name, "reason": None}
    try:
        counter = driver.counter(gpu.uuid)
    except MissingCapabilityError as error:
        return row | {"reason": str(error)}
    about, sensor = counter.about, sensor_of(gpu.name)
    known = None if sensor.source == UNKNOWN else [sensor.update_s, sensor.window_s, sensor.source]
    power = " of the ".join(filter(None, (about.power_field, about.power_scope)))
    return row | {"note": about.note, "power": power, "sensor": known}
