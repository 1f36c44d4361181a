"""Schedules on paper: verified, simulated and compared with their closed form, before anything runs; and timelines.

`draw` makes the picture of steps, simulated or measured: a row of passes for each rank; `trace` gives the same to trace
viewers. Colours differ in brightness as well as in hue, so that they can be told apart without colours: F is light, the
two parts of a backward are darker and darker, a joint backward lies between them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.plotting import drawing
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.generate import registry
from hpcdist.strategies.schedule.generate.operation_list import ScheduleText
from hpcdist.strategies.schedule.generate.passes import Peak, expand
from hpcdist.strategies.schedule.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.simulate import passes
from hpcdist.strategies.schedule.simulate import timeline as simulate_timeline
from hpcdist.strategies.schedule.simulate.program import (
    AGAIN,
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    LinkCost,
    StepCosts,
)
from hpcdist.strategies.schedule.simulate.timeline import StepTimeline
from hpcdist.strategies.schedule.verify import liveness
from hpcdist.strategies.schedule.verify.proof import verify

NAMES: Final = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W", AGAIN: "F again"}
MEANINGS: Final = {
    FORWARD: "F: forward",
    BACKWARD: "B: backward",
    INPUT: "I: gradient of the input",
    WEIGHT: "W: gradients of the weights",
    AGAIN: "F again: recomputed",
}
# What it is -> (colour, that of the number in it)
COLOURS: Final = {
    FORWARD: ("#cfe2f3", "black"),
    BACKWARD: ("#d1693a", "black"),
    INPUT: ("#f0b35a", "black"),
    WEIGHT: ("#3d6b53", "white"),
    AGAIN: ("#b5c9da", "black"),
}
NUMBERED: Final = 2000  # bars of a picture, beyond which no number could be read
_WIDE: Final = 14.0  # inches
_CHARACTER: Final = 0.06  # inches
PROVEN: Final = 20_000  # passes of all ranks, up to which their lists of operations are verified too: a second
_SHOWN_RANKS: Final = 8


@dataclass(frozen=True)
class ScheduleRequest:
    """Costs of a stage for a micro-batch, all chunks of a rank together: one for all ranks, or one for each.

    ``costs`` are (forward, gradient of the input, gradients of the weights) in seconds; a joint backward takes as long
    as the last two. Chunks of a rank are alike. A message takes its link for ``message_s``.
    """

    stages: int
    microbatches: int
    costs: tuple[tuple[float, float, float], ...] = ((1.0, 1.0, 1.0),)
    message_s: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if len(self.costs) not in (1, self.stages):
            raise UsageError(f"--costs is given {len(self.costs)} times; once for all stages, or {self.stages} times")
        if not all(math.isfinite(seconds) and seconds >= 0 for row in self.costs for seconds in row):
            raise UsageError(f"--costs {self.costs}: seconds are finite and not negative")
        if not all(map(any, self.costs)):
            raise UsageError(f"--costs {self.costs}: a stage that takes nothing has no bubble; give one part some time")
        if not math.isfinite(self.message_s):
            raise UsageError(f"--message-s {self.message_s}: seconds are finite")

    @property
    def equal(self) -> bool:
        """Whether all stages are alike and messages take no time, as closed forms assume."""
        return len(set(self.costs)) == 1 and not self.message_s and not self.recompute

    def of(self, placement: StagePlacement) -> StepCosts:
        """Return the costs of a placement of one unit for each chunk."""
        rows = [self.costs[rank % len(self.costs)] for rank in placement.ranks]
        shares = [placement.ranks.count(rank) for rank in placement.ranks]
        forward_s, input_s, weight_s = (
            [row[part] / share for row, share in zip(rows, shares, strict=True)] for part in range(3)
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
    """A schedule, its timeline and what each rank keeps at most; ``closed`` is None where there is no such form.

    ``operations`` says whether the lists of operations were verified, and not only the passes that they are made of.
    """

    name: str
    written: ScheduleText
    timeline: StepTimeline
    memory: tuple[Peak, ...]
    closed: float | None
    operations: bool


def simulate_schedule(name: str, written: ScheduleText, wanted: ScheduleRequest) -> SimulatedSchedule:
    """Return schedule ``name``, proven and simulated (local). Raises ScheduleError where it would hang, or is none."""
    if wanted.recompute and written.keeps:
        raise UsageError(
            f"--recompute with {name}: what a weight gradient needs stays in memory until it is computed; leave it "
            "out, or choose gpipe, 1f1b or interleaved"
        )
    placement = written.place([range(n, n + 1) for n in range(wanted.stages * written.chunks)])
    listed = sum(map(len, written.passes)) <= PROVEN
    if listed:
        _verify(written, placement, wanted)
    else:
        liveness.prove(written.passes, placement, wanted.microbatches)
    costs = wanted.of(placement)
    rows = [passes.compact(row) for row in written.passes]
    timeline = simulate_timeline.simulate_passes(rows, placement, costs, recompute=wanted.recompute)
    forward_s, input_s, weight_s = wanted.costs[0]
    closed = registry.bubble(
        name,
        wanted.stages,
        wanted.microbatches,
        chunks=written.chunks,
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
    )
    memory = passes.peaks(timeline.program)
    return SimulatedSchedule(name, written, timeline, memory, closed if wanted.equal else None, listed)


def _verify(written: ScheduleText, placement: StagePlacement, wanted: ScheduleRequest) -> None:
    """Verify the step that the passes become, with an update behind it, as on one replica."""
    units = {unit: Range(unit, unit + 1) for unit in placement.units}
    lists = []
    for rank, row in enumerate(written.passes):
        own = [units[unit] for chunk in placement.of(rank) for unit in chunk]
        update = [Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in own]
        steps = expand(row, placement, rank, recompute=wanted.recompute)
        lists.append([*steps, Operation(Kind.AGREE), *update])
    grid = ProcessGrid(pipeline=wanted.stages)
    verify(lists, grid=grid, units=units, microbatches=wanted.microbatches, placement=placement)


def jsonable(simulated: SimulatedSchedule) -> dict[str, Any]:
    """Return the figures as JSON values (local)."""
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
            {
                "begin_s": stage.begin_s,
                "span_s": stage.span_s,
                "busy_s": stage.busy_s,
                "idle_s": stage.idle_s,
                "bubble": stage.bubble,
                "live": memory.live,
                "held": memory.held,
                "both": memory.both,
            }
            for stage, memory in zip(timeline.stages, simulated.memory, strict=True)
        ],
    }


def text(rows: Sequence[SimulatedSchedule]) -> str:
    """Return the table for people."""
    return "\n".join([*_FIGURES.aligned(rows), _NOTE])


def _by_rank(counts: Sequence[int]) -> str:
    if len(counts) <= _SHOWN_RANKS:
        return " ".join(map(str, counts))
    return f"{min(counts)} .. {max(counts)}"


_FIGURES: Final[Catalogue[SimulatedSchedule]] = Catalogue(
    Figure("schedule", lambda of: of.name),
    Figure("chunks", lambda of: of.written.chunks),
    Figure("bubble", lambda of: f"{of.timeline.bubble:.2%}"),
    Figure("closed form", lambda of: of.closed, ".2%"),
    Figure("makespan", lambda of: f"{of.timeline.makespan_s:.6g} s"),
    Figure("makespan rate", lambda of: f"{of.timeline.makespan_rate:.2%}"),
    Figure("live", lambda of: _by_rank([memory.live for memory in of.memory])),
    Figure("held", lambda of: _by_rank([memory.held for memory in of.memory])),
    Figure("path computes", lambda of: f"{jsonable(of)['critical_path']['computes_s']:.6g} s"),
)
_NOTE: Final = """
bubble: idle share of the longest stage's own span; makespan rate: idle share of all ranks' time
live, held: most micro-batches of a chunk at once, by rank: until B or I, and on to W"""


@dataclass(frozen=True)
class PassBar:
    """One pass through one chunk; ``chunk`` is that of the model, ``local`` its number on the rank."""

    rank: int
    work: int
    microbatch: int
    chunk: int
    local: int
    begin_s: float
    end_s: float

    @property
    def what(self) -> tuple[int, int, int, int, int]:
        """Identity of the pass: all but its times."""
        return self.rank, self.work, self.microbatch, self.chunk, self.local


@dataclass(frozen=True)
class TimelinePanel:
    """One step in a picture: its bars, and the (time, rank) corners of the chain that decides its length."""

    title: str
    ranks: int
    chunks: int  # the most on a rank
    bars: Sequence[PassBar]
    path: Sequence[tuple[float, int]] = ()


def bars(timeline: StepTimeline) -> list[PassBar]:
    """Return the passes of all ranks, those of the units of a chunk together (local)."""
    program, times = timeline.program, timeline.times
    passes: list[PassBar] = []
    for rank in range(program.ranks):
        row = program.row(rank)
        entries = np.flatnonzero(program.work[row] >= 0) + row.start
        locals_ = {int(chunk): number for number, chunk in enumerate(np.unique(program.chunk[entries]))}
        key = np.stack([program.work[entries], program.microbatch[entries], program.chunk[entries]], axis=1)
        changes = np.any(key[1:] != key[:-1], axis=1)
        firsts = np.flatnonzero(np.concatenate([[True] * bool(len(key)), changes]))
        for first, behind in zip(firsts, [*firsts[1:], len(key)], strict=len(key) > 0):
            work, microbatch, chunk = (int(number) for number in key[first])
            begin_s, end_s = float(times.begin_s[entries[first]]), float(times.end_s[entries[behind - 1]])
            passes.append(PassBar(rank, work, microbatch, chunk, locals_[chunk], begin_s, end_s))
    return passes


def panel(title: str, timeline: StepTimeline) -> TimelinePanel:
    """Return the panel of a simulated step (local)."""
    passes = bars(timeline)
    links = timeline.critical_path()
    corners = [
        corner for link in links if not link.travels for corner in ((link.begin_s, link.rank), (link.end_s, link.rank))
    ]
    return TimelinePanel(
        title, timeline.program.ranks, 1 + max((bar.local for bar in passes), default=0), passes, corners
    )


def draw(panels: Sequence[TimelinePanel], file: Path) -> None:
    """Draw the panels below each other on one scale of time, and write ``file`` (.png, .pdf, .svg).

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    heights = [0.8 + 0.3 * min(panel.ranks, 24) for panel in panels]
    end_s = max((bar.end_s for panel in panels for bar in panel.bars), default=1.0)
    used = sorted({bar.work for panel in panels for bar in panel.bars})
    with drawing(file, _WIDE, sum(heights) + 0.6) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axis, shown in zip(axes, panels, strict=True):
            _panel(axis, shown, end_s)
        axes[-1].set_xlabel("time (s)")
        _legend(figure, used, any(panel.path for panel in panels))


def _panel(axis: Any, shown: TimelinePanel, end_s: float) -> None:
    for work, (colour, _) in COLOURS.items():
        for rank in range(shown.ranks):
            spans = [
                (bar.begin_s, bar.end_s - bar.begin_s) for bar in shown.bars if (bar.work, bar.rank) == (work, rank)
            ]
            if spans:
                edge = {"edgecolor": "white", "linewidth": 0.4 if len(shown.bars) <= NUMBERED else 0.0}
                axis.broken_barh(spans, (rank - 0.42, 0.84), facecolor=colour, **edge)
    if len(shown.bars) <= NUMBERED:
        for bar in shown.bars:
            text = f"{bar.microbatch}.{bar.local}" if shown.chunks > 1 else str(bar.microbatch)
            if (bar.end_s - bar.begin_s) / end_s * _WIDE * 0.92 > _CHARACTER * len(text):
                centre = (bar.begin_s + bar.end_s) / 2
                colour = COLOURS[bar.work][1]
                axis.text(centre, bar.rank, text, ha="center", va="center", fontsize=7, color=colour, clip_on=True)
    if shown.path:
        axis.plot([s for s, _ in shown.path], [r + 0.42 for _, r in shown.path], color="black", linewidth=1.2)
    axis.set_title(shown.title, fontsize=10, loc="left")
    axis.set_ylabel("rank")
    axis.set_ylim(shown.ranks - 0.4, -0.6)
    axis.set_xlim(0, end_s * 1.005)
    if shown.ranks <= 16:
        axis.set_yticks(range(shown.ranks))


def _legend(figure: Any, used: Sequence[int], path: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLOURS[work][0], label=MEANINGS[work]) for work in used]
    if path:
        handles.append(Line2D([], [], color="black", linewidth=1.2, label="critical path"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)


def trace(panels: Sequence[TimelinePanel]) -> dict[str, Any]:
    """Return the panels in the format of chrome://tracing and Perfetto: a process each, a thread for each rank (local).

    Times are in microseconds there.
    """
    events: list[Mapping[str, Any]] = []
    for process, shown in enumerate(panels):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": shown.title}})
        for rank in range(shown.ranks):
            name = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": name})
        events += [
            {
                "ph": "X",
                "name": f"{NAMES[bar.work]}{bar.microbatch}.{bar.local}",
                "cat": NAMES[bar.work],
                "pid": process,
                "tid": bar.rank,
                "ts": 1e6 * bar.begin_s,
                "dur": 1e6 * (bar.end_s - bar.begin_s),
                "args": {"microbatch": bar.microbatch, "chunk": bar.chunk},
            }
            for bar in shown.bars
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(panels: Sequence[TimelinePanel], file: Path) -> None:
    """Write `trace` as JSON. Raises StorageError."""
    try:
        file.write_text(json.dumps(trace(panels)), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error
