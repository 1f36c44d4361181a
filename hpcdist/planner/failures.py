"""Expected course of a run: steps, checkpoints, failures and restarts; its duration, energy, carbon and price.

Nodes fail independently and at random: n of them fail n times as often as one. A save holds the steps up for as long
as the storage takes its bytes. A failure costs the work since the last save and a restart, which reads the
checkpoint. The checkpoint interval and the slowdown are Daly's (`hpcdist.strategies.daly_interval`), on whole steps.
"""

import math
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.energy import JOULES_PER_KWH, devices_held, nodes_of, waiting_w
from hpcdist.planner.estimate import RunEstimate, StepEnergy
from hpcdist.planner.layout import ParallelLayout
from hpcdist.strategies import daly_interval

ENDLESS: Final = 1000.0  # wall time over work, beyond which a run is said never to end


def mtbf_s(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the mean seconds between two failures that end a job of ``layout``."""
    return cluster.failures.node_mtbf_s / nodes_of(layout, cluster)


def save_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds in which all nodes of ``layout`` write their equal shares of a checkpoint."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    return checkpoint_bytes / min(storage.write_bytes_per_s, nodes * storage.node_write_bytes_per_s)


def restart_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds from a failure to the next step: what the site needs, then reading the checkpoint once."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    reading_s = checkpoint_bytes / min(storage.read_bytes_per_s, nodes * storage.node_read_bytes_per_s)
    return cluster.failures.restart_s + reading_s


def run(
    steps: int, step_s: float, energy: StepEnergy, checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster
) -> RunEstimate:
    """Return the expected course of ``steps`` steps of ``step_s`` seconds and of ``energy`` each.

    ``checkpoint_bytes`` are those of all that is saved. A run that is shorter than the best interval saves once, at its
    end. Where failures come so fast that a run would last over `ENDLESS` times its work, seconds, joules and what
    follows are infinite.
    Raises UsageError for less than one step.
    """
    if steps < 1:
        raise UsageError(f"a run of {steps} steps is none; expected 1 or more")
    mtbf, save = mtbf_s(layout, cluster), save_s(checkpoint_bytes, layout, cluster)
    restart = restart_s(checkpoint_bytes, layout, cluster)
    between = min(steps, max(1, round(daly_interval.daly(save, mtbf) / step_s)))  # steps between two saves
    work_s, between_s = steps * step_s, between * step_s
    try:
        slowdown = daly_interval.slowdown(between_s, save, mtbf, restart)
    except OverflowError:
        slowdown = math.inf
    if slowdown > ENDLESS:
        slowdown = math.inf
    wall_s = work_s * slowdown
    failures = wall_s / mtbf
    waiting_s = steps / between * save + failures * restart
    joules = _joules(wall_s, min(wall_s, waiting_s), energy.joules / step_s, waiting_w(layout, cluster))
    site = cluster.site
    known = cluster.device.peak_w > 0
    carbon = site.carbon_g_per_kwh
    return RunEstimate(
        steps=steps,
        work_s=work_s,
        wall_s=wall_s,
        mtbf_s=mtbf,
        failures=failures,
        save_s=save,
        interval_s=between_s,
        slowdown=slowdown,
        joules=joules,
        carbon_g=joules / JOULES_PER_KWH * carbon if known and carbon is not None else None,
        price=_price(wall_s, joules if known else None, layout, cluster),
        currency=site.currency,
    )


def _joules(wall_s: float, waiting_s: float, computing_w: float, waiting_power_w: float) -> float:
    if math.isinf(wall_s):
        return math.inf
    return (wall_s - waiting_s) * computing_w + waiting_s * waiting_power_w


def _price(wall_s: float, joules: float | None, layout: ParallelLayout, cluster: Cluster) -> float | None:
    """Return what devices of whole nodes and electricity cost; None without any price, or without the joules for one.

    A price of a device's hour that holds its electricity stands alone in a file: `kwh_price` is added to it.
    """
    site = cluster.site
    if site.device_hour_price is None and site.kwh_price is None:
        return None
    price = devices_held(layout, cluster) * wall_s / 3600 * (site.device_hour_price or 0.0)
    if site.kwh_price is None:
        return price
    return None if joules is None else price + joules / JOULES_PER_KWH * site.kwh_price
