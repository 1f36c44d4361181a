"""Picture of a plan: memory of the fullest device against its limit, terms of a step, and timeline.

`timeline` gives the bars of each pipeline rank in one step. Passes are those of the simulator, with the seconds of each
chunk; recomputation comes at the beginning of the backward that needs it. The exchange of the data axis ends where
`hpcdist.planner.time.step` says: a part of it during the last backward, the rest after it; the update begins when all
ranks have finished.

Colours differ in brightness as well as in hue, so that they can be told apart without colours. matplotlib is loaded
when a picture is checked or drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import MemoryEstimate, PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead
from hpcdist.planner.report.quantities import bytes_in_both, nbytes, seconds, share
from hpcdist.planner.report.text import equation
from hpcdist.planner.time.pipeline import PlannedSeconds, border, messages_block, simulated_timeline, stage_of
from hpcdist.planner.time.stage_load import StageLoad, chunk_loads, combined, loads
from hpcdist.planner.time.step import data_exchange, rows_sum, tied_sum, timing
from hpcdist.reporting import plotting
from hpcdist.reporting.plotting import GanttBar, GanttStyle

if TYPE_CHECKING:
    from hpcdist.strategies.schedule.simulate.timeline import StepTimeline

MEMORY: Final = {
    "parameters": "#1f3b5c",
    "gradients": "#4f83b5",
    "optimizer": "#a9c9e4",
    "activations": "#d1693a",
    "messages": "#f0b35a",
    "scratch": "#f7dfb0",
    "reserved": "#9a9a9a",
}
STEP: Final = {
    "forward": "#cfe2f3",
    "backward": "#d1693a",
    "recompute": "#86a5bd",
    "tensor": "#3d6b53",
    "context": "#5f8d74",
    "expert": "#86b59b",
    "pipeline": "#b3d6c2",
    "data": "#7a3f77",
    "rows": "#a97fa7",
    "bubble": "#e8e8e8",
    "update": "#1f3b5c",
    "input": "#f0b35a",
}
TIMELINE: Final = {
    kind: GanttStyle(colour, *((0.26, 0.2) if kind == "exchange" else (-0.4, 0.62)))
    for kind, colour in (
        ("forward", "#cfe2f3"),
        ("backward", "#d1693a"),
        ("input", "#f0b35a"),
        ("weight", "#3d6b53"),
        ("recompute", "#86a5bd"),
        ("message", "#b3d6c2"),
        ("input_data", "#9a9a9a"),
        ("exchange", "#7a3f77"),
        ("update", "#1f3b5c"),
    )
}
MEANINGS: Final = {
    "input": "gradient of the input",
    "weight": "gradients of the weights",
    "recompute": "computed again",
    "input_data": "reading of data",
}
_OTHER: Final = "#555555"
_WIDE: Final = 12.0  # inches
_MOST_ROWS: Final = 32  # of a timeline; of more stages, evenly chosen ones are drawn
_ROOM: Final = 150  # bars beside each other; of rows with more, beginning and end are drawn
_CHARACTER: Final = 0.007  # of the width


class TimelineBar(NamedTuple):
    """Bar of the timeline: what pipeline rank ``stage`` does in a span of time; ``kind`` is one of `TIMELINE`.

    -1: of no micro-batch. An "exchange" may lie beside passes; nothing else overlaps.
    """

    stage: int
    kind: str
    begin_s: float
    end_s: float
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannedTimeline:
    """Step of ``end_s`` seconds on ``stages`` ranks of the pipeline; bars are in the order of ranks and of time."""

    stages: int
    bars: tuple[TimelineBar, ...]
    end_s: float


def timeline(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> PlannedTimeline:
    """Return one step, as the simulator runs it (local). Raises what `hpcdist.planner.time.step.timing` raises."""
    m = layout.microbatches(global_batch)
    piped = layout.pipeline > 1
    of_chunks = chunk_loads(description, layout, cluster) if piped else (loads(description, layout, cluster)[0][0],)
    took = timing(description, layout, cluster, global_batch, simulate=piped)
    hop_s = border(description, layout, cluster).seconds
    held_s = hop_s if piped and messages_block(layout) else 0.0
    chunks = [stage_of(load, layout, cluster, m).seconds for load in of_chunks]
    padded = [PlannedSeconds(chunk.forward_s + held_s, chunk.input_s + held_s, chunk.weight_s) for chunk in chunks]
    schedule = layout.schedule if piped else "sequential"
    ran = simulated_timeline(
        schedule, padded, layout.pipeline, m, message_s=hop_s - held_s, recompute=recomputes_ahead(layout)
    )
    begin_s = took.terms["input"]
    bars = [TimelineBar(rank, "input_data", 0.0, begin_s) for rank in range(layout.pipeline) if begin_s]
    bars += _passes(ran, of_chunks, held_s, begin_s)
    ends_s = [begin_s + stage.begin_s + stage.span_s for stage in ran.stages]
    ready_s, tied_s = max(ends_s), tied_sum(description, layout, cluster).seconds
    for rank, (end_s, load) in enumerate(zip(ends_s, _of_ranks(ran, of_chunks), strict=True)):
        swap = data_exchange(description, layout, cluster, m, stage_of(load, layout, cluster, m))
        after_s = swap.exposed_s + (tied_s if rank in (0, layout.pipeline - 1) else 0.0)
        after_s += rows_sum(load, layout, cluster).seconds
        if swap.hidden_s or after_s:
            bars.append(TimelineBar(rank, "exchange", end_s - swap.hidden_s, end_s + after_s))
        ready_s = max(ready_s, end_s + after_s)
    bars += [TimelineBar(rank, "update", ready_s, ready_s + took.terms["update"]) for rank in range(layout.pipeline)]
    return PlannedTimeline(
        stages=layout.pipeline,
        bars=tuple(sorted(bars, key=lambda bar: (bar.stage, bar.begin_s, bar.end_s))),
        end_s=ready_s + took.terms["update"],
    )


def _passes(
    ran: "StepTimeline", of_chunks: tuple[StageLoad, ...], held_s: float, after_s: float
) -> Iterator[TimelineBar]:
    """Yield the passes, without the messages that they hold ranks up for, and these beside them."""
    from hpcdist.strategies.schedule.simulate.program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT

    names = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input", WEIGHT: "weight", AGAIN: "recompute"}
    program, times = ran.program, ran.times
    early = bool((program.work == AGAIN).any())
    for rank in range(program.ranks):
        row = program.row(rank)
        columns = (program.work[row], program.microbatch[row], program.chunk[row], times.begin_s[row], times.end_s[row])
        for way, microbatch, chunk, begin_s, end_s in zip(*(column.tolist() for column in columns), strict=True):
            if way not in names:
                continue
            at_s, until_s = begin_s + after_s, end_s + after_s
            again_s = of_chunks[chunk].again_s if way in (BACKWARD, INPUT) and not early else 0.0
            if again_s:
                yield TimelineBar(rank, "recompute", at_s, at_s + again_s, microbatch, chunk)
            over_s = until_s - (0.0 if way in (WEIGHT, AGAIN) else held_s)
            yield TimelineBar(rank, names[way], at_s + again_s, over_s, microbatch, chunk)
            if over_s < until_s:
                yield TimelineBar(rank, "message", over_s, until_s, microbatch, chunk)


def _of_ranks(ran: "StepTimeline", of_chunks: tuple[StageLoad, ...]) -> list[StageLoad]:
    """Return the load of each rank: its chunks together."""
    program = ran.program
    owned = [sorted(set(program.chunk[program.row(rank)].tolist())) for rank in range(program.ranks)]
    return [reduce(combined, (of_chunks[number] for number in own)) for own in owned]


def draw(estimate: PlanEstimate, timeline: PlannedTimeline, title: str, cluster: Cluster, file: Path) -> None:
    """Draw a plan into ``file`` (.png, .pdf, .svg). Raises what `plotting.check_plot` and `plotting.save` do."""
    rows = _rows(timeline)
    high = [1.0, 1.0, 0.7 + 0.28 * len(rows)]
    figure = plotting.check_plot(file).Figure(figsize=(_WIDE, 2.2 + sum(high)), layout="constrained")
    spans = _windows(timeline)
    grid = figure.add_gridspec(3, len(spans), height_ratios=high)
    figure.suptitle(f"{title} on {cluster.name}: {equation(estimate.layout)}", fontsize=11, x=0.01, ha="left")
    _memory(figure.add_subplot(grid[0, :]), estimate.memory)
    _step(figure.add_subplot(grid[1, :]), estimate)
    axes = [figure.add_subplot(grid[2, place]) for place in range(len(spans))]
    _timeline(axes, timeline, rows, spans)
    plotting.save(figure, file)


def _memory(axis: Any, memory: MemoryEstimate) -> None:
    """Draw the terms of the memory as one bar, and the limit as a line."""
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    axis.set_title(
        f"memory: {bytes_in_both(memory.bytes)} of {bytes_in_both(memory.limit_bytes)}, {verdict}",
        fontsize=10,
        loc="left",
    )
    parts = [(name, size / 1e9, MEMORY.get(name, _OTHER), nbytes(size)) for name, size in memory.terms.items() if size]
    longest = max(memory.bytes, memory.limit_bytes) / 1e9
    _stacked(axis, parts, longest * 1.02)
    axis.axvline(memory.limit_bytes / 1e9, color="#b00020", linewidth=2.0)
    axis.set_xlabel("GB (10^9 bytes); the limit is red", fontsize=8)


def _step(axis: Any, estimate: PlanEstimate) -> None:
    """Draw the terms of a step, which add up to it, as one bar."""
    axis.set_title(
        f"step: {seconds(estimate.step_s)}, MFU {share(estimate.mfu)}, HFU {share(estimate.hfu)}",
        fontsize=10,
        loc="left",
    )
    terms = estimate.timing.terms
    parts = [(name, taken, STEP.get(name, _OTHER), seconds(taken)) for name, taken in terms.items() if taken]
    _stacked(axis, parts, estimate.step_s)
    axis.set_xlabel("seconds on the critical path", fontsize=8)


def _stacked(axis: Any, parts: Sequence[tuple[str, float, str, str]], longest: float) -> None:
    """Draw ``parts`` (name, size, colour, size in words) behind each other; names go into those that have room."""
    begin = 0.0
    for name, size, colour, amount in parts:
        axis.barh(0, size, left=begin, color=colour, edgecolor="white", linewidth=0.6, label=f"{name} {amount}")
        if size / longest > 0.012 * len(name):
            ink = plotting.readable_on(colour)
            axis.text(begin + size / 2, 0, name, ha="center", va="center", fontsize=8, color=ink)
        begin += size
    axis.set_xlim(0, longest)
    axis.set_yticks([])
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.15), fontsize=7, frameon=False, handlelength=1.0)


def _rows(timeline: PlannedTimeline) -> list[int]:
    """Return the stages to draw."""
    if timeline.stages <= _MOST_ROWS:
        return list(range(timeline.stages))
    return sorted({round(row * (timeline.stages - 1) / (_MOST_ROWS - 1)) for row in range(_MOST_ROWS)})


def _windows(timeline: PlannedTimeline) -> list[tuple[float, float]]:
    """Return the times to draw: all of the step, or its beginning and end where it has too many passes for a page.

    The pipeline has filled within its beginning, and its end is as long.
    """
    many: dict[int, int] = {}
    for bar in timeline.bars:
        many[bar.stage] = many.get(bar.stage, 0) + 1
    most = max(many.values(), default=0)
    if most <= _ROOM:
        return [(0.0, timeline.end_s)]
    filled_s = max((bar.end_s for bar in timeline.bars if bar.microbatch == 0 and bar.kind != "forward"), default=0.0)
    part = max(timeline.end_s * _ROOM / most / 2, 1.1 * filled_s)
    if part > timeline.end_s / 2:
        return [(0.0, timeline.end_s)]
    return [(0.0, part), (timeline.end_s - part, timeline.end_s)]


def _timeline(
    axes: Sequence[Any], timeline: PlannedTimeline, rows: Sequence[int], spans: Sequence[tuple[float, float]]
) -> None:
    """Draw a row for each of the stages in ``rows``: passes above, exchanges as a thin line below; an axis a span."""
    place = {stage: row for row, stage in enumerate(rows)}
    drawn: set[str] = set()
    for axis, (begin_s, end_s) in zip(axes, spans, strict=True):
        bars = [
            GanttBar(place[bar.stage], max(bar.begin_s, begin_s), min(bar.end_s, end_s), bar.kind, _number(bar))
            for bar in timeline.bars
            if bar.stage in place and bar.end_s > begin_s and bar.begin_s < end_s
        ]
        character_s = _CHARACTER * len(spans) * (end_s - begin_s)
        drawn |= set(plotting.draw_gantt(axis, bars, TIMELINE, character=character_s, font={"fontsize": 6}))
        axis.set_xlim(begin_s, end_s)
        plotting.label_rows(axis, [str(stage) for stage in rows])
        axis.set_xlabel("seconds", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("stage", fontsize=8)
    title = f"timeline of the stages: {seconds(timeline.end_s)}"
    if len(axes) > 1:
        title += f", of which the first and the last {seconds(spans[0][1])} are drawn"
    axes[0].set_title(title, fontsize=10, loc="left")
    handles = plotting.kind_handles([kind for kind in TIMELINE if kind in drawn], TIMELINE, MEANINGS)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05), "fontsize": 7, "frameon": False, "handlelength": 1.0}
    axes[-1].legend(handles=handles, **beside)


def _number(bar: TimelineBar) -> str:
    """Return the number of the micro-batch of a pass, "" for other bars."""
    return str(bar.microbatch) if bar.microbatch >= 0 else ""
