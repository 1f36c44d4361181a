"""Search space: the request, and the layouts that follow from it, in four levels.

    grid       data x pipeline x tensor x context (x expert) degrees
    family     a grid with recomputation, sequence parallelism and a micro-batch size
    order      a family with a schedule and its chunks
    layout     an order with a strategy and a compression

Choices without effect are left out, such as compression with one replica.

Lower bounds of the objective allow a search to skip families and orders.

**Family bound.** A step takes at least T = (seconds of all units per micro-batch) x (micro-batches) / (stages), as if
all stages were equally busy. Let the slowest of p ranks take X seconds, and all ranks S seconds plus A seconds of
recomputation. If one rank recomputes nothing, it saves at most X / 2 of A. So p X >= S + A - X / 2.

Bounds for a single schedule: `schedule_bound` and `order_bound`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hpcdist.constants import J_PER_KWH
from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate, TimeEstimate
from hpcdist.planner.layout import OBJECTIVES, RECOMPUTE, SEARCH_SETTINGS, ParallelLayout, divisors
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead, step_flops
from hpcdist.planner.plan import devices_held, energy, peak_of, peak_share
from hpcdist.planner.time.compute import cached
from hpcdist.planner.time.expert_rows import row_route
from hpcdist.planner.time.network import span
from hpcdist.planner.time.pipeline import SPLIT, PlannedSeconds, closed_form
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad, collective_wait, load_key, loads
from hpcdist.planner.time.step import AXES, MicrobatchFlow
from hpcdist.strategies.schedule.registry import SCHEDULES, chunks_of

Strategy = tuple[str, str]  # (strategy, compression)
PIPELINES: Final = tuple(name for name, row in SCHEDULES.items() if row.pipelines)
_ALL_IF_EMPTY: Final = ("tensors", "pipelines", "contexts", "chunks", "microbatches")  # settings of `SearchSpec`
RECOMPUTED_SHARE: Final = 0.5  # maximum share of a micro-batch's time that is recomputation
ROUNDED: Final = 1 - 1e-12  # tolerance for sums in another order
UNITS: Final = {"time": "s", "energy": "J", "cost": "", "energy-delay": "J s"}


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Settings of a layout search: objective, values to try for each field, memory limit, and number of results."""

    objective: str = "time"  # quantity per step to minimise
    steps: int = 1000
    memory_bytes: float = 0.0  # limit of a device; 0: the device memory minus the fraction ``headroom``
    headroom: float = 0.05
    fewer: bool = False  # also use fewer devices, if their number divides the number of all devices
    base: ParallelLayout = field(default_factory=ParallelLayout)
    strategies: tuple[str, ...] = ("allreduce", "zero1", "zero2", "zero3")
    schedules: tuple[str, ...] = PIPELINES
    chunks: tuple[int, ...] = ()  # (): all possible numbers, as in tensors, pipelines, contexts and microbatches
    recompute: tuple[str, ...] = RECOMPUTE
    compressions: tuple[str, ...] = ("none",)
    tensors: tuple[int, ...] = ()
    pipelines: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    experts: tuple[int, ...] = (1,)
    microbatches: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = (False, True)
    # Training programs of data-parallel layouts and of all other layouts, or () for the program of ``base``.
    programs: tuple[str, ...] = ()
    runnable: bool = False  # only layouts that hpcdist can run
    first: int = 10  # number of results
    simulate: bool = True  # time the best layouts by the schedule simulator
    distinct: bool = False  # only the best layout for each combination of parallel degrees

    def __post_init__(self) -> None:
        for name, setting in SEARCH_SETTINGS.items():
            values = getattr(self, setting)
            if not values and setting not in _ALL_IF_EMPTY:
                example = getattr(ParallelLayout(), name)
                raise UsageError(f"the search setting {setting} is an empty list; add a value such as {example}")
            for value in values:
                for text in ParallelLayout().but(**{name: value}).invalid_fields():
                    raise UsageError(f"the search setting {setting} has the invalid value {value}: {text}")
        for schedule in self.schedules:
            if schedule not in PIPELINES:
                raise UsageError(f"the search has the invalid schedule {schedule}; choose from {', '.join(PIPELINES)}")
        if self.objective not in OBJECTIVES:
            raise UsageError(f"unknown search objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.first < 1 or self.steps < 1:
            raise UsageError(f"first and steps of a search must be at least 1, got {self.first} and {self.steps}")
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom of a search must be at least 0 and less than 1, got {self.headroom}")
        if self.memory_bytes < 0:
            raise UsageError(f"memory_bytes of a search must be at least 0 bytes per device, got {self.memory_bytes}")


def limit_bytes(spec: SearchSpec, memory_bytes: float) -> float:
    """Return the bytes that the settings ``spec`` let a layout use on a device with ``memory_bytes`` bytes."""
    if spec.memory_bytes:
        return min(spec.memory_bytes, memory_bytes)
    return memory_bytes * (1 - spec.headroom)


def grids(devices: int, spec: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield a layout for each combination of parallel sizes that ``spec`` allows on ``devices`` devices.

    Fields that the search sets later, such as the schedule, have placeholder values. All other fields are as in
    ``spec.base``.
    """
    # The caller must check that the layouts are possible. With `spec.fewer`, also smaller divisors of ``devices`` are
    # used.
    for tensor in _chosen(divisors(devices), spec.tensors):
        for context in _chosen(divisors(devices // tensor), spec.contexts):
            for pipeline in _chosen(divisors(devices // (tensor * context)), spec.pipelines):
                room = devices // (tensor * context * pipeline)
                for data in divisors(room) if spec.fewer else (room,):
                    for expert in spec.experts:
                        is_split = tensor * context * pipeline * expert > 1
                        yield spec.base.but(
                            implementation=spec.programs[is_split] if spec.programs else spec.base.implementation,
                            data=data,
                            pipeline=pipeline,
                            tensor=tensor,
                            context=context,
                            expert=expert,
                            microbatch=1,
                            schedule="1f1b",
                            chunks=1,
                            sequence_parallel=False,
                        )


def families(grid: ParallelLayout, spec: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield copies of ``grid`` with every combination of recomputation and sequence parallelism in ``spec``."""
    both = spec.sequence_parallel if grid.tensor > 1 else (False,)
    choices = spec.recompute
    if (
        grid.kernels.tiles_attention and not grid.kernels.again_share and "none" in choices
    ):  # scores are always recomputed
        choices = tuple(choice for choice in choices if choice != "selective")
    for recompute in choices:
        for sequence_parallel in both:
            yield grid.but(recompute=recompute, sequence_parallel=sequence_parallel)


def sizes(grid: ParallelLayout, global_batch: int, spec: SearchSpec) -> tuple[int, ...]:
    """Return the micro-batch sizes, in samples, that the search tries for ``grid``, in ascending order."""
    if spec.microbatches:
        return tuple(sorted(set(spec.microbatches)))
    share = -(-global_batch // grid.data)
    if grid.kernels.splits_evenly:
        return divisors(share)
    # One size per possible number of micro-batches. In a pipeline and in Megatron-LM, micro-batches must be equal.
    candidates = {-(-share // many) for many in range(1, share + 1)}
    if grid.pipeline > 1:
        candidates = {size for size in candidates if global_batch % -(-global_batch // (grid.data * size)) == 0}
    return tuple(sorted(candidates))


def orders(description: ModelDescription, grid: ParallelLayout, spec: SearchSpec) -> tuple[tuple[str, int], ...]:
    """Return the pairs (pipeline schedule, model chunks per rank) that the search tries for the layout ``grid``."""
    if grid.pipeline == 1:
        return (("sequential", 1),)
    pairs: list[tuple[str, int]] = []
    usual = grid.kernels.schedules if spec.schedules == PIPELINES else ()
    for name in usual or spec.schedules:
        row = SCHEDULES[name]
        if row.most is not None:
            pairs.append((name, row.most))
        else:
            pairs += [(name, chunks) for chunks in _chunks(description, grid, spec) if chunks >= row.least]
    return tuple(pairs)


def strategies(grid: ParallelLayout, spec: SearchSpec) -> tuple[Strategy, ...]:
    """Return the pairs (data-parallel strategy, compression) that the search tries for the layout ``grid``."""
    if grid.data * grid.context == 1:
        none = "none" if "none" in spec.compressions else spec.compressions[0]
        return ((spec.strategies[0], none),)
    return tuple((strategy, compression) for strategy in spec.strategies for compression in spec.compressions)


def with_strategy(layout: ParallelLayout, strategy_pair: Strategy, microbatch: int = 0) -> ParallelLayout:
    """Return a copy of ``layout`` with another (strategy, compression) pair and micro-batch size.

    ``microbatch``: samples per micro-batch, or 0 to keep the micro-batch size of ``layout``.
    """
    strategy, compression = strategy_pair
    alone = not layout.kernels.overlaps_coded and (compression != "none" or strategy == "parameter_server")
    return layout.but(
        strategy=strategy,
        compression=compression,
        overlap=0.0 if alone else layout.overlap,
        microbatch=microbatch or layout.microbatch,
    )


def _chosen(possible: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value for value in possible if value in allowed) if allowed else possible


def _chunks(description: ModelDescription, grid: ParallelLayout, spec: SearchSpec) -> tuple[int, ...]:
    if spec.chunks:
        return spec.chunks
    layers = description.shape.layers if description.shape else description.stages
    if layers % grid.pipeline and grid.kernels.counts_ends:
        layers += 2
    even = divisors(layers // grid.pipeline) if layers % grid.pipeline == 0 else ()
    uneven = (2,) if not grid.kernels.splits_evenly and 2 * grid.pipeline <= description.stages else ()
    return tuple(sorted({*even, *uneven} - {1}))


def check_objective(objective: str, cluster: Cluster) -> None:
    """Raise UsageError if ``cluster`` lacks values that ``objective`` needs, such as prices for "cost"."""
    site = cluster.site
    if objective == "cost" and site.device_hour_price is None and site.kwh_price is None:
        raise UsageError(
            f"the objective 'cost' needs a price, but the cluster {cluster.name} has none; set "
            "site.device_hour_price or site.kwh_price in the cluster file, or choose the objective 'energy'"
        )
    if objective in ("energy", "energy-delay") and not cluster.device.peak_w:
        raise UsageError(
            f"the objective {objective!r} needs the device power, but the cluster {cluster.name} has none; set "
            "device.peak in the cluster file, or choose the objective 'time'"
        )


def value(estimate: PlanEstimate, objective: str) -> float:
    """Return the value of ``objective`` for one step of the plan ``estimate``, in the unit of `unit`."""
    if objective == "time":
        return estimate.step_s
    if objective == "cost":
        assert estimate.run.price is not None, "the cluster has a price"
        return estimate.run.price / estimate.run.steps
    joules = estimate.energy.joules
    return joules if objective == "energy" else joules * estimate.step_s


def value_and_tie_break(estimate: PlanEstimate, objective: str) -> tuple[float, float]:
    """Return a sort key for plans: (value of ``objective``, second value that orders plans of equal value)."""
    objective_value = value(estimate, objective)
    if objective != "time":
        return objective_value, objective_value
    # The upper end of the estimated range of step times.
    return objective_value, estimate.step_range_s[1] if estimate.step_range_s else estimate.timing.modelled_s


def unit(objective: str, cluster: Cluster) -> str:
    """Return the unit of ``objective`` as text, such as "s" for "time"."""
    return cluster.site.currency if objective == "cost" else UNITS[objective]


def order_bound(
    flow: MicrobatchFlow,
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    objective: str,
) -> float:
    """Return a lower bound of ``objective`` per step for ``layout``. ``flow``: micro-batch times of ``layout``.

    The bound excludes gradient exchange, optimizer update and reading of samples. So it holds for every data-parallel
    strategy and compression.
    """
    least_s = sum(flow.terms.values())
    if objective == "time":
        return least_s
    peak_flops = (layout.devices - layout.servers) * peak_of(cluster, layout)
    reached = peak_share(step_flops(description, layout, global_batch), flow, peak_flops)
    return _worth(least_s, _joules(flow.terms, layout, cluster, reached), layout, cluster, objective)


class FamilyTotals(NamedTuple):
    """Times per micro-batch that are equal in all layouts of a family: for any schedule, strategy and compression."""

    # Forward and backward with collectives, summed over all pipeline ranks. Excludes recomputation if ranks can
    # recompute while they wait for a gradient.
    seconds: PlannedSeconds
    each_s: float  # lower bound on the slowest pipeline rank, with recomputation
    full: float  # micro-batches per replica and step; a smaller last micro-batch is a fraction
    computing: float  # computation time / time with collectives


def family_totals(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> FamilyTotals:
    """Return the times per micro-batch of the whole model, summed over all pipeline ranks.

    ``layout``: any layout of a family, in which only schedule, chunks, strategy and compression differ.
    """
    many = layout.microbatches(global_batch)
    alone = layout.but(pipeline=1, chunks=1, schedule="1f1b")  # the same cache entry for every pipeline degree
    load, waits = _alone(description, alone, cluster)
    forward_s = load.forward_s + sum(waits.forward_s.values())
    input_s = load.input_s + sum(waits.back_s.values())
    weight_s = load.weight_s + load.add_s * (many - 1) / many
    once_s = forward_s + input_s + weight_s
    again_s = load.again_s + sum(waits.again_s.values())
    each_s = (once_s + again_s) / layout.pipeline
    if recomputes_ahead(layout):  # one rank may recompute nothing
        each_s = max(once_s / layout.pipeline, (once_s + again_s) / (layout.pipeline + RECOMPUTED_SHARE))
    else:
        input_s += again_s
    computes_s = load.forward_s + load.input_s + weight_s + load.again_s
    full = -(-global_batch // layout.data) / layout.microbatch  # the last micro-batch may be smaller
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


def family_bound(totals: FamilyTotals, layout: ParallelLayout, cluster: Cluster, objective: str) -> float:
    """Return a lower bound of ``objective`` per step for the family with ``totals``, without pipeline idle time."""
    return _floor(totals, 0.0, 0.0, layout, cluster, objective)


def schedule_bound(
    totals: FamilyTotals, layout: ParallelLayout, message_s: float, cluster: Cluster, objective: str
) -> float:
    """Return a lower bound of ``objective`` per step, with the pipeline idle time of the schedule of ``layout``.

    ``totals``: times of the layout's family. ``message_s``: seconds of a message between neighbouring pipeline ranks.
    """
    ranks = layout.pipeline
    if ranks == 1:
        return family_bound(totals, layout, cluster, objective)
    # Let X be the slowest rank's seconds per micro-batch, and S their sum over all p pipeline ranks; m micro-batches, v
    # model chunks per rank. The other ranks need at most Y = S / (p - 1) seconds per micro-batch on average. For ranks
    # with Y seconds, `closed_form` returns an idle time I, too large by at most E: X if the schedule splits backward in
    # two passes, else X / v. If ranks recompute while they wait, E is larger by half for 1F1B, and doubled for
    # interleaved. The step takes at least m X + I - E.
    most = PlannedSeconds(*(seconds / (ranks - 1) for seconds in totals.seconds))
    form = closed_form(layout, most, most, math.ceil(totals.full), message_s)
    fill = 1.0 if layout.schedule in SPLIT else 1 / chunks_of(layout.schedule, layout.chunks)
    if recomputes_ahead(layout):
        fill += fill * RECOMPUTED_SHARE * {"1f1b": 1, "interleaved": 2}.get(layout.schedule, 0)
    idle_s = max(0.0, form.idle_s - fill * totals.each_s) if totals.full >= fill else 0.0
    return ROUNDED * _floor(totals, idle_s, form.message_s, layout, cluster, objective)


def _floor(
    totals: FamilyTotals, idle_s: float, message_s: float, layout: ParallelLayout, cluster: Cluster, objective: str
) -> float:
    busy_s = totals.each_s * totals.full
    least_s = busy_s + idle_s + message_s
    if objective == "time":
        return least_s
    inside = {"forward": totals.computing * busy_s, "tensor": (1 - totals.computing) * busy_s}
    joules = _joules({**inside, "bubble": idle_s, "pipeline": message_s}, layout, cluster, 0.0)
    return _worth(least_s, joules, layout, cluster, objective)


def _joules(terms: Mapping[str, float], layout: ParallelLayout, cluster: Cluster, reached: float) -> float:
    bare = TimeEstimate(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})
    return energy(bare, layout, cluster, reached).joules


def _worth(step_s: float, joules: float, layout: ParallelLayout, cluster: Cluster, objective: str) -> float:
    if objective == "cost":
        site = cluster.site
        hours = devices_held(layout, cluster) * step_s / 3600
        return hours * (site.device_hour_price or 0.0) + joules / J_PER_KWH * (site.kwh_price or 0.0)
    return joules if objective == "energy" else joules * step_s
