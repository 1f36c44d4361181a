"""Search the best layouts of a training on a cluster: for time, energy, cost, or energy times delay.

The value of a step is that of `hpcdist.planner.plan`; no formula is written a second time here. `space` lists the
layouts, `branch_and_bound` visits them best first and prunes those that cannot be among the best, and the finalists
are timed again by the simulator of schedules. The first ones are explained: why each beats the next, and what limits
it. Where nothing fits, the result has the layout that comes nearest, by how much it misses, and tried changes that
would fit.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits.checks import too_large, value_problems
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.plan import plan
from hpcdist.planner.search import bounds, explain
from hpcdist.planner.search.branch_and_bound import BranchAndBound
from hpcdist.planner.search.space import OBJECTIVES, SearchSpec

__all__ = ["OBJECTIVES", "RankedLayout", "RefusalCount", "SearchResult", "SearchSpec", "search"]

SPARE_LAYOUTS = 3  # finalists more than are shown: the simulator may change their order, and takes most of the time
MOST_PASSES = 200_000  # of all ranks: finalists of more are not simulated, for that takes seconds


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
    """How many ``of`` "grids" (with all that may be laid out on them) or "layouts" a limit refused, and an example."""

    limit: str
    count: int
    of: str
    example: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found, best first.

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
        finalists, flags = _simulated(walk) if wanted.simulate else (walk.kept, ())
    refused = _refused(walk)
    unfit = sum(one.count for one in refused if one.of == "layouts")
    return SearchResult(
        objective=wanted.objective,
        devices=devices,
        global_batch=global_batch,
        found=_explained(finalists, wanted, cluster),
        refused=refused,
        layouts=walk.layouts,
        estimated=walk.estimated,
        left_out=walk.layouts - walk.estimated - unfit,
        nothing=() if finalists else explain.nothing_fits(walk),
        flags=tuple(dict.fromkeys((*flags, *(flag for _, one in finalists[: wanted.first] for flag in one.flags)))),
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
    """Return the finalists timed by the simulator, and what is to be said of those that are too long for it."""
    wanted, found, skipped = walk.wanted, [], 0
    for value, estimate in walk.kept:
        layout = estimate.layout
        if layout.pipeline > 1 and passes(layout, walk.global_batch) <= MOST_PASSES:
            given = walk.description, layout, walk.cluster, walk.global_batch, wanted.steps
            estimate = plan(*given, simulate=True, limit_bytes=walk.limit_bytes)
            value = bounds.value(estimate, wanted.objective)
        elif layout.pipeline > 1:
            skipped += 1
        found.append((value, estimate))
    found.sort(key=lambda one: bounds.value_and_tie_break(one[1], wanted.objective))
    many = f"{skipped} of {len(found)} finalists have more than {MOST_PASSES} passes"
    text = f"{many}, and are not simulated: closed forms hold"
    return found, (text,) if skipped else ()


def _explained(
    finalists: list[tuple[float, PlanEstimate]], wanted: SearchSpec, cluster: Cluster
) -> tuple[RankedLayout, ...]:
    unit, found = bounds.unit(wanted.objective, cluster), []
    for number, (value, estimate) in enumerate(finalists[: wanted.first]):
        behind = finalists[number + 1][1] if number + 1 < min(len(finalists), wanted.first) else None
        found.append(
            RankedLayout(
                estimate=estimate,
                value=value,
                unit=unit,
                why=explain.why_better(estimate, behind, wanted.objective),
                limits=explain.bottlenecks(estimate, wanted.memory_bytes),
            )
        )
    return tuple(found)


def _refused(walk: BranchAndBound) -> tuple[RefusalCount, ...]:
    """Return all refusals, the most frequent of each kind first."""
    found = []
    for of, counts in (("grids", walk.refusals.grids), ("layouts", walk.refusals.layouts)):
        rows = sorted(counts.items(), key=lambda item: -item[1][0])
        found += [RefusalCount(limit=limit, count=count, of=of, example=text) for limit, (count, text) in rows]
    return tuple(found)
