"""Search the best layouts of a training on a cluster: for time, energy, cost, or energy times delay.

The value of a step is that of `hpcdist.planner.plan`; no formula is written a second time here. `space` lists the
layouts, `branch_and_bound` visits them best first and prunes those that cannot be among the best, and the finalists
are timed again by the simulator of schedules. The first ones are explained: why each beats the next (`why_better`), and
what limits it (`bottlenecks`). Where nothing fits, the result has the layout that comes nearest, by how much it misses,
and tried changes that would fit (`nothing_fits`).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.energy import COMPUTING
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits import checks
from hpcdist.planner.limits.checks import too_large, value_problems
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.plan import plan
from hpcdist.planner.report.compare import changes, slowdown_line
from hpcdist.planner.report.quantities import bytes_in_both, figures, joules, nbytes, seconds, share
from hpcdist.planner.search import bounds, space
from hpcdist.planner.search.branch_and_bound import BranchAndBound
from hpcdist.planner.search.space import SearchSpec

SPARE_LAYOUTS = 3  # finalists more than are shown: the simulator may change their order, and takes most of the time
MOST_PASSES = 200_000  # of all ranks: finalists of more are not simulated, for that takes seconds
NEAR: Final = 0.9  # of a memory: above, it is what forbids a larger micro-batch
SAME: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """A layout: its ``value`` in ``unit``, ``why`` it beats the next one, and what ``limits`` it."""

    estimate: PlanEstimate
    value: float
    unit: str
    why: tuple[str, ...]
    limits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RefusalCount:
    """Number of "grids" (with all that may be laid out on them) or "layouts" that a limit refused, and an example."""

    limit: str
    count: int
    of: str
    example: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search, best first.

    Of all ``layouts`` on possible grids some were ``estimated``, some refused, and ``left_out`` cannot be better than
    the last one that was found. ``nothing`` says what is missing where nothing fits, and what would help.
    """

    objective: str
    devices: int
    global_batch: int
    found: tuple[RankedLayout, ...]
    refused: tuple[RefusalCount, ...]
    layouts: int
    estimated: int
    left_out: int
    nothing: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def search(
    description: ModelDescription, cluster: Cluster, devices: int, global_batch: int, wanted: SearchSpec
) -> SearchResult:
    """Return the best layouts of ``global_batch`` samples a step on ``devices`` (local).

    Raises UsageError for devices or a batch that are none, or more devices than the cluster has, for values of
    ``wanted.base`` that mean nothing, and for an objective that the cluster has no numbers for.
    """
    _check(description, cluster, devices, global_batch, wanted)
    spare = SPARE_LAYOUTS if wanted.simulate else 0
    walk = BranchAndBound(description, cluster, devices, global_batch, wanted, keep=wanted.first + spare)
    with _no_cycles():
        walk.run()
        finalists, flags = _simulated(walk) if wanted.simulate else (walk.best, ())
    refused = _refused(walk)
    unfit = sum(refusal.count for refusal in refused if refusal.of == "layouts")
    return SearchResult(
        objective=wanted.objective,
        devices=devices,
        global_batch=global_batch,
        found=_explained(finalists, wanted, cluster),
        refused=refused,
        layouts=walk.layouts,
        estimated=walk.estimated,
        left_out=walk.layouts - walk.estimated - unfit,
        nothing=() if finalists else nothing_fits(walk),
        flags=tuple(dict.fromkeys((*flags, *(flag for _, plan in finalists[: wanted.first] for flag in plan.flags)))),
    )


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Pause the collector of cycles: a search makes a million small objects and no cycle, and it looks at them all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check(
    description: ModelDescription, cluster: Cluster, devices: int, global_batch: int, wanted: SearchSpec
) -> None:
    if devices < 1 or global_batch < 1:
        raise UsageError(
            f"a search on {devices} devices for a global batch of {global_batch} samples; each must be at least 1"
        )
    for wrong in (*too_large(description, devices, global_batch), *value_problems(wanted.base, global_batch)):
        raise UsageError(wrong.text)
    if devices > cluster.devices:
        raise UsageError(
            f"a search on {devices} devices, {devices - cluster.devices} more than the {cluster.devices} of "
            f"{cluster.name}; use fewer, or set devices in its file"
        )
    bounds.check_objective(wanted.objective, cluster)


def passes(layout: ParallelLayout, global_batch: int) -> int:
    """Return how many passes, of all ranks of a pipeline, the simulator would run one by one (local)."""
    return 2 * layout.pipeline * layout.chunks * layout.microbatches(global_batch)


def _simulated(walk: BranchAndBound) -> tuple[list[tuple[float, PlanEstimate]], tuple[str, ...]]:
    """Return the finalists timed by the simulator, and a flag for those that are too long for it."""
    wanted, finalists, skipped = walk.wanted, [], 0
    for value, estimate in walk.best:
        layout = estimate.layout
        if layout.pipeline > 1 and passes(layout, walk.global_batch) <= MOST_PASSES:
            arguments = walk.description, layout, walk.cluster, walk.global_batch, wanted.steps
            estimate = plan(*arguments, simulate=True, limit_bytes=walk.limit_bytes)
            value = bounds.value(estimate, wanted.objective)
        elif layout.pipeline > 1:
            skipped += 1
        finalists.append((value, estimate))
    finalists.sort(key=lambda finalist: bounds.value_and_tie_break(finalist[1], wanted.objective))
    many = f"{skipped} of {len(finalists)} finalists have more than {MOST_PASSES} passes"
    text = f"{many}, and are not simulated: closed forms hold"
    return finalists, (text,) if skipped else ()


def _explained(
    finalists: list[tuple[float, PlanEstimate]], wanted: SearchSpec, cluster: Cluster
) -> tuple[RankedLayout, ...]:
    unit, ranked = bounds.unit(wanted.objective, cluster), []
    for number, (value, estimate) in enumerate(finalists[: wanted.first]):
        behind = finalists[number + 1][1] if number + 1 < min(len(finalists), wanted.first) else None
        ranked.append(
            RankedLayout(
                estimate=estimate,
                value=value,
                unit=unit,
                why=why_better(estimate, behind, wanted.objective),
                limits=bottlenecks(estimate, wanted.memory_bytes),
            )
        )
    return tuple(ranked)


def _refused(walk: BranchAndBound) -> tuple[RefusalCount, ...]:
    """Return all refusals, the most frequent of each kind first."""
    refusals = []
    for of, counts in (("grids", walk.refusals.grids), ("layouts", walk.refusals.layouts)):
        rows = sorted(counts.items(), key=lambda item: -item[1][0])
        refusals += [RefusalCount(limit=limit, count=count, of=of, example=text) for limit, (count, text) in rows]
    return tuple(refusals)


def why_better(estimate: PlanEstimate, other: PlanEstimate | None, objective: str) -> tuple[str, ...]:
    """Return why ``estimate`` is before ``other``, the next (local). Nothing for the last."""
    if other is None:
        return ()
    lines = [f"{changes(estimate.layout, other.layout) or 'the same layout'}"]
    first, second = bounds.value(estimate, objective), bounds.value(other, objective)
    if objective != "time":
        lines.append(
            f"{objective} {figures(100 * (second - first) / second)} % less: {_sums(estimate, other, objective)}"
        )
    if abs(second - first) <= SAME * second:
        lines.append("as good as the next")
    lines.append(slowdown_line(estimate, other))
    return tuple(lines)


def _sums(estimate: PlanEstimate, other: PlanEstimate, objective: str) -> str:
    """Return the totals that an objective beside time compares."""
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
    """Return where the time goes, what waits for what, and how full the memory is (local)."""
    terms, step_s = estimate.timing.terms, estimate.step_s
    computing_s = sum(terms.get(name, 0.0) for name in COMPUTING)
    lost = [(seconds_, name) for name, seconds_ in terms.items() if name not in COMPUTING and seconds_ > SAME * step_s]
    lines = [f"{share(computing_s / step_s)} of a step computes"]
    if lost:
        worst = sorted(lost, reverse=True)[:3]
        lines[0] += "; " + ", ".join(f"{name} takes {share(seconds_ / step_s)}" for seconds_, name in worst)
    limit = min(estimate.memory.limit_bytes, memory_bytes or estimate.memory.limit_bytes)
    used, most = estimate.memory.bytes, estimate.memory.breaks_first
    full = "full" if used > NEAR * limit else "filled"
    lines.append(
        f"memory is {full} to {share(used / limit)}: {nbytes(used)} of {nbytes(limit)}, of it "
        f"{nbytes(estimate.memory.terms[most])} {most}"
    )
    return tuple(lines)


def nothing_fits(walk: BranchAndBound) -> tuple[str, ...]:
    """Return why no layout is possible: the leanest, by how much it misses, and tried changes that would fit."""
    if walk.memory_filter.leanest is None:
        return tuple(_no_grid(walk))
    over, layout, needed = walk.memory_filter.leanest
    most = needed.breaks_first
    missing = f"{bytes_in_both(over)} are missing on a device of {bytes_in_both(needed.bytes - over)}"
    largest = f"most of it are {most}, {nbytes(needed.terms[most])}"
    lines = [f"nothing fits: {missing} even with the layout that needs least, {layout_line(layout)}; {largest}"]
    lines += _helps(walk, layout, needed.bytes)
    return tuple(lines)


def layout_line(layout: ParallelLayout) -> str:
    """Return a layout in a line (local)."""
    parts = [
        f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}",
        layout.strategy,
        f"micro-batch {layout.microbatch}",
    ]
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" in {layout.chunks} chunks" if layout.chunks > 1 else ""))
    return ", ".join([*parts, *layout.options])


def _no_grid(walk: BranchAndBound) -> Iterator[str]:
    """Yield why no grid was possible, and the most devices that could be used."""
    counts = {**walk.refusals.layouts, **walk.refusals.grids}
    told_ = ", ".join(f"{limit} ({count})" for limit, (count, _) in sorted(counts.items(), key=lambda x: -x[1][0]))
    yield f"no product of degrees on {walk.devices} devices is possible, by what each broke first: {told_}"
    for devices in range(walk.devices - 1, 0, -1):
        grids = space.grids(devices, walk.wanted)
        if any(
            next(checks.grid_problems(walk.description, grid, walk.cluster, walk.global_batch), None) is None
            for grid in grids
        ):
            yield f"on {devices} devices, {walk.devices - devices} fewer, there are some"
            return


def _helps(walk: BranchAndBound, layout: ParallelLayout, needed_bytes: float) -> Iterator[str]:
    """Yield changes to the leanest layout under which it would fit, each tried."""
    limit = walk.limit_bytes
    yield f"a device of {bytes_in_both(needed_bytes)} would do"
    more = 2
    tried = [("full recomputation", replace(layout, recompute="full"))]
    tried += [(f"the strategy {name}", replace(layout, strategy=name)) for name in ("zero1", "zero2", "zero3")]
    tried.append(("sequence parallelism", replace(layout, sequence_parallel=layout.tensor > 1)))
    while more <= 64 and layout.data * more <= walk.global_batch:
        tried.append((f"{more} times the devices, as data", replace(layout, data=more * layout.data, strategy="zero3")))
        more *= 2
    for factor in (2, 4, 8):
        tried.append((f"{factor} times the devices, as pipeline", replace(layout, pipeline=factor * layout.pipeline)))
        tried.append((f"{factor} times the devices, as tensor", replace(layout, tensor=factor * layout.tensor)))
    seen = set()
    for name, changed in tried:
        kind = name.split(" ")[-1]
        if changed == layout or kind in seen:
            continue
        larger = replace(walk.cluster, devices=max(walk.cluster.devices, changed.devices))
        if next(checks.shape_problems(walk.description, changed, larger, walk.global_batch), None) is not None:
            continue
        takes = memory(walk.description, changed, larger, walk.global_batch).bytes
        if takes <= limit:
            seen.add(kind)
            yield f"with {name} it would fit: {nbytes(takes)}"
