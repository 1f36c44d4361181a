"""Report of a benchmark of pipelines: a table, JSON, bubbles against micro-batches, and measured timelines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.pipeline.request import CONTENDERS
from hpcdist.bench.pipeline.results import MeasuredCase, PipelineResults
from hpcdist.bench.pipeline.run import RECEIVES
from hpcdist.bench.pipeline.schedules import PassBar, TimelinePanel
from hpcdist.errors import UsageError
from hpcdist.reporting import table as text_table
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.plotting import drawing
from hpcdist.strategies.schedule.operations import COMPUTE
from hpcdist.strategies.schedule.simulate.program import AGAIN, CODES

FIRST: Final = "1f1b"  # what the others' speed is compared with


@dataclass(frozen=True)
class PipelineRow:
    """The figures of one case, medians over its steps.

    Bubbles are shares of the longest span of a rank; see `hpcdist.bench.pipeline.run`. ``by_rank`` are those that were
    measured and simulated of each rank's own span: where two spans are about as long, either may be the longest.
    ``overhead`` is the share of it in which the rank neither computes nor waits, ``operation_us`` the same for each
    operation of its list; ``receive_us`` is the shortest receive, whose message was there. ``x_ideal`` is the speed
    over that of as many ranks that do the same work alone, ``of_bound`` that over what the simulated bubble leaves;
    ``x_1f1b`` the speed over that of 1F1B with as many micro-batches in the same file.
    """

    schedule: str
    microbatches: int
    ranks: int
    chunks: int
    steps: int
    units: tuple[tuple[int, ...], ...]  # of each rank
    step_s: float
    quartiles_s: tuple[float, float]
    tokens_per_s: float
    measured: float
    simulated: float
    replayed: float
    by_rank: tuple[tuple[float, float], ...]
    closed: float | None
    overhead: float
    operation_us: float
    receive_us: float
    message_us: float
    pass_s: tuple[tuple[float, float, float, float], ...]  # of each rank for a micro-batch: F, B, I, W
    x_ideal: float
    of_bound: float
    x_1f1b: float | None


def rows(results: PipelineResults) -> list[PipelineRow]:
    """Return a row for each case, by micro-batches and in the order of the schedules."""
    first = {_group(measured): _step_s(measured) for measured in results.cases if measured.case.schedule == FIRST}
    table = [_row(measured, first.get(_group(measured))) for measured in results.cases]
    return sorted(table, key=lambda row: (row.ranks, row.microbatches, CONTENDERS.index(row.schedule)))


def _group(measured: MeasuredCase) -> tuple[Any, ...]:
    return measured.case.ranks, measured.case.microbatches, measured.case.shape


def _step_s(measured: MeasuredCase) -> float:
    return float(np.median(measured.step_s.max(axis=1)))


def longest(measured: MeasuredCase) -> np.ndarray:
    """Return the rank with the longest span, for each step."""
    ranks: np.ndarray = measured.span_s.argmax(axis=1)
    return ranks


def bubbles(measured: MeasuredCase) -> np.ndarray:
    """Return the measured bubble of each step: what the rank with the longest span waits of it."""
    at = np.arange(len(measured.span_s)), longest(measured)
    shares: np.ndarray = measured.idle_s[at] / measured.span_s[at]
    return shares


def _row(measured: MeasuredCase, first_s: float | None) -> PipelineRow:
    case, at = measured.case, (np.arange(len(measured.span_s)), longest(measured))
    slowest_s = measured.step_s.max(axis=1)
    rest_s = measured.span_s[at] - measured.busy_s[at] - measured.idle_s[at]
    counts = np.array([len(steps) for steps in measured.operations])[at[1]]
    x_ideal = float(np.median(measured.ideal_s.max(axis=1) / case.ranks / slowest_s))
    low, median, high = (float(value) for value in np.percentile(slowest_s, [25, 50, 75]))
    units = [tuple(unit for chunk in measured.placement.of(rank) for unit in chunk) for rank in range(case.ranks)]
    return PipelineRow(
        schedule=case.schedule,
        microbatches=case.microbatches,
        ranks=case.ranks,
        chunks=case.chunks,
        steps=len(slowest_s),
        units=tuple(units),
        step_s=median,
        quartiles_s=(low, high),
        tokens_per_s=case.microbatches * case.shape.samples * case.shape.context / median,
        measured=float(np.median(bubbles(measured))),
        simulated=measured.simulated,
        replayed=float(np.median(measured.replayed)),
        by_rank=tuple(
            zip(
                np.median(measured.idle_s / measured.span_s, axis=0).tolist(),
                measured.simulated_by_rank.tolist(),
                strict=True,
            )
        ),
        closed=measured.closed,
        overhead=float(np.median(rest_s / measured.span_s[at])),
        operation_us=1e6 * float(np.median(rest_s / counts)),
        receive_us=1e6 * _shortest_receive_s(measured),
        message_us=1e6 * measured.message_s,
        pass_s=tuple(tuple(measured.unit_s[list(own)].sum(axis=0).tolist()) for own in units),
        x_ideal=x_ideal,
        of_bound=x_ideal / (1.0 - measured.simulated),
        x_1f1b=None if first_s is None else first_s / median,
    )


def _shortest_receive_s(measured: MeasuredCase) -> float:
    taken = []
    for steps, spans in zip(measured.operations, measured.spans_s, strict=True):
        at = [index for index, op in enumerate(steps) if op.kind in RECEIVES]
        taken += (spans[:, at, 1] - spans[:, at, 0]).ravel().tolist()
    return min(taken, default=0.0)


_FIGURES: Final[Catalogue[PipelineRow]] = Catalogue(
    Figure("schedule", lambda row: row.schedule),
    Figure("m", lambda row: row.microbatches),
    Figure("ms a step", lambda row: row.step_s, ",.1f", 1e-3),
    Figure("(quartiles)", lambda row: f"({1e3 * row.quartiles_s[0]:,.1f} - {1e3 * row.quartiles_s[1]:,.1f})"),
    Figure("x 1f1b", lambda row: row.x_1f1b, ".3f"),
    Figure("bubble", lambda row: row.measured, ".1%"),
    Figure("simulated", lambda row: row.simulated, ".1%"),
    Figure("replayed", lambda row: row.replayed, ".1%"),
    Figure("closed form", lambda row: row.closed, ".1%"),
    Figure("overhead", lambda row: row.overhead, ".1%"),
    Figure("us an operation", lambda row: row.operation_us, ".0f"),
    Figure("x ideal", lambda row: row.x_ideal, ".3f"),
    Figure("of bound", lambda row: row.of_bound, ".3f"),
)
_NOTE: Final = """
bubble: what the rank with the longest span waits in receives; simulated: with the mean times of its passes;
replayed: with each pass of the same step. x ideal: speed over that of as many ranks that work alone, in
turns with it; of bound: that over (1 - simulated bubble)"""


def text(table: Sequence[PipelineRow], left_out: Mapping[str, str]) -> str:
    """Return the table as lines for people, an empty line between numbers of micro-batches."""
    lines = _FIGURES.aligned(table)
    shown = text_table.spaced(lines, [row.microbatches for row in table])
    return "\n".join([*shown, _NOTE, *(f"left out: {name}: {reason}" for name, reason in left_out.items())])


def jsonable(results: PipelineResults, left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return the report as JSON values; what there is not is null."""
    table = [asdict(row) for row in rows(results)]
    return {"provenance": dict(results.provenance), "rows": table, "left_out": dict(left_out)}


def plot(results: PipelineResults, file: Path) -> None:
    """Draw the bubble against the micro-batches: measured with quartiles, simulated, in closed form.

    Raises MissingCapabilityError without matplotlib, UsageError for no case, StorageError.
    """
    names = [name for name in CONTENDERS if any(measured.case.schedule == name for measured in results.cases)]
    if not names:
        raise UsageError("nothing was measured, so there is nothing to plot")
    with drawing(file, 2.6 * len(names) + 1, 4.2) as figure:
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for number, (axis, name) in enumerate(zip(axes, names, strict=True)):
            line = sorted(
                (measured for measured in results.cases if measured.case.schedule == name),
                key=lambda measured: measured.case.microbatches,
            )
            at = [measured.case.microbatches for measured in line]
            low, middle, high = (
                np.array([np.percentile(100 * bubbles(measured), q) for measured in line]) for q in (25, 50, 75)
            )
            axis.errorbar(
                at, middle, yerr=[middle - low, high - middle], fmt="o", color="black", capsize=3, label="measured"
            )
            axis.plot(at, [100 * measured.simulated for measured in line], "-", color="C0", label="simulated")
            known = [
                (measured.case.microbatches, 100 * measured.closed) for measured in line if measured.closed is not None
            ]
            if known:
                axis.plot(*zip(*known, strict=True), "--", color="C1", label="closed form")
            axis.set_title(name, fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(at, [str(count) for count in at])
            axis.set_xlabel("micro-batches")
            axis.grid(True, alpha=0.3)
            if not number:
                axis.set_ylabel("bubble (% of the longest span)")
                axis.legend(fontsize=8)
        axes[0].set_ylim(bottom=0)  # of all, which share it: the last word on the scale


def panels(results: PipelineResults) -> list[TimelinePanel]:
    """Return the step of median length of each schedule, at its fewest micro-batches, as it was measured (local)."""
    shown = []
    for name in CONTENDERS:
        of = [measured for measured in results.cases if measured.case.schedule == name]
        if of:
            shown.append(_panel(min(of, key=lambda measured: measured.case.microbatches)))
    return shown


def _panel(measured: MeasuredCase) -> TimelinePanel:
    step = int(np.argsort(measured.step_s.max(axis=1))[len(measured.step_s) // 2])
    chunk_of = {unit: number for number, chunk in enumerate(measured.placement.chunks) for unit in chunk}
    bars: list[PassBar] = []
    first_s = min(float(spans[step, :, 0].min()) for spans in measured.spans_s)
    for rank, (steps, spans) in enumerate(zip(measured.operations, measured.spans_s, strict=True)):
        own = [number for number, owner in enumerate(measured.placement.ranks) if owner == rank]
        for op, (begin_s, end_s) in zip(steps, (spans[step] - first_s).tolist(), strict=True):
            if op.kind in COMPUTE:
                chunk = chunk_of[op.unit]
                what = rank, AGAIN if op.recompute else CODES[op.kind], op.microbatch, chunk, own.index(chunk)
                if bars and bars[-1].what == what:  # the next unit of the chunk
                    bars[-1] = replace(bars[-1], end_s=end_s)
                else:
                    bars.append(PassBar(*what, begin_s, end_s))
    bubble = bubbles(measured)[step]
    title = f"{measured.case.schedule}, {measured.case.microbatches} micro-batches, measured bubble {bubble:.1%}"
    return TimelinePanel(title, measured.case.ranks, measured.case.chunks, bars)
