"""Configuration of energy: the ``[energy]`` section of a recipe. Imports only `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, Rule, check_section, must, no_effect, one_of, rule

SOURCES: Final = ("auto", "nvml", "rapl", "cray", "declared", "none")
POWERCAP: Final = "/sys/class/powercap"
PM_COUNTERS: Final = "/sys/cray/pm_counters"
LONGEST_INTERVAL_S: Final = 10.0  # a processor's counter may wrap after a minute
MOST_PUE: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """Section ``[energy]``: the energy sources, the sampling intervals, and the price of energy.

    - ``sources``: "auto" (all readable counters), "nvml" (NVIDIA GPUs), "rapl" (processors and memory), "cray" (Cray
      nodes), "declared" (a model), or "none".
    - ``cpu_tdp_w``, ``gpu_tdp_w``: model power of a node's busy processors and of a busy GPU (0: no GPUs).
      ``idle_fraction``: fraction of these watts when idle.
    - ``interval_s``, ``utilisation_s``: seconds between energy samples and utilisation samples (0: no utilisation).
    - ``powercap``, ``pm_counters``: directories of the RAPL and Cray counters.
    - ``sensor_window_s``: seconds that a GPU's sensor measures before each counter update (0: by GPU model).
    - ``shift``: True to delay some steps on rank 0, so that a sensor with pauses sees all parts of a step. Requires
      synchronous training: the other ranks wait.
    - ``pue``: energy of the site divided by the energy of its nodes.
    - ``carbon_g_per_kwh``: required for emissions, with its origin ``carbon_source`` and its ``carbon_date``.
    - ``price_per_kwh``: price in ``currency``.
    """

    sources: str = "auto"
    interval_s: float = 0.1
    powercap: str = POWERCAP
    pm_counters: str = PM_COUNTERS
    cpu_tdp_w: float = 0.0
    gpu_tdp_w: float = 0.0
    idle_fraction: float = 0.3
    sensor_window_s: float = 0.0
    shift: bool = False
    utilisation_s: float = 1.0
    pue: float = 1.0
    carbon_g_per_kwh: float = 0.0
    carbon_source: str = ""
    carbon_date: str = ""
    price_per_kwh: float = 0.0
    currency: str = ""

    def __post_init__(self) -> None:
        check_section(RULES, "energy", self)

    def wants(self, source: str) -> bool:
        """Return True if energy.sources is ``source``, or "auto", which selects all sources except "declared"."""
        return self.sources == source or (self.sources == "auto" and source != "declared")


def _between(name: str, least: float, most: float, unit: str = "", off: bool = False) -> Rule:
    return must(
        f"energy.{name}",
        lambda value: least <= value <= most or (off and value == 0),
        f"it must be between {least:g} and {most:g} {unit}".rstrip(),
    )


RULES: Final = (
    one_of("energy.sources", SOURCES),
    _between("interval_s", 0.001, LONGEST_INTERVAL_S, "s"),
    *(
        no_effect(f"energy.{name}", getattr(EnergyConfig, name), "energy.sources", ["declared"])
        for name in ("cpu_tdp_w", "gpu_tdp_w", "idle_fraction")
    ),
    _between("cpu_tdp_w", 0.0, 1e5, "W"),
    _between("gpu_tdp_w", 0.0, 1e5, "W"),
    _between("idle_fraction", 0.0, 1.0),
    rule(
        "energy.sources=declared where energy.cpu_tdp_w=0 with energy.gpu_tdp_w=0",
        cure="set energy.cpu_tdp_w (of all processors of a node) or energy.gpu_tdp_w",
    ),
    _between("sensor_window_s", 0.0, LONGEST_INTERVAL_S, "s"),
    rule(
        "energy.shift with energy.sources!=auto|nvml where energy.sensor_window_s=0",
        NO_EFFECT,
        "only GPU sensors measure part of the time; remove it, or choose 'nvml'",
    ),
    _between("utilisation_s", 0.01, 3600.0, "s, or 0", off=True),
    _between("pue", 1.0, MOST_PUE),
    _between("carbon_g_per_kwh", 0.0, 10_000.0, "g"),
    _between("price_per_kwh", 0.0, 1e9),
    rule("energy.carbon_source with energy.carbon_g_per_kwh=0", NO_EFFECT, "set both keys"),
    rule("energy.carbon_date with energy.carbon_g_per_kwh=0", NO_EFFECT, "set both keys"),
    rule("energy.currency with energy.price_per_kwh=0", NO_EFFECT, "set both keys"),
    rule(
        "energy.carbon_g_per_kwh with energy.carbon_source=",
        cure="name the source of the figure, such as 'grid operator, mean of 2025'; emissions need a source",
    ),
    rule("energy.price_per_kwh with energy.currency=", cure="name the currency, such as 'EUR'"),
)
