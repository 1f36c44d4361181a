"""Energy of the phases of any program: `window`, `usage` and `configure`, as exported by `hpcdist.energy`."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final

from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.exits import at_exit
from hpcdist.comm.mpi.world import AnyComm, communicator_of
from hpcdist.constants import SETTINGS_PREFIX
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor import EnergyMonitor
from hpcdist.errors import ConfigurationError, UsageError

VARIABLES: Final = f"{SETTINGS_PREFIX}ENERGY__"  # prefix of the variables that set keys of [energy]

_monitors: Final[list[EnergyMonitor]] = []  # the monitor of this process
_entered: Final[dict[str, None]] = {}  # phases that this rank has entered


def configure(*, comm: AnyComm = None, **keys: Any) -> None:
    """Configure and open the energy sensors, before the first `window`. Collective over ``comm``.

    The keywords are keys of ``[energy]`` in a recipe, such as ``cpu_tdp_w=280.0``. ``comm``: the ranks that call
    `window` and `usage`; None means all ranks. Raises UsageError, ConfigurationError.
    """
    if _monitors:
        raise UsageError(
            "energy.configure was called after the first energy.window, or after the init_process_group of a run with "
            "--out; call energy.configure first"
        )
    where = communicator_of(comm)
    try:
        # Environment variables of the first rank, such as HPCDIST_SET__ENERGY__SOURCES, override the keywords.
        config = EnergyConfig(
            **keys
            | _settings(
                where.broadcast_object({name: text for name, text in os.environ.items() if name.startswith(VARIABLES)})
            )
        )
    except TypeError as error:
        raise UsageError(f"energy.configure: invalid keyword ({error}); use keys of [energy] in a recipe") from None
    # The watchdog of a recorded program has the deadline that the program sets.
    deadline: dict[str, Any] = {"deadline_s": math.inf} if failfast.is_recording() else {}
    opened = EnergyMonitor(where, config, **deadline)
    opened.start()
    at_exit(opened.stop)
    _monitors.append(opened)


def _settings(environment: Mapping[str, str]) -> dict[str, Any]:
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
    """Attribute the energy of the ``with`` block to ``phase``. The first window is collective, later ones are local.

    The first window opens the sensors over all ranks, unless `configure` was called. Every rank should enter the same
    windows, because the first rank of each node measures the whole node.
    """
    windows = monitor()
    _entered[phase] = None
    with windows.window(phase):
        yield


def monitor() -> EnergyMonitor:
    """Return the monitor of the windows. The first call opens the sensors. Collective over all ranks."""
    if not _monitors:
        configure()
    return _monitors[0]


def usage() -> dict[str, Any]:
    """Return the energy of all `window` blocks so far, as a dict. Collective over the ranks of `configure`.

    ``energy_j``: total joules, or NaN for the given ``reason``. ``phases``: joules, seconds and number of windows of
    each phase. ``not_included``: kinds of energy not measured. ``label``: nonempty for estimated joules.
    """
    totals = monitor().report()
    for rank, names in enumerate(monitor().comm.allgather_object(list(_entered))):
        for name in names:
            # A phase has NaN joules if no node's first rank has entered it.
            reason = f"only ranks that are not the first of a node, such as rank {rank}, have windows of {name}"
            nothing = {"joules": math.nan, "seconds": math.nan, "windows": 0, "reason": reason}
            totals["phases"].setdefault(name, nothing)
    return totals
