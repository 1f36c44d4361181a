"""Explain a search result in words: why a layout beats the next one, what limits it, and what is missing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hpcdist.planner.energy import COMPUTING
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.limits import checks as known
from hpcdist.planner.memory.device import memory
from hpcdist.planner.report.compare import changes, slowdown_line
from hpcdist.planner.report.quantities import bytes_in_both, figures, joules, nbytes, seconds, share
from hpcdist.planner.search import space
from hpcdist.planner.search.bounds import value

if TYPE_CHECKING:
    from hpcdist.planner.layout import ParallelLayout
    from hpcdist.planner.search.branch_and_bound import BranchAndBound

NEAR: Final = 0.9  # of a memory: above, it is what forbids a larger micro-batch
SAME: Final = 1e-9


def why_better(one: PlanEstimate, other: PlanEstimate | None, objective: str) -> tuple[str, ...]:
    """Return why ``one`` is before ``other``, the next (local). Nothing for the last."""
    if other is None:
        return ()
    lines = [f"{changes(one.layout, other.layout) or 'the same layout'}"]
    first, second = value(one, objective), value(other, objective)
    if objective != "time":
        lines.append(f"{objective} {figures(100 * (second - first) / second)} % less: {_sums(one, other, objective)}")
    if abs(second - first) <= SAME * second:
        lines.append("as good as the next")
    lines.append(slowdown_line(one, other))
    return tuple(lines)


def bottlenecks(one: PlanEstimate, memory_bytes: float = 0.0) -> tuple[str, ...]:
    """Return where the time goes, what waits for what, and how full the memory is (local)."""
    terms, step_s = one.timing.terms, one.step_s
    computing_s = sum(terms.get(name, 0.0) for name in COMPUTING)
    lost = [(seconds_, name) for name, seconds_ in terms.items() if name not in COMPUTING and seconds_ > SAME * step_s]
    lines = [f"{share(computing_s / step_s)} of a step computes"]
    if lost:
        told = sorted(lost, reverse=True)[:3]
        lines[0] += "; " + ", ".join(f"{name} takes {share(seconds_ / step_s)}" for seconds_, name in told)
    limit = min(one.memory.limit_bytes, memory_bytes or one.memory.limit_bytes)
    used, most = one.memory.bytes, one.memory.breaks_first
    full = "full" if used > NEAR * limit else "filled"
    lines.append(
        f"memory is {full} to {share(used / limit)}: {nbytes(used)} of {nbytes(limit)}, of it "
        f"{nbytes(one.memory.terms[most])} {most}"
    )
    return tuple(lines)


def nothing_fits(walk: "BranchAndBound") -> tuple[str, ...]:
    """Return what is missing where no layout is possible, by how much, and what of all that was tried would do."""
    if walk.room.leanest is None:
        return tuple(_no_grid(walk))
    over, layout, needed = walk.room.leanest
    most = needed.breaks_first
    missing = f"{bytes_in_both(over)} are missing on a device of {bytes_in_both(needed.bytes - over)}"
    largest = f"most of it are {most}, {nbytes(needed.terms[most])}"
    lines = [f"nothing fits: {missing} even with the layout that needs least, {layout_line(layout)}; {largest}"]
    lines += _helps(walk, layout, needed.bytes)
    return tuple(lines)


def layout_line(layout: "ParallelLayout") -> str:
    """Return a layout in a line (local)."""
    parts = [
        f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}",
        layout.strategy,
        f"micro-batch {layout.microbatch}",
    ]
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" in {layout.chunks} chunks" if layout.chunks > 1 else ""))
    if layout.recompute != "none":
        parts.append(f"recomputation {layout.recompute}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if layout.compression != "none":
        parts.append(f"gradients as {layout.compression}")
    return ", ".join(parts)


def _sums(one: PlanEstimate, other: PlanEstimate, objective: str) -> str:
    """Return the totals that an objective beside time compares."""
    parts = []
    if (one.energy.terms and objective != "cost") or one.run.price is None:
        parts.append(f"{joules(one.energy.joules)} against {joules(other.energy.joules)} a step")
    if objective == "cost" and one.run.price is not None and other.run.price is not None:
        unit = one.run.currency
        parts.append(f"{figures(one.run.price)} {unit} against {figures(other.run.price)} {unit} for the run".strip())
    if one.layout.devices != other.layout.devices:
        parts.append(f"{one.layout.devices} devices against {other.layout.devices}")
    if objective != "time":
        parts.append(f"{seconds(one.step_s)} against {seconds(other.step_s)}")
    return ", ".join(parts)


def _no_grid(walk: "BranchAndBound") -> Iterator[str]:
    """Yield why no grid was possible, and the most devices that could be used."""
    counts = {**walk.refusals.layouts, **walk.refusals.grids}
    told_ = ", ".join(f"{limit} ({count})" for limit, (count, _) in sorted(counts.items(), key=lambda x: -x[1][0]))
    yield f"no product of degrees on {walk.devices} devices is possible, by what each broke first: {told_}"
    for devices in range(walk.devices - 1, 0, -1):
        grids = space.grids(devices, walk.wanted)
        if any(
            next(known.grid_problems(walk.description, grid, walk.cluster, walk.global_batch), None) is None
            for grid in grids
        ):
            yield f"on {devices} devices, {walk.devices - devices} fewer, there are some"
            return


def _helps(walk: "BranchAndBound", layout: "ParallelLayout", needed_bytes: float) -> Iterator[str]:
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
    for name, one in tried:
        kind = name.split(" ")[-1]
        if one == layout or kind in seen:
            continue
        larger = replace(walk.cluster, devices=max(walk.cluster.devices, one.devices))
        if next(known.shape_problems(walk.description, one, larger, walk.global_batch), None) is not None:
            continue
        takes = memory(walk.description, one, larger, walk.global_batch).bytes
        if takes <= limit:
            seen.add(kind)
            yield f"with {name} it would fit: {nbytes(takes)}"
