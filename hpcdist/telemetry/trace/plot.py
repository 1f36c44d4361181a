"""Plot of one step: a row of activities for each rank, and the critical path."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.plotting import GanttBar, GanttStyle
from hpcdist.telemetry.trace import summary as traces
from hpcdist.telemetry.trace.critical_path import PathSegment
from hpcdist.telemetry.trace.summary import Trace
from hpcdist.telemetry.trace.timeline import TimelinePiece

ROWS: Final = 32  # largest number of ranks; those on the critical path and with the longest waits are drawn
STYLES: Final = {
    "forward": GanttStyle("#b9d6ea"),
    "backward": GanttStyle("#6ba3cf"),
    "compute": GanttStyle("#8fb8d4"),
    "update": GanttStyle("#2f6690"),
    "communication": GanttStyle("#f2a65a"),
    "waits": GanttStyle("#fbe3cb"),
    "data": GanttStyle("#8ab17d"),
    "checkpoint": GanttStyle("#6d597a"),
    "validation": GanttStyle("#b56576"),
    "other": GanttStyle("#d9d9d9"),
}
MEANINGS: Final = {
    "compute": "computes",
    "waits": "waits for another rank",
    "data": "waits for data",
    "other": "between operations",
}
_WIDE: Final = 14.0  # inches
_PATH: Final = "#222222"


def draw(trace: Trace, file: Path) -> int:
    """Plot the step with the median critical path; return its number. Raises UsageError if no step is complete."""
    matplotlib = plotting.check_plot(file)
    if not trace.paths:
        raise UsageError(f"{trace.run_dir} has no complete record of any selected step; select other steps")
    drawn = sorted(trace.paths, key=lambda path: path.took_ns)[(len(trace.paths) - 1) // 2]
    step_trace = traces.of_step(trace, drawn.step)
    rows = _rows(step_trace, drawn.links)
    figure = matplotlib.Figure(figsize=(_WIDE, 1.6 + 0.34 * max(3, len(rows))), layout="constrained")
    axes = figure.subplots()
    zero = min(line.steps[drawn.step][0] for line in step_trace.timeline.lines.values())
    end = max(line.steps[drawn.step][1] for line in step_trace.timeline.lines.values())
    unit, scale = ("ms", 1e6) if end - zero < 10_000_000_000 else ("s", 1e9)
    bars = [bar for row, rank in enumerate(rows) for bar in _bars(row, step_trace.pieces[rank], zero, scale)]
    used = plotting.draw_gantt(axes, bars, STYLES)
    path = _path(axes, drawn.links, rows, zero, scale)
    axes.set_xlim(0, (end - zero) / scale)
    plotting.label_rows(axes, [f"rank {rank}" for rank in rows])
    axes.set_xlabel(f"time in the step ({unit})")
    left_out = len(step_trace.timeline.lines) - len(rows)
    title = f"{trace.run_dir.name}, step {drawn.step}: {drawn.took_ns / scale:.4g} {unit}"
    axes.set_title(title + (f" ({left_out} ranks not drawn)" if left_out else ""), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [*plotting.kind_handles(used, STYLES, MEANINGS), path]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    plotting.save(figure, file)
    return drawn.step


def _rows(trace: Trace, links: Sequence[PathSegment]) -> list[int]:
    ranks = sorted(trace.timeline.lines)
    if len(ranks) <= ROWS:
        return ranks
    weight: dict[int, int] = defaultdict(int)
    for link in links:
        weight[link.rank] += 1000 * link.took_ns
    for (rank, by), ns in trace.waits.items():
        weight[rank] += ns
        weight[by] += ns
    return sorted(sorted(ranks, key=lambda rank: -weight[rank])[:ROWS])


def _bars(row: int, pieces: Sequence[TimelinePiece], zero: int, scale: float) -> Iterator[GanttBar]:
    for piece in pieces:
        edges_ns = (piece.begin_ns, piece.begin_ns + piece.waited_ns, piece.end_ns)
        begin, works, end = ((ns - zero) / scale for ns in edges_ns)
        if works > begin:
            yield GanttBar(row, begin, works, "waits")
        if end > works:
            yield GanttBar(row, works, end, _kind(piece))


def _kind(piece: TimelinePiece) -> str:
    if piece.phase != "compute":
        return piece.phase
    first = piece.name.partition("_")[0].lower()
    return first if first in ("forward", "backward") and " to " not in piece.name else "compute"


def _path(axes: Any, links: Sequence[PathSegment], rows: Sequence[int], zero: int, scale: float) -> Any:
    heights = {rank: number + 0.44 for number, rank in enumerate(rows)}
    xs: list[float] = []
    ys: list[float] = []
    for number, link in enumerate(links):
        if link.rank not in heights:
            continue
        # A transfer begins on the previous rank of the path.
        source = links[number - 1].rank if link.travels and number else link.rank
        xs += [(link.begin_ns - zero) / scale, (link.end_ns - zero) / scale]
        ys += [heights.get(source, heights[link.rank]), heights[link.rank]]
    return axes.plot(xs, ys, color=_PATH, linewidth=1.4, solid_capstyle="round", zorder=3, label="critical path")[0]
