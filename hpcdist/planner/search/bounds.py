"""Objective of an estimate, and lower bounds on it for whole families of layouts.

A step of a layout takes at least what its units take, and wait for inside, all stages of the pipeline being as busy
as the average of them: (seconds of all units for a micro-batch) x (micro-batches) / (stages). Nothing is assumed of
the schedule, the cut, messages between stages, the exchange or the update, so no layout of the family is faster.
Where one of p ranks recomputes nothing, it has at most X of S seconds, being one rank, and saves at most X / 2 of the
A that are recomputed: that is the forward, and the backward takes longer. So p X >= S + A - X / 2.

With a schedule, messages are known, and so is how long the slowest rank is idle, as `hpcdist.planner.time.pipeline`
says, if the others are: with F, I, W of the mean of them. That mean is what all ranks have together, without the
slowest, over p - 1. Were it all of that, the slowest rank included, it would be idle for longer, by no more than it
takes itself for a micro-batch, X: every form of the time that is idle is (p - 1) times F, I and W, or parts of them,
less what fills it, which grows with F, I and W. Of the schedules that share T out over v chunks it is X / v. So of m
micro-batches a step takes at least m X + (idle with all) - X / v, which is least for the least X; and what is idle is
not below 0. Recomputing ahead fills more of it: of A, at most X / 2, one in v of 1F1B, and two of the interleaved
schedule.

An order of micro-batches takes at least what it takes without the exchange, the update and the input: they are all
that differs between its strategies (`hpcdist.planner.time.step.MicrobatchFlow`). Joules are a sum over the terms of
time, each with its own power, so the least is that of these terms. Before an order is timed, the slowest rank is
taken to compute for as much of its time as all ranks do together; one that mostly sends takes less power, by less
than what hosts and idle devices take, of which the bound has none for the exchange and the update. Prices are those
of these seconds and joules, failures left out.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.energy import JOULES_PER_KWH, devices_held, energy
from hpcdist.planner.estimate import PlanEstimate, TimeEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead, step_flops
from hpcdist.planner.plan import peak_of, peak_share
from hpcdist.planner.time.compute import cached
from hpcdist.planner.time.expert_rows import row_route
from hpcdist.planner.time.network import span
from hpcdist.planner.time.pipeline import SPLIT, PlannedSeconds, closed_form
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad, collective_wait, load_key, loads
from hpcdist.planner.time.step import AXES, MicrobatchFlow
from hpcdist.strategies.schedule.generate.registry import chunks_of

RECOMPUTED_SHARE: Final = 0.5  # of what a micro-batch takes is at most computed again
ROUNDED: Final = 1 - 1e-12  # sums in another order
UNITS: Final = {"time": "s", "energy": "J", "cost": "", "energy-delay": "J s"}


def check_objective(objective: str, cluster: Cluster) -> None:
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


def value(estimate: PlanEstimate, objective: str) -> float:
    """Return the value of one step, which a search makes small (local)."""
    if objective == "time":
        return estimate.step_s
    if objective == "cost":
        assert estimate.run.price is not None, "the cluster has a price"
        return estimate.run.price / estimate.run.steps
    joules = estimate.energy.joules
    return joules if objective == "energy" else joules * estimate.step_s


def value_and_tie_break(estimate: PlanEstimate, objective: str) -> tuple[float, float]:
    """Return the value, and for the objective "time" the tie-break: the longest step of the range, or the modelled one.

    The correction and the limit of the MFU only add to a step, so every bound of the modelled value bounds this pair.
    """
    objective_value = value(estimate, objective)
    if objective != "time":
        return objective_value, objective_value
    return objective_value, estimate.step_range_s[1] if estimate.step_range_s else estimate.timing.modelled_s


def unit(objective: str, cluster: Cluster) -> str:
    """Return the unit of the values (local)."""
    return cluster.site.currency if objective == "cost" else UNITS[objective]


def order_bound(
    known: MicrobatchFlow,
    description: ModelDescription,
    order: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    objective: str,
) -> float:
    """Return the least value of any layout of an ``order`` whose micro-batches are ``known`` (local)."""
    least_s = sum(known.terms.values())
    if objective == "time":
        return least_s
    peak_flops = (order.devices - order.servers) * peak_of(cluster, order)
    reached = peak_share(step_flops(description, order, global_batch), known, peak_flops)
    return _worth(least_s, _joules(known.terms, order, cluster, reached), order, cluster, objective)


class FamilyTotals(NamedTuple):
    """Totals of all units of a family, which bound all of its orders.

    ``seconds`` are those of a micro-batch on all ranks, without what is computed again ahead; the slowest rank takes
    ``each_s`` of one or more, for as many samples as ``full`` of them have. ``computing`` is the share that computes.
    """

    seconds: PlannedSeconds
    each_s: float
    full: float
    computing: float


def family_totals(
    description: ModelDescription, family: ParallelLayout, cluster: Cluster, global_batch: int
) -> FamilyTotals:
    """Return the totals of the family (local)."""
    many = family.microbatches(global_batch)
    alone = family.but(pipeline=1, chunks=1, schedule="1f1b")  # so every other pipeline asks for the same
    load, waits = _alone(description, alone, cluster)
    forward_s = load.forward_s + sum(waits.forward_s.values())
    input_s = load.input_s + sum(waits.back_s.values())
    weight_s = load.weight_s + load.add_s * (many - 1) / many
    once_s = forward_s + input_s + weight_s
    again_s = load.again_s + sum(waits.again_s.values())
    each_s = (once_s + again_s) / family.pipeline
    if recomputes_ahead(family):  # one rank may compute nothing again
        each_s = max(once_s / family.pipeline, (once_s + again_s) / (family.pipeline + RECOMPUTED_SHARE))
    else:
        input_s += again_s
    computes_s = load.forward_s + load.input_s + weight_s + load.again_s
    full = -(-global_batch // family.data) / family.microbatch  # the last one may be smaller
    return FamilyTotals(PlannedSeconds(forward_s, input_s, weight_s), each_s, full, computes_s / (once_s + again_s))


def _alone(description: ModelDescription, alone: ParallelLayout, cluster: Cluster) -> tuple[StageLoad, CollectiveWait]:
    """Return the load of all units on one rank, and what it waits for: the same where other axes lie otherwise."""
    spans = (span(alone, axis, cluster) for axis in AXES)
    route = row_route(alone, cluster)
    key, known = (*load_key(description, alone), alone.tensor_overlap, route, *spans), cached(cluster, "alone")
    if key not in known:
        ((load, _),) = loads(description, alone, cluster)
        known[key] = load, collective_wait(load, alone, cluster)
    entry: tuple[StageLoad, CollectiveWait] = known[key]
    return entry


def family_bound(of_all: FamilyTotals, family: ParallelLayout, cluster: Cluster, objective: str) -> float:
    """Return the least value of a step of any layout of the family (local).

    All joules beyond those of computing, at the power of products that reach nothing of the peak, and of waiting for
    the messages inside of the units, are left out.
    """
    return _floor(of_all, 0.0, 0.0, family, cluster, objective)


def schedule_bound(
    of_all: FamilyTotals, order: ParallelLayout, hop_s: float, cluster: Cluster, objective: str
) -> float:
    """Return the least value of any layout of an ``order`` (local). ``hop_s``: a message between two ranks."""
    ranks = order.pipeline
    if ranks == 1:
        return family_bound(of_all, order, cluster, objective)
    most = PlannedSeconds(*(seconds / (ranks - 1) for seconds in of_all.seconds))
    form = closed_form(order, most, most, math.ceil(of_all.full), hop_s)
    own = 1.0 if order.schedule in SPLIT else 1 / chunks_of(order.schedule, order.chunks)
    if recomputes_ahead(order):
        own += own * RECOMPUTED_SHARE * {"1f1b": 1, "interleaved": 2}.get(order.schedule, 0)
    idle_s = max(0.0, form.idle_s - own * of_all.each_s) if of_all.full >= own else 0.0
    return ROUNDED * _floor(of_all, idle_s, form.message_s, order, cluster, objective)


def _floor(
    of_all: FamilyTotals, idle_s: float, message_s: float, layout: ParallelLayout, cluster: Cluster, objective: str
) -> float:
    """Return the value of what the slowest rank takes at least, of so much that is idle, and of such messages."""
    busy_s = of_all.each_s * of_all.full
    least_s = busy_s + idle_s + message_s
    if objective == "time":
        return least_s
    inside = {"forward": of_all.computing * busy_s, "tensor": (1 - of_all.computing) * busy_s}
    joules = _joules({**inside, "bubble": idle_s, "pipeline": message_s}, layout, cluster, 0.0)
    return _worth(least_s, joules, layout, cluster, objective)


def _joules(terms: Mapping[str, float], layout: ParallelLayout, cluster: Cluster, reached: float) -> float:
    """Return the joules of these terms of a step; computing, the devices have ``reached`` that share of their peak."""
    bare = TimeEstimate(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})
    return energy(bare, layout, cluster, reached).joules


def _worth(step_s: float, joules: float, layout: ParallelLayout, cluster: Cluster, objective: str) -> float:
    """Return the value of a step of ``step_s`` and ``joules`` without failures; not for the objective "time"."""
    if objective == "cost":
        site = cluster.site
        hours = devices_held(layout, cluster) * step_s / 3600
        return hours * (site.device_hour_price or 0.0) + joules / JOULES_PER_KWH * (site.kwh_price or 0.0)
    return joules if objective == "energy" else joules * step_s
