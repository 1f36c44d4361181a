"""Objective of an estimate, and lower bounds on it for families of layouts.

**Family bound.** A step takes at least T = (seconds of all units per micro-batch) x (micro-batches) / (stages), as if
all stages were equally busy. Let the slowest of p ranks take X seconds, and all ranks S seconds plus A seconds of
recomputation. If one rank recomputes nothing, it saves at most X / 2 of A. So p X >= S + A - X / 2.

Bounds for a single schedule: `schedule_bound` and `order_bound`.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate, TimeEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead, step_flops
from hpcdist.planner.plan import JOULES_PER_KWH, devices_held, energy, peak_of, peak_share
from hpcdist.planner.time.compute import cached
from hpcdist.planner.time.network import span
from hpcdist.planner.time.pipeline import SPLIT, PlannedSeconds, closed_form
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad, collective_wait, load_key, loads, row_route
from hpcdist.planner.time.step import AXES, MicrobatchFlow
from hpcdist.strategies.schedule.generate.registry import chunks_of

RECOMPUTED_SHARE: Final = 0.5  # maximum share of a micro-batch's time that is recomputation
ROUNDED: Final = 1 - 1e-12  # tolerance for sums in another order
UNITS: Final = {"time": "s", "energy": "J", "cost": "", "energy-delay": "J s"}


def check_objective(objective: str, cluster: Cluster) -> None:
    """Raise UsageError if the cluster file lacks data for ``objective``, such as the price for "cost". Local."""
    site = cluster.site
    if objective == "cost" and site.device_hour_price is None and site.kwh_price is None:
        raise UsageError(
            f"the objective 'cost' needs a price, but the cluster {cluster.name} has none; set "
            "site.device_hour_price or site.kwh_price in the cluster file, or choose the objective energy"
        )
    if objective in ("energy", "energy-delay") and not cluster.device.peak_w:
        raise UsageError(
            f"the objective {objective!r} needs the device power, but the cluster {cluster.name} has none; set "
            "device.peak in the cluster file, or choose the objective time"
        )


def value(estimate: PlanEstimate, objective: str) -> float:
    """Return the objective of one step: seconds (time), joules (energy), price (cost), or J s (energy-delay). Local."""
    if objective == "time":
        return estimate.step_s
    if objective == "cost":
        assert estimate.run.price is not None, "the cluster has a price"
        return estimate.run.price / estimate.run.steps
    joules = estimate.energy.joules
    return joules if objective == "energy" else joules * estimate.step_s


def value_and_tie_break(estimate: PlanEstimate, objective: str) -> tuple[float, float]:
    """Return the sort key of a layout: (objective value, value that decides between equal objective values)."""
    objective_value = value(estimate, objective)
    if objective != "time":
        return objective_value, objective_value
    # The upper end of the estimated range of step times.
    return objective_value, estimate.step_range_s[1] if estimate.step_range_s else estimate.timing.modelled_s


def unit(objective: str, cluster: Cluster) -> str:
    """Return the unit of the objective values. Local."""
    return cluster.site.currency if objective == "cost" else UNITS[objective]


def order_bound(
    flow: MicrobatchFlow,
    description: ModelDescription,
    order: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    objective: str,
) -> float:
    """Return a lower bound of the objective value of the layout ``order``, from its micro-batch times. Local.

    ``flow``: result of `microbatch_flow` for this layout. ``objective``: such as "time" or "energy".
    """
    # Excludes gradient exchange, optimizer update and reading of samples, so the bound holds for every data-axis
    # strategy and compression.
    least_s = sum(flow.terms.values())
    if objective == "time":
        return least_s
    peak_flops = (order.devices - order.servers) * peak_of(cluster, order)
    reached = peak_share(step_flops(description, order, global_batch), flow, peak_flops)
    return _worth(least_s, _joules(flow.terms, order, cluster, reached), order, cluster, objective)


class FamilyTotals(NamedTuple):
    """Times per micro-batch of a set of layouts that differ only in schedule, chunks, strategy and compression."""

    # Forward and backward with collectives, summed over all pipeline ranks. Excludes recomputation if ranks can
    # recompute while they wait for a gradient.
    seconds: PlannedSeconds
    each_s: float  # lower bound on the slowest pipeline rank, with recomputation
    full: float  # micro-batches per replica and step; a smaller last micro-batch is a fraction
    computing: float  # computation time / time with collectives


def family_totals(
    description: ModelDescription, family: ParallelLayout, cluster: Cluster, global_batch: int
) -> FamilyTotals:
    """Return the times per micro-batch of the whole model, over all pipeline ranks. Local.

    ``family``: any layout; its schedule, chunks, data-axis strategy and compression have no influence.
    """
    many = family.microbatches(global_batch)
    alone = family.but(pipeline=1, chunks=1, schedule="1f1b")  # the same cache entry for every pipeline degree
    load, waits = _alone(description, alone, cluster)
    forward_s = load.forward_s + sum(waits.forward_s.values())
    input_s = load.input_s + sum(waits.back_s.values())
    weight_s = load.weight_s + load.add_s * (many - 1) / many
    once_s = forward_s + input_s + weight_s
    again_s = load.again_s + sum(waits.again_s.values())
    each_s = (once_s + again_s) / family.pipeline
    if recomputes_ahead(family):  # one rank may recompute nothing
        each_s = max(once_s / family.pipeline, (once_s + again_s) / (family.pipeline + RECOMPUTED_SHARE))
    else:
        input_s += again_s
    computes_s = load.forward_s + load.input_s + weight_s + load.again_s
    full = -(-global_batch // family.data) / family.microbatch  # the last micro-batch may be smaller
    return FamilyTotals(PlannedSeconds(forward_s, input_s, weight_s), each_s, full, computes_s / (once_s + again_s))


def _alone(description: ModelDescription, alone: ParallelLayout, cluster: Cluster) -> tuple[StageLoad, CollectiveWait]:
    spans = (span(alone, axis, cluster) for axis in AXES)
    route = row_route(alone, cluster)
    key, cache = (*load_key(description, alone), alone.tensor_overlap, route, *spans), cached(cluster, "alone")
    if key not in cache:
        ((load, _),) = loads(description, alone, cluster)
        cache[key] = load, collective_wait(load, alone, cluster)
    entry: tuple[StageLoad, CollectiveWait] = cache[key]
    return entry


def family_bound(of_all: FamilyTotals, family: ParallelLayout, cluster: Cluster, objective: str) -> float:
    """Return a lower bound of the objective of layout ``family``, without pipeline idle time. Local.

    ``of_all``: result of `family_totals` for this layout. ``objective``: such as "time" or "energy".
    """
    return _floor(of_all, 0.0, 0.0, family, cluster, objective)


def schedule_bound(
    of_all: FamilyTotals, order: ParallelLayout, hop_s: float, cluster: Cluster, objective: str
) -> float:
    """Return a lower bound of the objective of layout ``order``, including pipeline idle time. Local.

    ``of_all``: result of `family_totals`. ``hop_s``: seconds of a message to the next pipeline rank.
    """
    ranks = order.pipeline
    if ranks == 1:
        return family_bound(of_all, order, cluster, objective)
    # Let X be the slowest rank's seconds per micro-batch, and S their sum over all p pipeline ranks; m micro-batches, v
    # model chunks per rank. The other ranks need at most Y = S / (p - 1) seconds per micro-batch on average. For ranks
    # with Y seconds, `closed_form` returns an idle time I, too large by at most E: X if the schedule splits backward in
    # two passes, else X / v. If ranks recompute while they wait, E is larger by half for 1F1B, and doubled for
    # interleaved. The step takes at least m X + I - E.
    most = PlannedSeconds(*(seconds / (ranks - 1) for seconds in of_all.seconds))
    form = closed_form(order, most, most, math.ceil(of_all.full), hop_s)
    fill = 1.0 if order.schedule in SPLIT else 1 / chunks_of(order.schedule, order.chunks)
    if recomputes_ahead(order):
        fill += fill * RECOMPUTED_SHARE * {"1f1b": 1, "interleaved": 2}.get(order.schedule, 0)
    idle_s = max(0.0, form.idle_s - fill * of_all.each_s) if of_all.full >= fill else 0.0
    return ROUNDED * _floor(of_all, idle_s, form.message_s, order, cluster, objective)


def _floor(
    of_all: FamilyTotals, idle_s: float, message_s: float, layout: ParallelLayout, cluster: Cluster, objective: str
) -> float:
    busy_s = of_all.each_s * of_all.full
    least_s = busy_s + idle_s + message_s
    if objective == "time":
        return least_s
    inside = {"forward": of_all.computing * busy_s, "tensor": (1 - of_all.computing) * busy_s}
    joules = _joules({**inside, "bubble": idle_s, "pipeline": message_s}, layout, cluster, 0.0)
    return _worth(least_s, joules, layout, cluster, objective)


def _joules(terms: Mapping[str, float], layout: ParallelLayout, cluster: Cluster, reached: float) -> float:
    bare = TimeEstimate(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})
    return energy(bare, layout, cluster, reached).joules


def _worth(step_s: float, joules: float, layout: ParallelLayout, cluster: Cluster, objective: str) -> float:
    if objective == "cost":
        site = cluster.site
        hours = devices_held(layout, cluster) * step_s / 3600
        return hours * (site.device_hour_price or 0.0) + joules / JOULES_PER_KWH * (site.kwh_price or 0.0)
    return joules if objective == "energy" else joules * step_s
