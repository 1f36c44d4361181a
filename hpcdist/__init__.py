"""MPI-native toolkit for distributed training; importing it starts neither MPI nor CUDA.

The names in ``__all__`` are the public API (``hpcdist help api``), imported lazily. All other modules may change
between versions. Type checkers read ``__init__.pyi``.
"""

import importlib
from typing import Any, Final

__version__ = "0.2.0"
__all__ = [
    "Training",
    "World",
    "all_gather",
    "all_to_all",
    "allreduce",
    "broadcast",
    "checkpoint",
    "energy",
    "init",
    "plan",
    "reduce_scatter",
    "session",
    "should_stop",
]

_MODULES: Final = {
    "Training": "hpcdist.training.script",
    "World": "hpcdist.comm.mpi.world",
    "all_gather": "hpcdist.collectives.arrays",
    "all_to_all": "hpcdist.collectives.arrays",
    "allreduce": "hpcdist.collectives.arrays",
    "broadcast": "hpcdist.collectives.arrays",
    "init": "hpcdist.comm.mpi.world",
    "plan": "hpcdist.training.use_cases.plan",
    "reduce_scatter": "hpcdist.collectives.arrays",
    "session": "hpcdist.comm.mpi.world",
    "should_stop": "hpcdist.training.run.stop_requests",
}


def __getattr__(name: str) -> Any:
    """Import and return the public object ``name`` at its first use. Raises AttributeError for other names."""
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in ("checkpoint", "energy"):
        value = importlib.import_module(f"hpcdist.{name}")
    else:
        raise AttributeError(f"module 'hpcdist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
