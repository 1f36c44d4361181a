"""Energy of a run: counters of GPUs and processors, read by one rank of each node, attributed to phases.

Floor 5: imports only packages of lower floors. `monitor` reads the `sources` during a job, `attribution` and
`energy_metrics` evaluate samples, and `power_limits` changes device limits, for `python -m benchmarks power` only.
Begin with `monitor.EnergyMonitor` and `report.merge`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdist.energy.phases import configure, usage, window

__all__ = ["configure", "usage", "window"]


def __getattr__(name: str) -> Any:
    """Import the public ``name`` on first use, so that the import of this package does not load MPI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpcdist.energy.phases"), name)
