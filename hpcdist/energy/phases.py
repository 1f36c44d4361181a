"""Energy of the phases of any program: `window`, `usage` and `configure`.

`hpcdist.energy.window` and its like are these names. They use one `EnergyMonitor` over all ranks of the job.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final

from hpcdist.comm.failure.exits import at_exit
from hpcdist.comm.mpi.world import init
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor.monitor import EnergyMonitor
from hpcdist.errors import ConfigurationError, UsageError

VARIABLES: Final = "HPCDIST_SET__ENERGY__"  # prefix of the variables that set keys of [energy]

_monitors: Final[list[EnergyMonitor]] = []  # the one of this process
_entered: Final[dict[str, None]] = {}  # phases that this rank has entered


def configure(**keys: Any) -> None:
    """Open the sensors with the keys of ``[energy]`` of a recipe, before the first `window`. Collective.

    ``configure(sources="declared", cpu_tdp_w=280.0)`` is an estimate where nothing can be read. Variables such as
    HPCDIST_SET__ENERGY__SOURCES of rank 0 win over ``keys``. Raises UsageError after the first window or for an unknown
    key, ConfigurationError for an invalid value or variable.
    """
    if _monitors:
        raise UsageError("energy.configure comes before the first energy.window of a program")
    world = init()
    try:
        config = EnergyConfig(
            **keys
            | _settings(world.bcast({name: text for name, text in os.environ.items() if name.startswith(VARIABLES)}))
        )
    except TypeError as error:
        raise UsageError(f"energy.configure: {error}; the keys are those of [energy] in a recipe") from None
    monitor = EnergyMonitor(world.comm, config)
    monitor.start()
    at_exit(monitor.stop)
    _monitors.append(monitor)


def _settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of ``[energy]`` that variables set. Raises ConfigurationError."""
    defaults = {field.name: field.default for field in fields(EnergyConfig)}
    keys: dict[str, Any] = {}
    for variable in sorted(name for name in environment if name.startswith(VARIABLES)):
        key, text = variable.removeprefix(VARIABLES).lower(), environment[variable]
        try:
            kind: Any = type(defaults[key])
            keys[key] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text.strip("'\""))
        except KeyError:
            expected = "true or false" if key in defaults else f"a key of [energy]: {', '.join(defaults)}"
            raise ConfigurationError(f"environment variable {variable}={text!r}; expected {expected}") from None
        except ValueError:
            raise ConfigurationError(f"environment variable {variable}={text!r}; expected a number") from None
    return keys


@contextmanager
def window(phase: str) -> Iterator[None]:
    """Attribute the energy that this job uses inside of the block to ``phase``, without that of inner windows.

    The first one of a program opens the sensors (collective); the others are local, and every rank should have the
    same ones. The sensors of a node count all of its ranks together, and the windows of the first rank of the node
    divide the joules. `usage` has the joules.
    """
    if not _monitors:
        configure()
    _entered[phase] = None
    with _monitors[0].window(phase):
        yield


def usage() -> dict[str, Any]:
    """Return the joules of the job until now. Collective.

    ``energy_j`` is the total and ``phases`` the same by phase (``joules``, ``seconds``, ``windows``); NaN where it is
    not known, for the ``reason`` given. ``not_included`` names what has no sensor, ``label`` says whether a model was
    asked instead of a sensor. The joules of a phase are those of all ranks of each node while the first rank of the
    node was in the phase. A phase that none of these first ranks has entered is NaN. Outside of Linux machines with
    readable counters all of it is NaN.
    """
    if not _monitors:
        configure()
    usage = _monitors[0].report()
    for rank, names in enumerate(init().comm.allgather_object(list(_entered))):
        for name in names:
            reason = f"only ranks that are not the first of a node, such as rank {rank}, have windows of {name}"
            nothing = {"joules": math.nan, "seconds": math.nan, "windows": 0, "reason": reason}
            usage["phases"].setdefault(name, nothing)
    return usage
