"""Plot of a plan: memory by term, step time by term, and the timeline of the pipeline ranks.

The simulator gives the passes of each pipeline rank. Recomputation precedes its backward pass. The exchange of the data
axis overlaps with the last backward pass, as far as `hpcdist.planner.time.step` allows. The update starts when all
ranks have finished their exchange. The colours differ in brightness, so that greyscale prints stay readable.
"""

from collections import Counter
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
from hpcdist.planner.time.pipeline import PlannedSeconds, border_message, messages_block, simulated_timeline, stage_of
from hpcdist.planner.time.stage_load import StageLoad, chunk_loads, combined, loads
from hpcdist.planner.time.step import data_exchange, rows_sum, tied_sum, timing
from hpcdist.reporting import plotting
from hpcdist.reporting.plotting import GanttBar, GanttStyle

if TYPE_CHECKING:
    from hpcdist.strategies.schedule.timeline import StepTimeline

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
    "recompute": "recomputation",
    "input_data": "reading of samples",
}
_OTHER: Final = "#555555"
_MOST_ROWS: Final = 32  # rows of the timeline: of more stages, evenly spaced ones are drawn
_MOST_BARS: Final = 150  # bars of a row: of longer steps, the beginning and the end are drawn


class TimelineBar(NamedTuple):
    """Bar in the timeline of a step: an interval in which pipeline rank ``stage`` does one kind of work."""

    stage: int
    kind: str  # key of `TIMELINE`, such as "forward"
    begin_s: float
    end_s: float
    microbatch: int = -1  # index; -1: none
    chunk: int = 0  # index of the model chunk


@dataclass(frozen=True, kw_only=True)
class PlannedTimeline:
    """Intervals of work of all pipeline ranks in one planned training step."""

    stages: int  # number of pipeline ranks
    bars: tuple[TimelineBar, ...]  # sorted by rank, then by time
    end_s: float


def timeline(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> PlannedTimeline:
    """Simulate one training step on all pipeline ranks, and return the intervals of work.

    ``description``: the model to train. Raises ConfigurationError if the schedule of ``layout`` is impossible.
    """
    m = layout.microbatches(global_batch)
    is_pipelined = layout.pipeline > 1
    chunks = chunk_loads(description, layout, cluster) if is_pipelined else (loads(description, layout, cluster)[0][0],)
    terms = timing(description, layout, cluster, global_batch, simulate=is_pipelined).terms
    hop_s = border_message(description, layout, cluster).seconds
    wait_s = hop_s if is_pipelined and messages_block(layout) else 0.0
    passes = [stage_of(load, layout, cluster, m).seconds for load in chunks]
    padded = [PlannedSeconds(forward_s + wait_s, input_s + wait_s, weight_s) for forward_s, input_s, weight_s in passes]
    schedule = layout.schedule if is_pipelined else "sequential"
    steps = simulated_timeline(
        schedule, padded, layout.pipeline, m, message_s=hop_s - wait_s, recompute=recomputes_ahead(layout)
    )
    begin_s, tied_s = terms["input"], tied_sum(description, layout, cluster).seconds
    bars = [TimelineBar(rank, "input_data", 0.0, begin_s) for rank in range(layout.pipeline) if begin_s]
    bars += _passes(steps, chunks, wait_s, begin_s)
    ready_s = 0.0
    for rank, (stage, load) in enumerate(zip(steps.stages, _rank_loads(steps, chunks), strict=True)):
        end_s = begin_s + stage.begin_s + stage.span_s
        exchange = data_exchange(description, layout, cluster, m, stage_of(load, layout, cluster, m))
        exposed_s = exchange.exposed_s + (tied_s if rank in (0, layout.pipeline - 1) else 0.0)
        exposed_s += rows_sum(load, layout, cluster).seconds
        if exchange.hidden_s or exposed_s:
            bars.append(TimelineBar(rank, "exchange", end_s - exchange.hidden_s, end_s + exposed_s))
        ready_s = max(ready_s, end_s + exposed_s)
    end_s = ready_s + terms["update"]
    bars += [TimelineBar(rank, "update", ready_s, end_s) for rank in range(layout.pipeline)]
    ordered = sorted(bars, key=lambda bar: (bar.stage, bar.begin_s, bar.end_s))
    return PlannedTimeline(stages=layout.pipeline, bars=tuple(ordered), end_s=end_s)


def _passes(
    steps: "StepTimeline", chunks: Sequence[StageLoad], wait_s: float, offset_s: float
) -> Iterator[TimelineBar]:
    # bars of all passes, each followed by a message of `wait_s`
    from hpcdist.strategies.schedule.simulated_program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT

    kinds = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input", WEIGHT: "weight", AGAIN: "recompute"}
    program, times = steps.program, steps.times
    is_recomputed_ahead = bool((program.work == AGAIN).any())
    for rank in range(program.ranks):
        row = program.row(rank)
        columns = (program.work[row], program.microbatch[row], program.chunk[row], times.begin_s[row], times.end_s[row])
        for work, microbatch, chunk, begin_s, end_s in zip(*(column.tolist() for column in columns), strict=True):
            if work not in kinds:
                continue
            start_s, stop_s = begin_s + offset_s, end_s + offset_s
            again_s = chunks[chunk].again_s if work in (BACKWARD, INPUT) and not is_recomputed_ahead else 0.0
            if again_s:
                yield TimelineBar(rank, "recompute", start_s, start_s + again_s, microbatch, chunk)
            message_s = stop_s - (0.0 if work in (WEIGHT, AGAIN) else wait_s)
            yield TimelineBar(rank, kinds[work], start_s + again_s, message_s, microbatch, chunk)
            if message_s < stop_s:
                yield TimelineBar(rank, "message", message_s, stop_s, microbatch, chunk)


def _rank_loads(steps: "StepTimeline", chunks: Sequence[StageLoad]) -> list[StageLoad]:
    program = steps.program
    numbers = [sorted(set(program.chunk[program.row(rank)].tolist())) for rank in range(program.ranks)]
    return [reduce(combined, (chunks[number] for number in row)) for row in numbers]


def draw(estimate: PlanEstimate, timeline: PlannedTimeline, title: str, cluster: Cluster, file: Path) -> None:
    """Draw memory use, step time and ``timeline`` of the plan ``estimate`` to ``file`` (.png, .pdf or .svg)."""
    count = min(timeline.stages, _MOST_ROWS)
    stages = sorted({round(row * (timeline.stages - 1) / max(1, count - 1)) for row in range(count)})
    heights = [1.0, 1.0, 0.7 + 0.28 * len(stages)]
    figure = plotting.check_plot(file).Figure(figsize=(12.0, 2.2 + sum(heights)), layout="constrained")
    windows = _windows(timeline)
    grid = figure.add_gridspec(3, len(windows), height_ratios=heights)
    figure.suptitle(f"{title} on {cluster.name}: {equation(estimate.layout)}", fontsize=11, x=0.01, ha="left")
    _memory(figure.add_subplot(grid[0, :]), estimate.memory)
    _step(figure.add_subplot(grid[1, :]), estimate)
    axes = [figure.add_subplot(grid[2, column]) for column in range(len(windows))]
    _timeline(axes, timeline, stages, windows)
    plotting.save(figure, file)


def _memory(axis: Any, memory: MemoryEstimate) -> None:
    parts = [(name, size / 1e9, MEMORY.get(name, _OTHER), nbytes(size)) for name, size in memory.terms.items() if size]
    _stacked(axis, parts, max(memory.bytes, memory.limit_bytes) / 1e9 * 1.02)
    axis.axvline(memory.limit_bytes / 1e9, color="#b00020", linewidth=2.0)
    title = f"memory: {bytes_in_both(memory.bytes)} of {bytes_in_both(memory.limit_bytes)}"
    axis.set_title(f"{title}, {'fits' if memory.fits else 'DOES NOT FIT'}", fontsize=10, loc="left")
    axis.set_xlabel("GB (10^9 bytes); the limit is red", fontsize=8)


def _step(axis: Any, estimate: PlanEstimate) -> None:
    terms = estimate.timing.terms
    parts = [(name, term_s, STEP.get(name, _OTHER), seconds(term_s)) for name, term_s in terms.items() if term_s]
    _stacked(axis, parts, estimate.step_s)
    title = f"step: {seconds(estimate.step_s)}, MFU {share(estimate.mfu)}, HFU {share(estimate.hfu)}"
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("seconds on the critical path", fontsize=8)


def _stacked(axis: Any, parts: Sequence[tuple[str, float, str, str]], longest: float) -> None:
    # parts: name, size, colour, size as text
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


def _windows(timeline: PlannedTimeline) -> list[tuple[float, float]]:
    # The beginning contains the fill phase of the pipeline. The end is as long as the beginning.
    most = max(Counter(bar.stage for bar in timeline.bars).values(), default=0)
    filled_s = max((bar.end_s for bar in timeline.bars if bar.microbatch == 0 and bar.kind != "forward"), default=0.0)
    window_s = max(timeline.end_s * _MOST_BARS / max(1, most) / 2, 1.1 * filled_s)
    if most <= _MOST_BARS or window_s > timeline.end_s / 2:
        return [(0.0, timeline.end_s)]
    return [(0.0, window_s), (timeline.end_s - window_s, timeline.end_s)]


def _timeline(
    axes: Sequence[Any], timeline: PlannedTimeline, stages: Sequence[int], windows: Sequence[tuple[float, float]]
) -> None:
    rows = {stage: row for row, stage in enumerate(stages)}
    labels = {bar.microbatch: str(bar.microbatch) if bar.microbatch >= 0 else "" for bar in timeline.bars}
    kinds: set[str] = set()
    for axis, (begin_s, end_s) in zip(axes, windows, strict=True):
        bars = [
            GanttBar(
                rows[bar.stage], max(bar.begin_s, begin_s), min(bar.end_s, end_s), bar.kind, labels[bar.microbatch]
            )
            for bar in timeline.bars
            if bar.stage in rows and bar.end_s > begin_s and bar.begin_s < end_s
        ]
        character_s = 0.007 * len(windows) * (end_s - begin_s)  # a character takes 0.7 % of the width of the figure
        kinds |= set(plotting.draw_gantt(axis, bars, TIMELINE, character=character_s, font={"fontsize": 6}))
        axis.set_xlim(begin_s, end_s)
        plotting.label_rows(axis, [str(stage) for stage in stages])
        axis.set_xlabel("seconds", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("stage", fontsize=8)
    title = f"timeline of the stages: {seconds(timeline.end_s)}"
    if len(axes) > 1:
        title += f", of which the first and the last {seconds(windows[0][1])} are drawn"
    axes[0].set_title(title, fontsize=10, loc="left")
    handles = plotting.kind_handles([kind for kind in TIMELINE if kind in kinds], TIMELINE, MEANINGS)
    style = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05), "fontsize": 7, "frameon": False, "handlelength": 1.0}
    axes[-1].legend(handles=handles, **style)
