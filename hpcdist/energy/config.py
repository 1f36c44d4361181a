"""Configuration of energy: the ``[energy]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, no_effect, rule
from hpcdist.reporting.schema import check_section, key

SOURCES: Final = ("auto", "nvml", "rapl", "cray", "declared", "none")
POWERCAP: Final = "/sys/class/powercap"
PM_COUNTERS: Final = "/sys/cray/pm_counters"
LONGEST_INTERVAL_S: Final = 10.0  # a processor's counter may wrap after a minute
MOST_PUE: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """Section ``[energy]``: energy sources, sampling intervals, carbon intensity and price."""

    sources: str = key(
        "auto", "Energy counters to read. declared: a model from cpu_tdp_w and gpu_tdp_w.", choices=SOURCES
    )
    interval_s: float = key(0.1, "Seconds between samples.", ge=0.001, le=LONGEST_INTERVAL_S, unit="s")
    powercap: str = key(POWERCAP, "Directory of the RAPL counters of Linux.")
    pm_counters: str = key(PM_COUNTERS, "Directory of the counters of a Cray node.")
    cpu_tdp_w: float = key(
        0.0, "Power in watts of all processors of a node under load. 0: left out.", ge=0, le=100_000, unit="W"
    )
    gpu_tdp_w: float = key(0.0, "Power in watts of one GPU under load. 0: left out.", ge=0, le=100_000, unit="W")
    idle_fraction: float = key(0.3, "Fraction of cpu_tdp_w and gpu_tdp_w that idle devices draw.", ge=0, le=1)
    sensor_window_s: float = key(
        0.0,
        "Seconds that a GPU's sensor measures before each update. 0: as known for the GPU model.",
        ge=0,
        le=LONGEST_INTERVAL_S,
        unit="s",
    )
    shift: bool = key(False, "Delay some steps slightly, for GPU sensors that measure only part of the time.")
    utilisation_s: float = key(
        1.0,
        "Seconds between samples of CPU, GPU, memory and network utilisation. 0: none.",
        ge=0.01,
        le=3600,
        unit="s",
        off=0,
    )
    pue: float = key(
        1.0, "Power usage effectiveness: energy of the site divided by the energy of its nodes.", ge=1, le=MOST_PUE
    )
    carbon_g_per_kwh: float = key(0.0, "Grams of CO2 equivalents per kWh. 0: unknown.", ge=0, le=10_000, unit="g")
    carbon_source: str = key("", "Source of carbon_g_per_kwh.")
    carbon_date: str = key("", "Date of carbon_g_per_kwh.")
    price_per_kwh: float = key(0.0, "Price per kWh. 0: unknown.", ge=0, le=1e9)
    currency: str = key("", 'Currency of price_per_kwh, as "EUR".')

    def __post_init__(self) -> None:
        check_section(RULES, "energy", self)

    def wants(self, source: str) -> bool:
        """Return True if the key ``sources`` selects ``source``, such as "nvml"."""
        return self.sources == source or (self.sources == "auto" and source != "declared")


RULES: Final = (
    *(
        no_effect(f"energy.{name}", getattr(EnergyConfig, name), "energy.sources", ["declared"])
        for name in ("cpu_tdp_w", "gpu_tdp_w", "idle_fraction")
    ),
    rule(
        "energy.sources=declared where energy.cpu_tdp_w=0 with energy.gpu_tdp_w=0",
        cure="set energy.cpu_tdp_w (of all processors of a node) or energy.gpu_tdp_w",
    ),
    rule(
        "energy.shift with energy.sources!=auto|nvml where energy.sensor_window_s=0",
        NO_EFFECT,
        "only GPU sensors measure part of the time; remove it, or choose 'nvml'",
    ),
    rule("energy.carbon_source with energy.carbon_g_per_kwh=0", NO_EFFECT, "set both keys"),
    rule("energy.carbon_date with energy.carbon_g_per_kwh=0", NO_EFFECT, "set both keys"),
    rule("energy.currency with energy.price_per_kwh=0", NO_EFFECT, "set both keys"),
    rule(
        "energy.carbon_g_per_kwh with energy.carbon_source=",
        cure="name the source of the figure, such as 'grid operator, mean of 2025'; emissions need a source",
    ),
    rule("energy.price_per_kwh with energy.currency=", cure="name the currency, such as 'EUR'"),
)
