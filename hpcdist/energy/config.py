"""Configuration of energy: the ``[energy]`` section of a recipe. Imports nothing but `reporting`."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, Rule, check_section, must, no_effect, one_of, rule

SOURCES: Final = ("auto", "nvml", "rapl", "cray", "declared", "none")
POWERCAP: Final = "/sys/class/powercap"
PM_COUNTERS: Final = "/sys/cray/pm_counters"
LONGEST_INTERVAL_S: Final = 10.0  # a processor's counter wraps within a minute at the least
MOST_PUE: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """Section ``[energy]``: the sources, the intervals, and the price of a joule.

    ``sources`` is "auto" (whatever can be read), "nvml" (the counters of NVIDIA GPUs), "rapl" (those of processors and
    their memory), "cray" (those of the nodes of a Cray), "none", or "declared": no measurement, but a model, in which
    a node's processors draw ``cpu_tdp_w`` watts and each GPU ``gpu_tdp_w`` (0: left out) when they are busy, and
    ``idle_fraction`` of that when they are not. One rank of each node reads them every ``interval_s`` seconds and keeps
    each sample: at 0.1 s that is 35 MB a day and source, twice that with its power. ``powercap`` is where Linux shows
    RAPL, ``pm_counters`` where a Cray shows its own; containers may have them elsewhere. ``utilisation_s``
    is the time between two looks at how busy processors, GPUs, memory and network are (0: none).

    ``sensor_window_s``: a GPU's sensor measures only so long before each update of its counter. 0: as is known of the
    model, see `hpcdist.energy.accounts.part_time_sensor`. With ``shift``, steps begin a little later now and then,
    less than an update of the counter in 64 steps, so that such a sensor sees all parts of them: ranks have to step
    together.

    What the site uses for cooling and losses is ``pue`` - 1 of what its nodes use. Emissions are known where
    ``carbon_g_per_kwh`` is given, the grams of CO2 equivalents of a kWh; ``carbon_source`` and ``carbon_date`` say
    whose figure that is. ``price_per_kwh`` is in ``currency``.
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
        """Whether ``source`` ("nvml", "rapl", "cray") is to be read. The declared model is none that "auto" means."""
        return self.sources == source or (self.sources == "auto" and source != "declared")


def _between(name: str, least: float, most: float, unit: str = "", off: bool = False) -> Rule:
    """Return the rule of the bounds of a number; ``off``: it may be 0, too."""
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
        cure="it needs energy.cpu_tdp_w (of all processors of a node) or energy.gpu_tdp_w",
    ),
    _between("sensor_window_s", 0.0, LONGEST_INTERVAL_S, "s"),
    rule(
        "energy.shift with energy.sources!=auto|nvml where energy.sensor_window_s=0",
        NO_EFFECT,
        "it is sensors of GPUs that look part of the time; remove it, or choose 'nvml'",
    ),
    _between("utilisation_s", 0.01, 3600.0, "s, or 0", off=True),
    _between("pue", 1.0, MOST_PUE),
    _between("carbon_g_per_kwh", 0.0, 10_000.0, "g"),
    _between("price_per_kwh", 0.0, 1e9),
    rule("energy.carbon_source with energy.carbon_g_per_kwh=0", NO_EFFECT, "give both"),
    rule("energy.carbon_date with energy.carbon_g_per_kwh=0", NO_EFFECT, "give both"),
    rule("energy.currency with energy.price_per_kwh=0", NO_EFFECT, "give both"),
    rule(
        "energy.carbon_g_per_kwh with energy.carbon_source=",
        cure="say whose figure it is, such as 'grid operator, mean of 2025': nobody can judge emissions otherwise",
    ),
    rule("energy.price_per_kwh with energy.currency=", cure="say of what, such as 'EUR'"),
)
