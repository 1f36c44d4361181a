"""Search the best layouts of a training on a cluster: for time, energy, cost, or energy times delay.

The schedule simulator times the finalists of the search again. `why_better` and `bottlenecks` explain the results. If
nothing fits, `nothing_fits` suggests changes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner import checks
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.plan import COMPUTING, plan
from hpcdist.planner.report.quantities import (
    bytes_in_both,
    changes,
    figures,
    joules,
    nbytes,
    seconds,
    share,
    slowdown_line,
)
from hpcdist.planner.search import space
from hpcdist.planner.search.branch_and_bound import BranchAndBound
from hpcdist.planner.search.space import SearchSpec

SPARE_LAYOUTS = 3  # finalists in addition to the printed layouts: the simulator may change their order
MOST_PASSES = 200_000  # over all ranks; longer schedules are not simulated, which would take seconds
NEAR: Final = 0.9  # share of the memory above which it limits the micro-batch
SAME: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """Layout in a search result: plan, value of the search objective, advantages and bottlenecks."""

    estimate: PlanEstimate
    value: float
    unit: str
    why: tuple[str, ...]  # advantages over the next layout
    limits: tuple[str, ...]  # bottlenecks


@dataclass(frozen=True, kw_only=True)
class RefusalCount:
    """Number of rejected layouts, or of rejected combinations of parallel sizes ("grids"), for one violated limit."""

    limit: str
    count: int
    of: str  # "layouts" or "grids"
    example: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search: best layouts, and numbers of layouts that were rejected, estimated or skipped."""

    objective: str
    devices: int
    global_batch: int
    found: tuple[RankedLayout, ...]  # best layouts, best first
    refused: tuple[RefusalCount, ...]
    layouts: int  # number of layouts in the search
    estimated: int  # layouts whose step time was estimated
    left_out: int  # layouts that cannot be better than the last layout of ``found``
    nothing: tuple[str, ...] = ()  # if no layout fits: messages on missing memory and on changes that would help
    flags: tuple[str, ...] = ()


def search(
    description: ModelDescription, cluster: Cluster, devices: int, global_batch: int, spec: SearchSpec
) -> SearchResult:
    """Find the best layouts for ``devices`` devices of ``cluster``. Raises UsageError for an impossible request.

    ``description``: the model to train. ``global_batch``: samples per step. ``spec``: objective, and values to try.
    """
    _check(description, cluster, devices, global_batch, spec)
    spare = SPARE_LAYOUTS if spec.simulate else 0
    tree = BranchAndBound(description, cluster, devices, global_batch, spec, keep=spec.first + spare)
    with _no_cycles():
        tree.run()
        finalists, flags = _simulated(tree) if spec.simulate else (tree.best, ())
    refused = _refused(tree)
    unfit = sum(refusal.count for refusal in refused if refusal.of == "layouts")
    return SearchResult(
        objective=spec.objective,
        devices=devices,
        global_batch=global_batch,
        found=_explained(finalists, spec, cluster),
        refused=refused,
        layouts=tree.layouts,
        estimated=tree.estimated,
        left_out=tree.layouts - tree.estimated - unfit,
        nothing=() if finalists else nothing_fits(tree),
        flags=tuple(dict.fromkeys((*flags, *(flag for _, plan in finalists[: spec.first] for flag in plan.flags)))),
    )


@contextmanager
def _no_cycles() -> Iterator[None]:
    # A search creates a million small objects but no reference cycles: pause the garbage collection.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check(description: ModelDescription, cluster: Cluster, devices: int, global_batch: int, spec: SearchSpec) -> None:
    if devices < 1 or global_batch < 1:
        raise UsageError(
            f"the search needs at least 1 device and 1 sample per step, got {devices} devices, {global_batch} samples"
        )
    sizes = (problem.text for problem in checks.size_problems(description, devices, global_batch))
    for text in (*sizes, *spec.base.invalid_fields()):
        raise UsageError(text)
    if devices > cluster.devices:
        raise UsageError(
            f"the search uses {devices} devices, but the cluster {cluster.name} has only {cluster.devices}; use fewer "
            "devices, or increase devices in the cluster file"
        )
    space.check_objective(spec.objective, cluster)


def passes(layout: ParallelLayout, global_batch: int) -> int:
    """Return the total number of forward and backward passes on all pipeline ranks in a step."""
    return 2 * layout.pipeline * layout.chunks * layout.microbatches(global_batch)


def _simulated(tree: BranchAndBound) -> tuple[list[tuple[float, PlanEstimate]], tuple[str, ...]]:
    spec, finalists, skipped = tree.spec, [], 0
    for value, estimate in tree.best:
        layout = estimate.layout
        if layout.pipeline > 1 and passes(layout, tree.global_batch) <= MOST_PASSES:
            arguments = tree.description, layout, tree.cluster, tree.global_batch, spec.steps
            estimate = plan(*arguments, simulate=True, limit_bytes=tree.limit_bytes)
            value = space.value(estimate, spec.objective)
        elif layout.pipeline > 1:
            skipped += 1
        finalists.append((value, estimate))
    finalists.sort(key=lambda finalist: space.value_and_tie_break(finalist[1], spec.objective))
    many = f"{skipped} of {len(finalists)} finalists have more than {MOST_PASSES} passes"
    text = f"{many} and are not simulated; their times are closed-form estimates"
    return finalists, (text,) if skipped else ()


def _explained(
    finalists: list[tuple[float, PlanEstimate]], spec: SearchSpec, cluster: Cluster
) -> tuple[RankedLayout, ...]:
    unit, ranked = space.unit(spec.objective, cluster), []
    for number, (value, estimate) in enumerate(finalists[: spec.first]):
        next_best = finalists[number + 1][1] if number + 1 < min(len(finalists), spec.first) else None
        ranked.append(
            RankedLayout(
                estimate=estimate,
                value=value,
                unit=unit,
                why=why_better(estimate, next_best, spec.objective),
                limits=bottlenecks(estimate, spec.memory_bytes),
            )
        )
    return tuple(ranked)


def _refused(tree: BranchAndBound) -> tuple[RefusalCount, ...]:
    refusals = []
    for of, counts in (("grids", tree.refused_grids), ("layouts", tree.refused_layouts)):
        rows = sorted(counts.items(), key=lambda item: -item[1][0])
        refusals += [RefusalCount(limit=limit, count=count, of=of, example=text) for limit, (count, text) in rows]
    return tuple(refusals)


def why_better(estimate: PlanEstimate, other: PlanEstimate | None, objective: str) -> tuple[str, ...]:
    """Return the reasons why the plan ``estimate`` is better than the plan ``other``, as lines.

    ``other``: plan of the next layout in the result, or None. ``objective``: what the search minimises, e.g. "time".
    """
    if other is None:
        return ()
    lines = [f"{changes(estimate.layout, other.layout) or 'the same layout'}"]
    first, second = space.value(estimate, objective), space.value(other, objective)
    if objective != "time":
        lines.append(
            f"{objective} {figures(100 * (second - first) / second)} % less: {_sums(estimate, other, objective)}"
        )
    if abs(second - first) <= SAME * second:
        lines.append("as good as the next")
    lines.append(slowdown_line(estimate, other))
    return tuple(lines)


def _sums(estimate: PlanEstimate, other: PlanEstimate, objective: str) -> str:
    parts = []
    if (estimate.energy.terms and objective != "cost") or estimate.run.price is None:
        parts.append(f"{joules(estimate.energy.joules)} against {joules(other.energy.joules)} a step")
    if objective == "cost" and estimate.run.price is not None and other.run.price is not None:
        unit = estimate.run.currency
        parts.append(
            f"{figures(estimate.run.price)} {unit} against {figures(other.run.price)} {unit} for the run".strip()
        )
    if estimate.layout.devices != other.layout.devices:
        parts.append(f"{estimate.layout.devices} devices against {other.layout.devices}")
    if objective != "time":
        parts.append(f"{seconds(estimate.step_s)} against {seconds(other.step_s)}")
    return ", ".join(parts)


def bottlenecks(estimate: PlanEstimate, memory_bytes: float = 0.0) -> tuple[str, ...]:
    """Return lines about the largest terms of step time and memory. ``memory_bytes``: memory limit, or 0."""
    terms, step_s = estimate.timing.terms, estimate.step_s
    computing_s = sum(terms.get(name, 0.0) for name in COMPUTING)
    lost = [(seconds_, name) for name, seconds_ in terms.items() if name not in COMPUTING and seconds_ > SAME * step_s]
    lines = [f"{share(computing_s / step_s)} of a step computes"]
    if lost:
        worst = sorted(lost, reverse=True)[:3]
        lines[0] += "; " + ", ".join(f"{name} takes {share(seconds_ / step_s)}" for seconds_, name in worst)
    limit = min(estimate.memory.limit_bytes, memory_bytes or estimate.memory.limit_bytes)
    used, most = estimate.memory.bytes, estimate.memory.largest_term
    full = "full" if used > NEAR * limit else "filled"
    lines.append(
        f"memory is {full} to {share(used / limit)}: {nbytes(used)} of {nbytes(limit)}, of it "
        f"{nbytes(estimate.memory.terms[most])} {most}"
    )
    return tuple(lines)


def nothing_fits(tree: BranchAndBound) -> tuple[str, ...]:
    """Return lines for a search in which no layout fits: the layout with the least excess memory, and advice.

    ``tree``: finished search without a result.
    """
    if tree.memory_filter.leanest is None:
        return tuple(_no_grid(tree))
    over, layout, footprint = tree.memory_filter.leanest
    most = footprint.largest_term
    missing = f"{bytes_in_both(over)} are missing on a device of {bytes_in_both(footprint.bytes - over)}"
    largest = f"the largest term is {most} with {nbytes(footprint.terms[most])}"
    lines = [f"nothing fits: {missing} even with the layout of least memory, {layout_line(layout)}; {largest}"]
    lines += _helps(tree, layout, footprint.bytes)
    return tuple(lines)


def layout_line(layout: ParallelLayout) -> str:
    """Return a line that lists parallel sizes, strategy, micro-batch size, schedule and options of ``layout``."""
    parts = [
        f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}",
        layout.strategy,
        f"micro-batch {layout.microbatch}",
    ]
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" in {layout.chunks} chunks" if layout.chunks > 1 else ""))
    return ", ".join([*parts, *layout.options])


def _no_grid(tree: BranchAndBound) -> Iterator[str]:
    counts = {**tree.refused_layouts, **tree.refused_grids}
    causes = ", ".join(f"{limit} ({count})" for limit, (count, _) in sorted(counts.items(), key=lambda x: -x[1][0]))
    yield f"no parallel degrees are possible on {tree.devices} devices; first violated limits: {causes}"
    for devices in range(tree.devices - 1, 0, -1):
        grids = space.grids(devices, tree.spec)
        if any(
            next(checks.grid_problems(tree.description, grid, tree.cluster, tree.global_batch), None) is None
            for grid in grids
        ):
            yield f"with {devices} devices, {tree.devices - devices} fewer, layouts are possible"
            return


def _helps(tree: BranchAndBound, layout: ParallelLayout, needed_bytes: float) -> Iterator[str]:
    limit = tree.limit_bytes
    yield f"a device with {bytes_in_both(needed_bytes)} would suffice"
    many = 2
    tests = [("full recomputation", replace(layout, recompute="full"))]
    tests += [(f"the strategy {name}", replace(layout, strategy=name)) for name in ("zero1", "zero2", "zero3")]
    tests.append(("sequence parallelism", replace(layout, sequence_parallel=layout.tensor > 1)))
    while many <= 64 and layout.data * many <= tree.global_batch:
        tests.append((f"{many} times the devices, as data", replace(layout, data=many * layout.data, strategy="zero3")))
        many *= 2
    for factor in (2, 4, 8):
        tests.append((f"{factor} times the devices, as pipeline", replace(layout, pipeline=factor * layout.pipeline)))
        tests.append((f"{factor} times the devices, as tensor", replace(layout, tensor=factor * layout.tensor)))
    helpful = set()
    for name, changed in tests:
        kind = name.split(" ")[-1]
        if changed == layout or kind in helpful:
            continue
        larger = replace(tree.cluster, devices=max(tree.cluster.devices, changed.devices))
        if next(checks.shape_problems(tree.description, changed, larger, tree.global_batch), None) is not None:
            continue
        required_bytes = memory(tree.description, changed, larger, tree.global_batch).bytes
        if required_bytes <= limit:
            helpful.add(kind)
            yield f"with {name} it would fit: {nbytes(required_bytes)}"
