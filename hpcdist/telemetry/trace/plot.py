"""Plot of one step: a row for each rank with what it did, and the critical path through all of them.

Colours differ in brightness as well as in hue, so that they can be told apart in greyscale.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.telemetry.trace import summary as traces
from hpcdist.telemetry.trace.critical_path import PathSegment
from hpcdist.telemetry.trace.summary import Trace
from hpcdist.telemetry.trace.timeline import TimelinePiece

ROWS: Final = 32  # ranks in a picture: of more, those on the critical path and those that waited most are drawn
COLOURS: Final = {
    "forward": "#b9d6ea",
    "backward": "#6ba3cf",
    "compute": "#8fb8d4",
    "update": "#2f6690",
    "communication": "#f2a65a",
    "waits": "#fbe3cb",
    "data": "#8ab17d",
    "checkpoint": "#6d597a",
    "validation": "#b56576",
    "other": "#d9d9d9",
}
MEANINGS: Final = {
    "forward": "forward",
    "backward": "backward",
    "compute": "computes",
    "update": "update",
    "communication": "communication",
    "waits": "waits for another rank",
    "data": "waits for data",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "other": "between operations",
}
_WIDE: Final = 14.0  # inches
_PATH: Final = "#222222"


def check(file: Path) -> None:
    """Raise MissingCapabilityError, UsageError or StorageError where ``file`` cannot be drawn (local)."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise MissingCapabilityError(f"plots need matplotlib: pip install 'hpcdist[analysis]' ({error})") from error
    known = figure.Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise UsageError(f"{file}: matplotlib writes no such files; choose an ending from {', '.join(sorted(known))}")
    if not file.absolute().parent.is_dir():
        raise StorageError(f"{file}: cannot be written: there is no folder {file.absolute().parent}")


def draw(trace: Trace, file: Path) -> int:
    """Draw the step whose critical path is of middle length into ``file``, and return its number.

    Raises UsageError where the trace has no whole step, and what `check` raises.
    """
    check(file)
    if not trace.paths:
        raise UsageError(f"{trace.run_dir}: there is no whole step to draw")
    drawn = sorted(trace.paths, key=lambda path: path.took_ns)[(len(trace.paths) - 1) // 2]
    step_trace = traces.of_step(trace, drawn.step)
    rows = _rows(step_trace, drawn.links)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDE, 1.6 + 0.34 * max(3, len(rows))), layout="constrained")
    axes = figure.subplots()
    zero = min(line.steps[drawn.step][0] for line in step_trace.timeline.lines.values())
    end = max(line.steps[drawn.step][1] for line in step_trace.timeline.lines.values())
    unit, scale = ("ms", 1e6) if end - zero < 10_000_000_000 else ("s", 1e9)
    used = _bars(axes, {rank: step_trace.pieces[rank] for rank in rows}, rows, zero, scale)
    _path(axes, drawn.links, rows, zero, scale)
    axes.set_xlim(0, (end - zero) / scale)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in rows], fontsize=8)
    axes.set_xlabel(f"time in the step ({unit})")
    left_out = len(step_trace.timeline.lines) - len(rows)
    title = f"{trace.run_dir.name}, step {drawn.step}: {drawn.took_ns / scale:.4g} {unit}"
    axes.set_title(title + (f" ({left_out} ranks not drawn)" if left_out else ""), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(figure, used)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error
    return drawn.step


def _rows(trace: Trace, links: Sequence[PathSegment]) -> list[int]:
    """Return the ranks to draw, ascending."""
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


def _bars(
    axes: Any, pieces: dict[int, Sequence[TimelinePiece]], rows: Sequence[int], zero: int, scale: float
) -> list[str]:
    """Draw the pieces, and return the kinds that occur in the order of `COLOURS`."""
    bars: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for place, rank in enumerate(rows):
        for piece in pieces[rank]:
            waited = piece.waited_ns
            begin = piece.begin_ns - zero
            if waited:
                bars["waits", place].append((begin / scale, waited / scale))
            if piece.end_ns > piece.begin_ns + waited:
                bars[_kind(piece), place].append(
                    ((begin + waited) / scale, (piece.end_ns - zero - begin - waited) / scale)
                )
    for (kind, place), spans in bars.items():
        edge = {"edgecolor": "white", "linewidth": 0.3} if len(spans) < 200 else {"linewidth": 0.0}
        axes.broken_barh(spans, (place - 0.38, 0.76), facecolor=COLOURS[kind], **edge)
    kinds = {kind for kind, _ in bars}
    return [kind for kind in COLOURS if kind in kinds]


def _kind(piece: TimelinePiece) -> str:
    """Return the kind of a piece, a key of `COLOURS`."""
    if piece.phase != "compute":
        return piece.phase
    first = piece.name.partition("_")[0].lower()
    return first if first in ("forward", "backward") and " to " not in piece.name else "compute"


def _path(axes: Any, links: Sequence[PathSegment], rows: Sequence[int], zero: int, scale: float) -> None:
    """Draw the critical path below the middle of the rows it goes through; a jump is a line to the other row."""
    place = {rank: number + 0.44 for number, rank in enumerate(rows)}
    xs: list[float] = []
    ys: list[float] = []
    for number, link in enumerate(links):
        if link.rank not in place:
            continue
        # A transfer begins on the rank from which the path comes.
        source = links[number - 1].rank if link.travels and number else link.rank
        xs += [(link.begin_ns - zero) / scale, (link.end_ns - zero) / scale]
        ys += [place.get(source, place[link.rank]), place[link.rank]]
    axes.plot(xs, ys, color=_PATH, linewidth=1.4, solid_capstyle="round", zorder=3)


def _legend(figure: Any, used: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLOURS[kind], label=MEANINGS[kind]) for kind in used]
    handles.append(Line2D([], [], color=_PATH, linewidth=1.4, label="critical path"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
