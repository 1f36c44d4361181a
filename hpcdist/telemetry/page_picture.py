"""The picture of one step: what each rank did when."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.sizes import counted
from hpcdist.comm.spanfile import Span
from hpcdist.telemetry import page_draw as draw
from hpcdist.telemetry.page_data import PageData
from hpcdist.telemetry.page_draw import Chart
from hpcdist.telemetry.page_timeline import Lane, Timeline

HEIGHT: Final = 0.72  # of a lane
NAMED: Final = 0.014  # share of the step that a span must take to be numbered
JOINED: Final = 0.004  # share of the step between two spans of one micro-batch that are one
BACKWARD: Final = "BACKWARD"  # begins the names of backward operations: paler than forward


def timeline(data: PageData) -> Chart:
    """Return the chart of a step."""
    found, title = data.timeline, "Timeline of a step"
    if not found.lanes:
        return Chart("timeline", title, reason=found.reason, wide=True)

    def picture(axes: Any) -> None:
        for row, lane in enumerate(found.lanes):
            _lane(axes, row, lane, found.seconds)
        ticks = np.unique(np.linspace(0, len(found.lanes) - 1, min(len(found.lanes), 16)).round().astype(int))
        axes.set_yticks(ticks, [f"rank {found.lanes[row].rank}" for row in ticks])
        axes.set_ylim(len(found.lanes) - 0.4, -0.6)
        axes.set_xlim(0, found.seconds * 1e3)
        axes.set_xlabel("ms since the first rank began the step")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        _legend(axes, found)

    size = (draw.WIDE[0], float(np.clip(1.1 + 0.3 * len(found.lanes), 1.7, 6.0)))
    totals = ", ".join(f"{phase} {seconds * 1e3:.3g} ms" for phase, seconds in found.totals().items())
    alt = f"Step {found.step}: {len(found.lanes)} ranks over {found.seconds * 1e3:.3g} ms; in the mean {totals}"
    return Chart("timeline", title, draw.drawn("timeline", picture, size), _caption(found), alt, wide=True)


def _caption(found: Timeline) -> str:
    text = f"Step {found.step}, of median length among the last that all ranks have."
    if any(_is_pale(span.name) for lane in found.lanes for _, _, span in lane.spans):
        text += " Pale: backward. Numbers: micro-batches."
    if len(found.lanes) < found.world:
        text += f" {len(found.lanes)} of {counted(found.world, 'rank')}, spread evenly."
    if found.left_out:
        text += f" {found.left_out:,} spans are too short to show."
    return text + (f" Times of different nodes are by {found.clocks}." if found.clocks else "")


def _lane(axes: Any, row: int, lane: Lane, whole_s: float) -> None:
    from matplotlib.collections import PolyCollection

    axes.plot([lane.begin_s * 1e3, lane.end_s * 1e3], [row, row], color=draw.GRID, linewidth=1, zorder=0)
    boxes: dict[tuple[str, bool], list[Any]] = {}
    # What holds others is drawn first, so that they stand before it.
    for begin, end, span in sorted(_merged(lane, JOINED * whole_s), key=lambda spans: spans[0] - spans[1]):
        left, right = max(begin, lane.begin_s) * 1e3, min(end, lane.end_s) * 1e3
        low, high = row - HEIGHT / 2, row + HEIGHT / 2
        box = [(left, low), (right, low), (right, high), (left, high)]
        boxes.setdefault((span.phase, _is_pale(span.name)), []).append(box)
        if span.microbatch >= 0 and span.phase == "compute" and right - left > NAMED * whole_s * 1e3:
            place = ((left + right) / 2, row)
            axes.annotate(
                str(span.microbatch), place, ha="center", va="center_baseline", fontsize=6.5, color=draw.PAPER
            )
    for (phase, pale), own in boxes.items():
        colour = draw.OF_PHASE.get(phase, draw.GREY)
        axes.add_collection(
            PolyCollection(own, facecolors=colour, edgecolors=draw.PAPER, linewidths=0.25, alpha=0.62 if pale else 1.0)
        )


def _merged(lane: Lane, gap_s: float) -> list[tuple[float, float, Span]]:
    """Return the spans of a lane, those that follow each other and do the same as one: units of one forward."""
    found: list[tuple[float, float, Span]] = []
    for begin, end, span in sorted(lane.spans, key=lambda spans: spans[0]):
        if found:
            first, last, before = found[-1]
            same = (before.phase, before.name, before.microbatch) == (span.phase, span.name, span.microbatch)
            if same and span.microbatch >= 0 and -gap_s <= begin - last <= gap_s:
                found[-1] = (first, max(last, end), before)
                continue
        found.append((begin, end, span))
    return found


def _is_pale(name: str) -> bool:
    return name.upper().startswith(BACKWARD)


def _legend(axes: Any, found: Timeline) -> None:
    from matplotlib.patches import Patch

    phases = [phase for phase in draw.OF_PHASE if phase in found.totals()]
    handles = [Patch(color=draw.OF_PHASE[phase], label=phase) for phase in phases]
    axes.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0.0, 1.0))
