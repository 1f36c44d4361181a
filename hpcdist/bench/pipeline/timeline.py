"""Timeline pictures of a pipeline step: a row of passes for each rank, and the same for trace viewers.

Colours differ in brightness as well as in hue, so that they can be told apart without colours: F is light, the two
parts of a backward are darker and darker, a joint backward lies between them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.collectives.report import check_plot
from hpcdist.errors import StorageError
from hpcdist.strategies.schedule.simulate.program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT
from hpcdist.strategies.schedule.simulate.timeline import StepTimeline

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
        """All but when."""
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
    found: list[PassBar] = []
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
            found.append(PassBar(rank, work, microbatch, chunk, locals_[chunk], begin_s, end_s))
    return found


def panel(title: str, timeline: StepTimeline) -> TimelinePanel:
    """Return the panel of a simulated step (local)."""
    found = bars(timeline)
    links = timeline.critical_path()
    corners = [
        corner for link in links if not link.travels for corner in ((link.begin_s, link.rank), (link.end_s, link.rank))
    ]
    return TimelinePanel(
        title, timeline.program.ranks, 1 + max((bar.local for bar in found), default=0), found, corners
    )


def draw(panels: Sequence[TimelinePanel], file: Path) -> None:
    """Draw the panels below each other on one scale of time, and write ``file`` (.png, .pdf, .svg).

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    figures = check_plot(file)
    high = sum(0.8 + 0.3 * min(panel.ranks, 24) for panel in panels)
    figure = figures.Figure(figsize=(_WIDE, high + 0.6), layout="constrained")
    ratios = [0.8 + 0.3 * min(panel.ranks, 24) for panel in panels]
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": ratios})[:, 0]
    end_s = max((bar.end_s for panel in panels for bar in panel.bars), default=1.0)
    used = sorted({bar.work for panel in panels for bar in panel.bars})
    for axis, shown in zip(axes, panels, strict=True):
        _panel(axis, shown, end_s)
    axes[-1].set_xlabel("time (s)")
    _legend(figure, used, any(panel.path for panel in panels))
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error


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
