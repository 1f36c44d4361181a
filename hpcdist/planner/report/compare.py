"""Compare layouts: what each takes, and the terms of time and memory that make the difference."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits.checks import problems, shape_problems
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.plan import plan
from hpcdist.planner.report.quantities import between, figures, joules, nbytes, seconds, share

SMALL: Final = 0.005  # of a step: differences below are not told
# What a person changes, in the order in which layouts are told.
_AXES: Final = ("data", "pipeline", "tensor", "context", "expert", "servers")


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One layout: why it cannot be, or what it takes. One that only lacks memory has both."""

    layout: ParallelLayout
    problems: tuple[str, ...]
    estimate: PlanEstimate | None


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """Layouts in the order they were given; ``best`` is the place of the fastest one that can be, None without any."""

    rows: tuple[LayoutRow, ...]
    best: int | None

    def table(self) -> list[str]:
        """Return the lines that a person reads: a column for each layout (local)."""
        estimates = [row.estimate for row in self.rows]
        known = [estimate for estimate in estimates if estimate is not None]

        def row_of(name: str, cell: Callable[[PlanEstimate], str]) -> list[str]:
            return [name, *("-" if estimate is None else cell(estimate) for estimate in estimates)]

        def rows_of(
            terms: Callable[[PlanEstimate], Mapping[str, float]], text: Callable[[float], str]
        ) -> list[list[str]]:
            names = _terms(map(terms, known))
            columns = [None if estimate is None else terms(estimate) for estimate in estimates]
            return [
                [f"  {name}", *("-" if column is None else text(column.get(name, 0.0)) for column in columns)]
                for name in names
            ]

        changing = _changing([row.layout for row in self.rows])
        cells = [
            ["", *(str(number + 1) for number in range(len(self.rows)))],
            *([name, *(str(getattr(row.layout, name)) for row in self.rows)] for name in changing),
            row_of("step", lambda estimate: seconds(estimate.step_s) + between(estimate.step_range_s)),
            *rows_of(lambda estimate: estimate.timing.terms, seconds),
            row_of("memory", lambda estimate: nbytes(estimate.memory.bytes)),
            *rows_of(lambda estimate: estimate.memory.terms, nbytes),
            row_of("MFU", lambda estimate: share(estimate.mfu)),
            row_of("HFU", lambda estimate: share(estimate.hfu)),
        ]
        if any(estimate.energy.terms for estimate in known):
            cells.append(row_of("energy of a step", lambda estimate: joules(estimate.energy.joules)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
        return lines + self._verdict()

    def _verdict(self) -> list[str]:
        """Return what cannot be, and what makes the best one better than each other."""
        lines = [f"{number + 1}: {text}" for number, row in enumerate(self.rows) for text in row.problems]
        if self.best is None:
            return lines
        best = self.rows[self.best].estimate
        assert best is not None, "the best one was estimated"
        for number, row in enumerate(self.rows):
            if number != self.best and row.estimate is not None and not row.problems:
                lines.append(f"{self.best + 1} against {number + 1}: {slowdown_line(best, row.estimate)}")
        return lines


def compare(
    description: ModelDescription,
    layouts: Sequence[ParallelLayout],
    cluster: Cluster,
    global_batch: int,
    steps: int = 1,
    *,
    simulate: bool = False,
) -> LayoutComparison:
    """Return all ``layouts`` side by side, impossible ones with their reasons (local). Raises UsageError for none."""
    if not layouts:
        raise UsageError("a comparison of no layouts; give one or more")
    rows = []
    for layout in layouts:
        wrong = tuple(problem.text for problem in shape_problems(description, layout, cluster, global_batch))
        estimate = None
        if not wrong:  # a layout that is too large has an estimate, too
            estimate = plan(description, layout, cluster, global_batch, steps, simulate=simulate)
            wrong = problems(description, layout, cluster, global_batch)
        rows.append(LayoutRow(layout=layout, problems=wrong, estimate=estimate))
    possible = [
        (row.estimate.step_s, number)
        for number, row in enumerate(rows)
        if row.estimate is not None and not row.problems
    ]
    return LayoutComparison(rows=tuple(rows), best=min(possible)[1] if possible else None)


def differences(terms: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return by how much each term of ``terms`` is larger than of ``other``, the largest difference first (local)."""
    excess = [(name, terms.get(name, 0.0) - other.get(name, 0.0)) for name in _terms((terms, other))]
    return sorted(excess, key=lambda item: -abs(item[1]))


def slowdown_line(estimate: PlanEstimate, other: PlanEstimate) -> str:
    """Return how much longer a step of ``other`` takes, and the terms that decide it, in words (local)."""
    longer_s = other.step_s - estimate.step_s
    shown = [
        (name, more_s)
        for name, more_s in differences(estimate.timing.terms, other.timing.terms)
        if abs(more_s) > SMALL * estimate.step_s
    ]
    less = [f"{seconds(-more_s)} less of {name}" for name, more_s in shown if more_s < 0]
    more = [f"{seconds(more_s)} more of {name}" for name, more_s in shown if more_s > 0]
    if abs(longer_s) <= SMALL * SMALL * estimate.step_s:
        how = "as fast"
    else:
        how = f"{seconds(abs(longer_s))} ({figures(100 * abs(longer_s) / other.step_s)} %) a step "
        how += "faster" if longer_s > 0 else "slower"
    parts = ", ".join(less)
    if more:
        parts += f"{', though ' if less else ''}{', '.join(more)}"
    return f"{how}: {parts}" if parts else how


def changes(layout: ParallelLayout, other: ParallelLayout) -> str:
    """Return what of the layout ``layout`` is not so in ``other``, in words (local)."""
    names = _changing((layout, other))
    return ", ".join(f"{name} {getattr(layout, name)} instead of {getattr(other, name)}" for name in names)


def _changing(layouts: Sequence[ParallelLayout]) -> list[str]:
    """Return the fields that differ between layouts, degrees first; the degrees of a single one."""
    if len(layouts) == 1:
        return list(_AXES[:4])
    names = [*_AXES, *(name for name in ParallelLayout.__dataclass_fields__ if name not in _AXES)]
    return [name for name in names if len({getattr(layout, name) for layout in layouts}) > 1]


def _terms(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    """Return all names that are not 0 everywhere, in the order of their first appearance."""
    largest: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return [name for name, value in largest.items() if value > 0]
