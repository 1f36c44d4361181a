"""Pipeline schedules without a training: proof, simulation, closed form of the bubble, and timelines.

`draw` plots the simulated passes of each rank, and `write_trace` writes them for trace viewers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.errors import UsageError
from hpcdist.reporting import atomic
from hpcdist.reporting.plotting import GanttBar, GanttStyle, draw_gantt, drawing
from hpcdist.reporting.table import Catalogue, Figure
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule import registry
from hpcdist.strategies.schedule import timeline as simulate_timeline
from hpcdist.strategies.schedule.operation_list import ScheduleText
from hpcdist.strategies.schedule.passes import Peak, expand
from hpcdist.strategies.schedule.simulated_program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT, LinkCost, StepCosts
from hpcdist.strategies.schedule.timeline import StepTimeline
from hpcdist.strategies.schedule.verify import liveness
from hpcdist.strategies.schedule.verify.proof import verify

# Kind of pass -> (letter, meaning, colour of a bar).
STYLES: Final = {  # the bars also differ in brightness, for black-and-white prints
    FORWARD: ("F", "forward", "#cfe2f3"),
    BACKWARD: ("B", "backward", "#d1693a"),
    INPUT: ("I", "input gradient", "#f0b35a"),
    WEIGHT: ("W", "weight gradients", "#3d6b53"),
    AGAIN: ("F again", "recomputed forward", "#b5c9da"),
}
NUMBERED: Final = 2000  # largest number of bars in a panel whose bars have numbers
PROVEN: Final = 20_000  # largest number of passes whose operation lists are verified, which takes about a second
_WIDTH: Final = 14.0  # of a plot, in inches


@dataclass(frozen=True)
class ScheduleRequest:
    """Settings of simulated schedules. ``costs``: seconds of (forward, input gradient, weight gradient) per stage."""

    stages: int
    microbatches: int
    costs: tuple[tuple[float, float, float], ...] = ((1.0, 1.0, 1.0),)
    message_s: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if len(self.costs) not in (1, self.stages):
            count = len(self.costs)
            raise UsageError(f"--costs is given {count} times; give it once, or once per stage ({self.stages} times)")
        if not all(math.isfinite(seconds) and seconds >= 0 for row in self.costs for seconds in row):
            raise UsageError(f"--costs {self.costs}: all seconds must be finite and at least 0")
        if not all(map(any, self.costs)):
            raise UsageError(f"--costs {self.costs}: give each stage a cost above 0; otherwise the bubble is undefined")
        if not math.isfinite(self.message_s):
            raise UsageError(f"--message-s {self.message_s}: the seconds must be finite")

    def step_costs(self, placement: StagePlacement) -> StepCosts:
        """Return costs per model chunk: an equal part of the costs of the stage. ``placement``: rank of each chunk."""
        forward_s, input_s, weight_s = (
            [self.costs[rank % len(self.costs)][kind] / placement.ranks.count(rank) for rank in placement.ranks]
            for kind in range(3)
        )
        return StepCosts(
            forward_s=forward_s,
            backward_s=[a + b for a, b in zip(input_s, weight_s, strict=True)],
            input_s=input_s,
            weight_s=weight_s,
            link=LinkCost(carries_s=self.message_s),
        )


@dataclass(frozen=True)
class SimulatedSchedule:
    """Result of the simulation of a pipeline schedule."""

    name: str
    written: ScheduleText
    timeline: StepTimeline
    memory: tuple[Peak, ...]  # largest number of micro-batches in progress, by rank
    closed: float | None  # idle share by a formula, or None without a formula
    operations: bool  # all operations were verified, not only the passes


def simulate_schedule(name: str, schedule: ScheduleText, request: ScheduleRequest) -> SimulatedSchedule:
    """Verify ``schedule``, a list of passes per rank, and simulate it. Raises ScheduleError, UsageError. Local.

    ``name``: name of the schedule, for messages. ``request``: numbers of stages and micro-batches, and costs.
    """
    if request.recompute and schedule.keeps:
        raise UsageError(
            f"--recompute does not work with {name}, which keeps all activations until the backward pass; remove "
            "--recompute, or choose gpipe, 1f1b or interleaved"
        )
    placement = schedule.place([range(n, n + 1) for n in range(request.stages * schedule.chunks)])
    operations = sum(map(len, schedule.passes)) <= PROVEN
    if operations:
        _verify(schedule, placement, request)
    else:
        liveness.prove(schedule.passes, placement, request.microbatches)
    rows = [simulate_timeline.compact(row) for row in schedule.passes]
    costs = request.step_costs(placement)
    timeline = simulate_timeline.simulate_passes(rows, placement, costs, recompute=request.recompute)
    closed = None
    if len(set(request.costs)) == 1 and not request.message_s and not request.recompute:  # else no formula
        seconds = dict(zip(("forward_s", "input_s", "weight_s"), request.costs[0], strict=True))
        closed = registry.bubble(name, request.stages, request.microbatches, chunks=schedule.chunks, **seconds)
    return SimulatedSchedule(name, schedule, timeline, simulate_timeline.peaks(timeline.program), closed, operations)


def _verify(written: ScheduleText, placement: StagePlacement, request: ScheduleRequest) -> None:
    units = {unit: Range(unit, unit + 1) for unit in placement.units}
    lists = []
    for rank, row in enumerate(written.passes):
        ranges = [units[unit] for chunk in placement.of(rank) for unit in chunk]
        update = [Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in ranges]
        steps = expand(row, placement, rank, recompute=request.recompute)
        lists.append([*steps, Operation(Kind.AGREE), *update])
    grid = ProcessGrid(pipeline=request.stages)
    verify(lists, grid=grid, units=units, microbatches=request.microbatches, placement=placement)


def jsonable(simulated: SimulatedSchedule) -> dict[str, Any]:
    """Return a dict for JSON: bubble, critical path, and a list with the times and memory of each rank. Local."""
    timeline = simulated.timeline
    path = timeline.critical_path()
    return {
        "schedule": simulated.name,
        "chunks": simulated.written.chunks,
        "verified": "operations" if simulated.operations else "passes",
        "bubble": timeline.bubble,
        "closed_form": simulated.closed,
        "makespan_rate": timeline.makespan_rate,
        "makespan_s": timeline.makespan_s,
        "critical_path": {
            "computes_s": sum(link.end_s - link.begin_s for link in path if not link.travels),
            "messages_s": sum(link.end_s - link.begin_s for link in path if link.travels),
            "hops": sum(before.rank != link.rank for before, link in zip(path, path[1:], strict=False)),
        },
        "ranks": [
            {**asdict(stage), "bubble": stage.bubble, **asdict(memory)}
            for stage, memory in zip(timeline.stages, simulated.memory, strict=True)
        ],
    }


def text(rows: Sequence[SimulatedSchedule]) -> str:
    """Return a text table with one line per simulated schedule, followed by an explanation of the columns."""
    note = """
bubble: idle share of the slowest rank between its first and last pass; makespan rate: mean idle share of all ranks
live, held: most micro-batches in progress, by rank; live: from F until B or I; held: from I until W"""
    return "\n".join([*_FIGURES.aligned(rows), note])


def _by_rank(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} .. {max(counts)}"


_FIGURES: Final[Catalogue[SimulatedSchedule]] = Catalogue(
    Figure("schedule", lambda row: row.name),
    Figure("chunks", lambda row: row.written.chunks),
    Figure("bubble", lambda row: row.timeline.bubble, ".2%"),
    Figure("closed form", lambda row: row.closed, ".2%"),
    Figure("makespan", lambda row: f"{row.timeline.makespan_s:.6g} s"),
    Figure("makespan rate", lambda row: row.timeline.makespan_rate, ".2%"),
    Figure("live", lambda row: _by_rank([memory.live for memory in row.memory])),
    Figure("held", lambda row: _by_rank([memory.held for memory in row.memory])),
    Figure("path computes", lambda row: f"{jsonable(row)['critical_path']['computes_s']:.6g} s"),
)


@dataclass(frozen=True)
class PassBar:
    """Bar of a Gantt chart: one pass of a micro-batch through a model chunk on a rank."""

    rank: int
    work: int  # kind of the pass: a key of `STYLES`
    microbatch: int
    chunk: int  # number of the chunk in the model
    local: int  # number of the chunk on its rank
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class TimelinePanel:
    """Gantt chart of one training step: a row of bars for each rank, and the critical path."""

    title: str
    ranks: int
    chunks: int  # largest number of model chunks on a rank
    bars: Sequence[PassBar]
    path: Sequence[tuple[float, int]]  # points (time in seconds, rank) of the critical path


def bars(timeline: StepTimeline) -> list[PassBar]:
    """Return a list with a Gantt bar for each pass of each rank in ``timeline``, ordered by rank. Local."""
    program, times = timeline.program, timeline.times
    result: list[PassBar] = []
    for rank in range(program.ranks):
        row = program.row(rank)
        entries = np.flatnonzero(program.work[row] >= 0) + row.start
        locals_ = {int(chunk): number for number, chunk in enumerate(np.unique(program.chunk[entries]))}
        key = np.stack([program.work[entries], program.microbatch[entries], program.chunk[entries]], axis=1)
        changes = np.any(key[1:] != key[:-1], axis=1)
        firsts = np.flatnonzero(np.concatenate([[True] * bool(len(key)), changes]))
        for first, stop in zip(firsts, [*firsts[1:], len(key)], strict=len(key) > 0):
            work, microbatch, chunk = (int(number) for number in key[first])
            begin_s, end_s = float(times.begin_s[entries[first]]), float(times.end_s[entries[stop - 1]])
            result.append(PassBar(rank, work, microbatch, chunk, locals_[chunk], begin_s, end_s))
    return result


def panel(title: str, timeline: StepTimeline) -> TimelinePanel:
    """Return a panel with the heading ``title``, which shows ``timeline`` and the critical path. Local."""
    rows = bars(timeline)
    path = [
        (time_s, segment.rank)
        for segment in timeline.critical_path()
        if not segment.travels
        for time_s in (segment.begin_s, segment.end_s)
    ]
    return TimelinePanel(title, timeline.program.ranks, 1 + max((bar.local for bar in rows), default=0), rows, path)


def draw(panels: Sequence[TimelinePanel], file: Path) -> None:
    """Draw ``panels`` below each other with a common time axis. Save the figure as ``file``. Raises HpcdistError."""
    heights = [0.8 + 0.3 * min(panel.ranks, 24) for panel in panels]
    end_s = max((bar.end_s for panel in panels for bar in panel.bars), default=1.0)
    works = sorted({bar.work for panel in panels for bar in panel.bars})
    with drawing(file, _WIDTH, sum(heights) + 0.6) as figure:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axis, shown in zip(axes, panels, strict=True):
            _panel(axis, shown, end_s)
        axes[-1].set_xlabel("time (s)")
        handles: list[Any] = [Patch(facecolor=STYLES[work][2], label=": ".join(STYLES[work][:2])) for work in works]
        handles.append(Line2D([], [], color="black", linewidth=1.2, label="critical path"))
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)


def _panel(axis: Any, shown: TimelinePanel, end_s: float) -> None:
    styles = {letter: GanttStyle(colour, -0.42, 0.84) for letter, _, colour in STYLES.values()}
    gantt_bars = []
    for bar in shown.bars:
        label = f"{bar.microbatch}.{bar.local}" if shown.chunks > 1 else str(bar.microbatch)
        gantt_bars.append(GanttBar(bar.rank, bar.begin_s, bar.end_s, STYLES[bar.work][0], label))
    character_s = 0.06 / (0.92 * _WIDTH) * end_s  # a character is 0.06 inches wide
    is_numbered = len(shown.bars) <= NUMBERED
    font = {"fontsize": 7, "clip_on": True}
    draw_gantt(axis, gantt_bars, styles, character=character_s if is_numbered else 0.0, font=font)
    axis.plot([s for s, _ in shown.path], [r + 0.42 for _, r in shown.path], color="black", linewidth=1.2)
    axis.set_title(shown.title, fontsize=10, loc="left")
    axis.set_ylabel("rank")
    axis.set_ylim(shown.ranks - 0.4, -0.6)
    axis.set_xlim(0, end_s * 1.005)
    if shown.ranks <= 16:
        axis.set_yticks(range(shown.ranks))


def write_trace(panels: Sequence[TimelinePanel], file: Path) -> None:
    """Write ``panels`` to ``file`` in the JSON format of Chrome traces, which Perfetto shows. Raises StorageError."""
    events: list[dict[str, Any]] = []
    for process, shown in enumerate(panels):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": shown.title}})
        for rank in range(shown.ranks):
            name = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": name})
        for bar in shown.bars:
            letter = STYLES[bar.work][0]
            about = {"name": f"{letter}{bar.microbatch}.{bar.local}", "cat": letter, "pid": process, "tid": bar.rank}
            times = {"ts": 1e6 * bar.begin_s, "dur": 1e6 * (bar.end_s - bar.begin_s)}  # in microseconds
            events.append({"ph": "X", **about, **times, "args": {"microbatch": bar.microbatch, "chunk": bar.chunk}})
    atomic.save(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "choose another --trace file")
