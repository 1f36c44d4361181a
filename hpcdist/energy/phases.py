"""Energy of the phases of any program: `window`, `usage` and `configure`.

`hpcdist.energy.window` and its like are these names. They use one `EnergyMonitor` over all ranks of the job.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from hpcdist.comm.mpi.world import init
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor.monitor import EnergyMonitor
from hpcdist.errors import UsageError

_monitors: Final[list[EnergyMonitor]] = []  # the one of this process


def configure(**keys: Any) -> None:
    """Open the sensors with the keys of ``[energy]`` of a recipe, before the first `window`. Collective.

    ``configure(sources="declared", cpu_tdp_w=280.0)`` is an estimate where nothing can be read. Raises UsageError after
    the first window or for an unknown key, ConfigurationError for a value that cannot be.
    """
    if _monitors:
        raise UsageError("energy.configure comes before the first energy.window of a program")
    try:
        config = EnergyConfig(**keys)
    except TypeError as error:
        raise UsageError(f"energy.configure: {error}; the keys are those of [energy] in a recipe") from None
    monitor = EnergyMonitor(init().comm, config)
    monitor.start()
    atexit.register(monitor.stop)
    _monitors.append(monitor)


@contextmanager
def window(phase: str) -> Iterator[None]:
    """Attribute the energy that this job uses inside of the block to ``phase``, without that of inner windows.

    The first one of a program opens the sensors (collective); the others are local, and every rank should have the
    same ones: the first rank of a node reads for all of its ranks. `usage` has the joules.
    """
    if not _monitors:
        configure()
    with _monitors[0].window(phase):
        yield


def usage() -> dict[str, Any]:
    """Return the joules of the job until now. Collective.

    ``energy_j`` is the total and ``phases`` the same by phase (``joules``, ``seconds``, ``windows``); NaN where it is
    not known, for the ``reason`` given. ``not_included`` names what has no sensor, ``label`` says whether a model was
    asked instead of a sensor. Outside of Linux machines with readable counters all of it is NaN.
    """
    if not _monitors:
        configure()
    return _monitors[0].report()
