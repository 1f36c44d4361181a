"""What an objective makes of an estimate, and the least that it can make of any like it: the bounds of a search.

A step of a layout takes at least what its units take, and wait for inside, all stages of the pipeline being as busy as
the average of them: (seconds of all units for a micro-batch) x (micro-batches) / (stages). Nothing is assumed of the
schedule, the cut, messages between stages, the exchange or the update, so no layout of the family is faster. Where one
of p ranks computes nothing again, it has at most X of S seconds, being one rank, and saves at most X / 2 of the A that
are computed again: that is the forward, and back takes longer. So p X >= S + A - X / 2.

An order of micro-batches takes at least what it takes without the exchange, the update and the input (`FREE`), for they
are all that differs between its strategies. Joules are a sum over the terms of time, each with its own power, so the
least is what is left without those of the same terms: of a step that is half bubble, an exchange has more than its
share. Prices are those of these seconds and joules, failures left out.
"""

from dataclasses import replace
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.again import ahead
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.energy import JOULES_PER_KWH, energy, held
from hpcdist.planner.estimate import Estimate, Timing
from hpcdist.planner.layout import Layout
from hpcdist.planner.ranks import stage_of
from hpcdist.planner.stage_seconds import loads

FREE: Final = ("data", "rows", "update", "input")  # terms of time that a strategy, or a compression, decides
AGAIN: Final = 0.5  # of what a micro-batch takes is at most computed again
UNITS: Final = {"time": "s", "energy": "J", "cost": "", "energy-delay": "J s"}


def check(objective: str, cluster: Cluster) -> None:
    """Raise UsageError where the cluster does not say what the objective needs (local)."""
    site = cluster.site
    if objective == "cost" and site.device_hour_price is None and site.kwh_price is None:
        raise UsageError(
            f"the objective 'cost' on {cluster.name}, which has no prices; give site.device_hour_price or "
            "site.kwh_price in its file, or choose the objective energy"
        )
    if objective in ("energy", "energy-delay") and not cluster.device.peak_w:
        raise UsageError(
            f"the objective {objective!r} on {cluster.name}, whose device has no power; give device.peak_power in its "
            "file, or choose the objective time"
        )


def value(estimate: Estimate, objective: str) -> float:
    """Return what is to be small, of one step (local)."""
    if objective == "time":
        return estimate.step_s
    if objective == "cost":
        assert estimate.run.price is not None, "the cluster has a price"
        return estimate.run.price / estimate.run.steps
    joules = estimate.energy.joules
    return joules if objective == "energy" else joules * estimate.step_s


def unit(objective: str, cluster: Cluster) -> str:
    """Return what the values are in (local)."""
    return cluster.site.currency if objective == "cost" else UNITS[objective]


def order_floor(estimate: Estimate, objective: str, cluster: Cluster) -> float:
    """Return the least value of any layout of the same order as ``estimate``'s (local)."""
    timing, layout = estimate.timing, estimate.layout
    free = {name: timing.terms.get(name, 0.0) for name in FREE}
    least_s = estimate.step_s - sum(free.values())
    if objective == "time":
        return least_s
    without = energy(replace(timing, terms=free), layout, cluster, 0.0)  # nothing of it computes
    return _worth(least_s, estimate.energy.joules - without.joules, layout, cluster, objective)


def family_floor(
    description: Description, family: Layout, cluster: Cluster, global_batch: int, objective: str
) -> float:
    """Return the least value of a step of any layout of the family (local).

    All joules beyond those of computing, at the power of products that reach nothing of the peak, and of waiting for
    the messages inside of the units, are left out.
    """
    many = family.microbatches(global_batch)
    alone = replace(family, pipeline=1, chunks=1, schedule="1f1b")  # so every other pipeline asks for the same
    ((load, _),) = loads(description, alone, cluster)
    waits = stage_of(load, alone, cluster, many).sent
    computes_s = load.forward_s + load.input_s + load.weight_s + load.add_s * (many - 1) / many
    once_s = computes_s + sum(waits.forward_s.values()) + sum(waits.back_s.values())
    again_s = load.again_s + sum(waits.again_s.values())
    each_s = (once_s + again_s) / family.pipeline
    if ahead(family):  # one rank may compute nothing again
        each_s = max(once_s / family.pipeline, (once_s + again_s) / (family.pipeline + AGAIN))
    whole_s = each_s * -(-global_batch // family.data) / family.microbatch  # the last one may be smaller
    if objective == "time":
        return whole_s
    share = (computes_s + load.again_s) / (once_s + again_s)
    terms = {"forward": share * whole_s, "tensor": (1 - share) * whole_s}
    bare = Timing(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})
    return _worth(whole_s, energy(bare, family, cluster, 0.0).joules, family, cluster, objective)


def _worth(step_s: float, joules: float, layout: Layout, cluster: Cluster, objective: str) -> float:
    """Return the value of a step of ``step_s`` and ``joules`` without failures; not for the objective "time"."""
    if objective == "cost":
        site = cluster.site
        hours = held(layout, cluster) * step_s / 3600
        return hours * (site.device_hour_price or 0.0) + joules / JOULES_PER_KWH * (site.kwh_price or 0.0)
    return joules if objective == "energy" else joules * step_s
