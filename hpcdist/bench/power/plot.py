"""Picture of time against energy: configurations with their intervals, the Pareto front, and the choice."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.power import pareto
from hpcdist.bench.power.pareto import BEHIND, EstimateInterval, ParetoCandidate
from hpcdist.bench.power.report import DEVICES, PowerReport
from hpcdist.errors import UsageError
from hpcdist.reporting.plotting import drawing

_TOKENS: Final = 1e6
_FRONT: Final = "#1f6f8b"
_BEHIND: Final = "#a9b0b7"
_CHOSEN: Final = "#d1495b"
_INK: Final = "#2b2f36"
_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_CHARACTER: Final = 7.5  # pixels of a character of a name, about
_LINE: Final = 14.0  # and of its height
_BESIDE: Final = 8.0  # between a point and its name
_PRODUCTS: Final = 4  # curves of equal energy-delay product


def plot(report: PowerReport, file: Path) -> None:
    """Draw seconds against joules of a million tokens.

    Bars are 95 % intervals; the line is the front, and what lies to the right of it and above is beaten by it. Grey
    curves have the same energy-delay product everywhere. Raises MissingCapabilityError without matplotlib, UsageError
    where nothing has both time and energy, and StorageError when the file cannot be written.
    """
    if not report.candidates:
        raise UsageError("no configuration has both time and energy, so there is nothing to draw")
    verdicts = pareto.verdicts(report.candidates)
    joules = [_of(candidate, "energy") for candidate in report.candidates]
    scale, prefix = _prefix([value.value for value in joules])
    seconds = [_of(candidate, "time") for candidate in report.candidates]
    with drawing(file, 8.5, 6.0) as figure:
        axes = figure.subplots()
        _style(axes)
        points = [(time.value, energy.value / scale) for time, energy in zip(seconds, joules, strict=True)]
        _frame(axes, seconds, joules, scale)
        _curves(axes)
        _front(axes, [point for point, verdict in zip(points, verdicts, strict=True) if verdict == pareto.FRONT])
        for n, candidate in enumerate(report.candidates):
            colour = _CHOSEN if candidate.name == report.chosen.name else _BEHIND if verdicts[n] == BEHIND else _FRONT
            _bars(axes, seconds[n], joules[n], scale, colour)
            marker = "*" if candidate.name == report.chosen.name else "o"
            size = 220 if marker == "*" else 55
            hollow = verdicts[n] == pareto.NEAR and marker == "o"
            axes.scatter(*points[n], s=size, marker=marker, zorder=4, linewidths=1.5, edgecolors=colour,
                         facecolors="white" if hollow else colour)  # fmt: skip
        axes.set_xlabel("time of a million tokens (s)")
        axes.set_ylabel(f"energy of a million tokens ({prefix}J)")
        _legend(axes, report, verdicts)
        _titles(axes, report)
        figure.draw_without_rendering()  # which settles where the points are
        _names(axes, points, [candidate.name for candidate in report.candidates])


def _of(candidate: ParetoCandidate, what: str) -> EstimateInterval:
    interval = pareto.estimate(list(candidate.objective(what).values()))
    return EstimateInterval(interval.value * _TOKENS, interval.low * _TOKENS, interval.high * _TOKENS)


def _prefix(values: Sequence[float]) -> tuple[float, str]:
    return next((pair for pair in _PREFIXES if max(values) >= pair[0]), _PREFIXES[-1])


def _style(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8a9099")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _frame(axes: Any, seconds: Sequence[EstimateInterval], joules: Sequence[EstimateInterval], scale: float) -> None:
    """Leave room around all points, and around the bars of those that are not absurdly unsure."""
    for setter, values, unit in ((axes.set_xlim, seconds, 1.0), (axes.set_ylim, joules, scale)):
        low, high = min(value.value for value in values) / unit, max(value.value for value in values) / unit
        room = max(0.12 * (high - low), 0.02 * high)
        ends = [end / unit for value in values for end in (value.low, value.high) if not math.isnan(end)]
        low = max(min([low, *ends]), low - 4 * room)
        high = min(max([high, *ends]), high + 4 * room)
        setter(max(0.0, low - room), high + 1.6 * room)


def _curves(axes: Any) -> None:
    """Draw curves of equal energy-delay product across the picture."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    x = np.linspace(max(left, 1e-12 * right), right, 200)
    for product in np.linspace(left * bottom, right * top, _PRODUCTS + 2)[1:-1]:
        axes.plot(
            x, product / x, color="#d9dce0", linewidth=0.9, linestyle=(0, (4, 4)), zorder=1, scalex=False, scaley=False
        )


def _front(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Draw the front as the steps between what is possible and what is not, to the edges of the picture."""
    ordered = sorted(points)
    x = [ordered[0][0], *(time for time, _ in ordered), axes.get_xlim()[1]]
    y = [axes.get_ylim()[1], *(energy for _, energy in ordered), ordered[-1][1]]
    axes.step(x, y, where="post", color=_FRONT, linewidth=1.6, alpha=0.75, zorder=2, scalex=False, scaley=False)
    axes.fill_between(x, y, axes.get_ylim()[1], step="post", color=_FRONT, alpha=0.05, zorder=0, linewidth=0)


def _bars(axes: Any, time: EstimateInterval, energy: EstimateInterval, scale: float, colour: str) -> None:
    if math.isnan(time.high):
        return
    axes.errorbar(
        time.value,
        energy.value / scale,
        xerr=[[time.value - time.low], [time.high - time.value]],
        yerr=[[(energy.value - energy.low) / scale], [(energy.high - energy.value) / scale]],
        fmt="none",
        ecolor=colour,
        elinewidth=1.0,
        capsize=2.5,
        alpha=0.5,
        zorder=3,
    )


def _names(axes: Any, points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """Write each name beside its point: on the first of four sides where neither a point nor a name is yet."""
    places = axes.transData.transform(np.array(points))
    frame = axes.get_window_extent()
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in places]
    for (x, y), point, name in zip(places, points, names, strict=True):
        width = _CHARACTER * len(name)
        sides = [(right, above) for above in (True, False) for right in (True, False)]
        boxes = [_box(x, y, width, *side) for side in sides]
        inside = [frame.x0 <= box[0] and box[2] <= frame.x1 for box in boxes]
        trouble = [
            (not fits) * 10 + sum(_meet(box, other) for other in taken) for box, fits in zip(boxes, inside, strict=True)
        ]
        best = trouble.index(min(trouble))
        taken.append(boxes[best])
        right, above = sides[best]
        axes.annotate(
            name,
            point,
            xytext=(_BESIDE if right else -_BESIDE, _BESIDE if above else -_BESIDE),
            textcoords="offset pixels",
            ha="left" if right else "right",
            va="bottom" if above else "top",
            fontsize=9,
            color=_INK,
            zorder=5,
        )


def _box(x: float, y: float, width: float, right: bool, above: bool) -> tuple[float, float, float, float]:
    left = x + _BESIDE if right else x - _BESIDE - width
    bottom = y + _BESIDE if above else y - _BESIDE - _LINE
    return left, bottom, left + width, bottom + _LINE


def _meet(box: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _legend(axes: Any, report: PowerReport, verdicts: Sequence[str]) -> None:
    """Explain the marks that are there."""
    from matplotlib.lines import Line2D

    def mark(text: str, colour: str, marker: str, inside: str | None = None, size: float = 7) -> Any:
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": size, "linestyle": "none"}
        return Line2D([], [], label=text, markerfacecolor=inside or colour, **style)

    kinds = [mark("on the Pareto front", _FRONT, "o")]
    if pareto.NEAR in verdicts:
        kinds.append(mark("beaten, but within the noise", _FRONT, "o", "white"))
    if BEHIND in verdicts:
        kinds.append(mark("beaten in time and energy", _BEHIND, "o"))
    if report.chosen.name:
        kinds.append(mark("recommended", _CHOSEN, "*", size=13))
    kinds.append(Line2D([], [], color="#c9cdd2", linestyle=(0, (4, 4)), label="equal energy-delay product"))
    axes.legend(handles=kinds, fontsize=8.5, frameon=True, framealpha=0.9, edgecolor="#e6e8eb", loc="upper right")


def _titles(axes: Any, report: PowerReport) -> None:
    devices = report.provenance.get(DEVICES, "") or report.provenance.get("processor", "")
    counts = {row.ok for row in report.rows if row.ok}
    repeats = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    bars = "; bars are 95 % intervals" if max(counts) > 1 else ""
    axes.set_title("Time against energy", loc="left", fontsize=13, color=_INK, pad=24)
    subtitle = f"{_short(devices, 80)}; {repeats} repeat{'s' * (max(counts) > 1)}{bars}"
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=9, color="#5c636d")


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
