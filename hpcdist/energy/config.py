"""The ``[energy]`` section of a recipe. Light: imports nothing but the errors."""

import math
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

SOURCES: Final = ("auto", "nvml", "rapl", "none")
POWERCAP: Final = "/sys/class/powercap"
LONGEST_INTERVAL_S: Final = 10.0  # a processor's counter wraps within a minute at the least


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """What is measured, and how often.

    ``sources`` is "auto" (whatever can be read), "nvml" (the counters of NVIDIA GPUs), "rapl" (those of processors and
    their memory) or "none". One rank of each node reads them every ``interval_s`` seconds and keeps each sample: 35 MB
    a day and source at 0.1 s. ``powercap`` is where Linux shows RAPL; containers may have it elsewhere.
    """

    sources: str = "auto"
    interval_s: float = 0.1
    powercap: str = POWERCAP

    def __post_init__(self) -> None:
        if self.sources not in SOURCES:
            raise ConfigurationError(f"energy.sources = {self.sources!r}; choose one of {', '.join(SOURCES)}")
        if not (math.isfinite(self.interval_s) and 0.001 <= self.interval_s <= LONGEST_INTERVAL_S):
            raise ConfigurationError(
                f"energy.interval_s = {self.interval_s}; it must be between 0.001 and {LONGEST_INTERVAL_S:g} s"
            )

    def wants(self, source: str) -> bool:
        """Whether ``source`` ("nvml" or "rapl") is to be read."""
        return self.sources in ("auto", source)
