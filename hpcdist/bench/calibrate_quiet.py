"""Whether a machine did something else while it was calibrated: its load, and how far repetitions lie apart.

The load is the kernel's one-minute average of what runs or wants to, of which each rank of ours is as many as it has
threads: ranks that wait for a message ask for it without end. More than that is somebody else's. The average forgets by
a factor e a minute, so that what ran before is taken off: after T seconds the load a meanwhile and b before show as
a (1 - exp(-T/60)) + b exp(-T/60).

Repetitions of the same call, in which others take the core now and then, have a mean far above their first quartile.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hpcdist.comm.communicator import Communicator

MINUTE_S: Final = 60.0
LEAST_S: Final = 30.0  # of measuring, below which an average over a minute does not tell it from what was before
SPARE, SPARE_SHARE = 0.5, 0.05  # of load, and of cores: what a machine does for itself
APART: Final = 0.2  # mean over first quartile, less 1: 0.02 on an idle machine, 0.6 with one more process for each core
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and namespaces of a machine


class Look(NamedTuple):
    """A machine at a moment: its load over the last minute, NaN where it tells none, and what is ours to come."""

    load: float
    own: int
    cores: int

    @property
    def most(self) -> float:
        """The load that is explained by our ranks."""
        return self.own + max(SPARE, SPARE_SHARE * self.cores)


def look(comm: Communicator, threads: int) -> tuple[Look, ...]:
    """Return all machines of the ranks, each of which computes with ``threads``. Collective over ``comm``."""
    told = comm.allgather_object((_machine(comm), load(), threads, os.cpu_count() or 1))
    found = []
    for machine in dict.fromkeys(one[0] for one in told):
        own = [one for one in told if one[0] == machine]
        found.append(Look(load=own[0][1], own=sum(one[2] for one in own), cores=own[0][3]))
    return tuple(found)


def load() -> float:
    """Return the average of the last minute, or NaN where the system has none (local)."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return math.nan


def _machine(comm: Communicator) -> str:
    """Return what ranks of one kernel share: hosts in namespaces of one machine have its load together."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return f"node {comm.nodes().index}"


def before(looks: Sequence[Look]) -> str:
    """Return what to say of a machine that is busy already; empty: it is not (local)."""
    return _worst([(one.load - one.most, f"a load of {one.load:.1f}", one) for one in looks])


def meanwhile(then: Sequence[Look], now: Sequence[Look], seconds: float, spread: float | None) -> str:
    """Return how one sees that a machine was busy between two looks, ``seconds`` apart; empty: it was not (local).

    ``spread`` is that of repetitions: their mean over their first quartile, less 1.
    """
    loads = []
    for old, new in zip(then, now, strict=True):
        during = new.load
        if seconds >= LEAST_S:
            kept = math.exp(-seconds / MINUTE_S)
            during = (new.load - old.load * kept) / (1 - kept)
        loads.append((during - new.most, f"a load of {during:.1f}", new))
    said = []
    if loaded := _worst(loads) or before(then):
        said.append(loaded)
    if spread is not None and spread > APART:
        said.append(f"repetitions took {spread:.0%} more on average than their first quartile")
    return ", ".join(said)


def _worst(loads: Sequence[tuple[float, str, Look]]) -> str:
    """Return the text of the greatest excess above 0; a load that is not known has none."""
    found = max((one for one in loads if one[0] > 0), default=None, key=lambda one: one[0])
    return "" if found is None else f"{found[1]} where {found[2].own} are ranks of this calibration"
