"""Plots of the architectures study: scaling, losses, and costs of a step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.architectures.catalogue import COUNTS
from benchmarks.architectures.report import LABELS
from benchmarks.architectures.scaling import PARTS, Found, Point
from hpcdist.reporting.plotting import check_plot, save

BARS: Final = (1024, 16384)
_STYLE: Final = {  # servers red, allreduce blue, ZeRO green, parts of models purple
    "one-server": ("#7f0000", "-"),
    "servers": ("#d7301f", "-"),
    "colocated": ("#fc8d59", "-"),
    "ring": ("#08306b", ":"),
    "rings": ("#08519c", "-"),
    "tree": ("#4292c6", "-"),
    "hierarchical": ("#6baed6", "--"),
    "compressed": ("#17becf", "-."),
    "zero1": ("#00441b", "-"),
    "zero2": ("#238b45", "--"),
    "zero3": ("#74c476", "-"),
    "2d": ("#a6d854", "-."),
    "pipeline": ("#9e7bb5", "--"),
    "3d": ("#54278f", "-"),
}
_COLOURS: Final = {
    "computing": "#c7e9c0",
    "recompute": "#74c476",
    "servers": "#fdae6b",
    "tensor": "#9e9ac8",
    "bubble": "#756bb1",
    "bandwidth": "#3182bd",
    "latency": "#08306b",
    "update": "#bdbdbd",
    "failures": "#de2d26",
}


def plot(result: Sequence[Found], file: Path) -> None:
    """Plot efficiency and losses to ``file``, and costs to a file with "-costs" in its name.

    Raises MissingCapabilityError without matplotlib, and StorageError if a file cannot be written.
    """
    figures = check_plot(file)
    scaling = figures.Figure(figsize=(15, 3.9 * len(result) + 0.9), layout="constrained")
    for row, outcome in zip(scaling.subplots(len(result), 3, squeeze=False), result, strict=True):
        _efficiency(row[0], outcome)
        for axis, count in zip(row[1:], BARS, strict=True):
            _bars(axis, outcome, count)
    _legend(scaling, scaling.axes[0])
    handles = [scaling.axes[1].barh(0, 0, color=_COLOURS[part]) for part in PARTS]
    scaling.legend(handles, PARTS, loc="outside lower center", ncols=len(PARTS), fontsize=9)
    save(scaling, file)
    costs = figures.Figure(figsize=(19, 3.7 * len(result) + 0.9), layout="constrained")
    for row, outcome in zip(costs.subplots(len(result), 4, squeeze=False), result, strict=True):
        for axis, (title, value) in zip(row, _COSTS, strict=True):
            _curves(axis, outcome, value)
            axis.set_yscale("log")
            for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                set_formatter(_plain(axis.yaxis))
            axis.set_title(title, fontsize=9)
        row[0].set_ylabel(outcome.scenario.title.replace(", ", ",\n", 1), fontsize=9)
    _legend(costs, costs.axes[0])
    save(costs, file.with_stem(f"{file.stem}-costs"))


_COSTS: Final[tuple[tuple[str, Callable[[Point], float]], ...]] = (
    ("seconds a step, with saves and failures", lambda point: point.samples / point.goodput),
    ("GB that a device sends a step; dotted: a server", lambda point: point.sent_bytes / 1e9),
    ("GB of memory on the fullest device", lambda point: point.estimate.memory.bytes / 1e9 if point.estimate else 0.0),
    ("J a sample", lambda point: point.joules),
)


def _plain(axis: Any) -> Callable[[float, int], str]:
    """Return a formatter that labels 1, 2 and 5 of every decade, or only powers of 10 over many decades."""

    def text(value: float, _: int) -> str:
        low, high = axis.get_view_interval()
        digit = f"{value:e}"[0]
        few = high / low < 200
        return f"{value:,g}" if digit == "1" or (few and digit in "25") else ""

    return text


def _efficiency(axis: Any, outcome: Found) -> None:
    _curves(axis, outcome, lambda point: 100 * outcome.efficiency(point))
    for name, line in outcome.points.items():
        for point in line:
            if point.devices == outcome.stops[name].last and point.goodput:
                axis.plot([point.devices], [100 * outcome.efficiency(point)], "o", color=_STYLE[name][0], markersize=5)
    axis.axhline(50, color="black", linewidth=0.6, linestyle=":")
    axis.set_ylim(0, 103)
    axis.set_ylabel("goodput a device, % of the best")
    axis.set_title(f"{outcome.scenario.title}\ndots: the last doubling that gave 1.5 times as much", fontsize=9)


def _curves(axis: Any, outcome: Found, value: Callable[[Point], float]) -> None:
    for name, line in outcome.points.items():
        feasible = [point for point in line if point.goodput]
        colour, style = _STYLE[name]
        axis.plot(
            [point.devices for point in feasible],
            [value(point) for point in feasible],
            style,
            color=colour,
            linewidth=1.5,
            label=LABELS[name],
        )
        served = [(point.devices, point.server_bytes / 1e9) for point in feasible if point.server_bytes]
        if served and value is _COSTS[1][1]:
            axis.plot(*zip(*served, strict=True), ":", color=colour, linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xlim(COUNTS[0] * 0.9, COUNTS[-1] * 1.1)
    ticks = COUNTS[::2]
    axis.set_xticks(ticks, [f"{count:,}" for count in ticks], fontsize=7, rotation=30)
    axis.set_xlabel("devices", fontsize=8)
    axis.grid(True, which="major", alpha=0.3)


def _bars(axis: Any, outcome: Found, count: int) -> None:
    points = {name: point for name, line in outcome.points.items() for point in line if point.devices == count}
    names = list(points)
    if not names:
        axis.set_visible(False)
        return
    limit = 4.0  # a longer bar is clipped, and its value is written as text
    for index, name in enumerate(names):
        left = 0.0
        for part in PARTS:
            width = points[name].losses.get(part, 0.0) * outcome.ideal
            axis.barh(index, width, left=left, color=_COLOURS[part])
            left += width
        if left > limit:
            axis.text(limit, index, f"{left:.3g} ", va="center", ha="right", fontsize=7, color="white")
        elif not left:
            axis.text(0, index, f" {points[name].reason}", va="center", fontsize=7)
    axis.set_yticks(range(len(names)), [LABELS[name] for name in names], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, limit)
    axis.set_xlabel("device-seconds a sample, over those of the best", fontsize=8)
    axis.set_title(f"{count:,} devices", fontsize=9)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=7, fontsize=9)
