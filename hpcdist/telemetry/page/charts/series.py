"""Series of charts: decimate long ones without losing extremes, smooth and bin them, and label axes over steps.

The charts share these helpers: the step axis, marks of resumes, and stacked areas.
"""

import itertools
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.telemetry.metrics.observations import ObservedSeries
from hpcdist.telemetry.metrics.sampling import SampledMetrics
from hpcdist.telemetry.page.charts import style as draw
from hpcdist.telemetry.page.run_data import PageData

POINTS: Final = 2000  # of a line
BINS: Final = 400  # of areas and pictures


def decimate(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `POINTS` points of a line, both (n,): of each part its lowest and its highest, in their order.

    Extremes stay what and where they are, and so do the first and the last point. NaN is a gap: a part without any
    number keeps one of its NaN.
    """
    if len(x) <= POINTS:
        return x, y
    parts = (POINTS - 2) // 2
    edges = np.linspace(0, len(x), parts + 1).astype(np.int64)
    starts, part = edges[:-1], np.repeat(np.arange(parts), np.diff(edges))
    known = np.isfinite(y)
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    indices = [np.array([0, len(x) - 1])]
    for extreme in (low, high):
        at = np.flatnonzero(known & (y == extreme[part]))
        _, first = np.unique(part[at], return_index=True)
        indices.append(at[first])
    indices.append(starts[~np.isfinite(low)])
    chosen = np.unique(np.concatenate(indices))
    return x[chosen], y[chosen]


def bin_edges(x: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return where each of at most ``bins`` parts of the rows of ``x`` (n,) begins, and n."""
    return np.unique(np.linspace(0, len(x), min(bins, len(x)) + 1).astype(np.int64))


def means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean over the rows of each part, NaN left out: (n,) -> (parts,), (n, ranks) -> (parts, ranks)."""
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges[:-1], axis=0)
    count = np.add.reduceat(known.astype(np.float64), edges[:-1], axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def medians(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the median over the rows of each part, NaN left out; shapes as `means`."""
    return np.array([median(values[start:stop]) for start, stop in itertools.pairwise(edges)])


def median(values: np.ndarray) -> np.ndarray:
    """Return the median over the first dim, NaN left out and without a warning where there is nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=0))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over the last ``window`` values that are numbers; at the begin, of those there are."""
    if window <= 1 or not len(values):
        return values
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    number = count[stop] - count[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)


MAX_RESUMES: Final = 40  # that are marked: more would hide everything else


def observed_by_label(data: PageData, name: str) -> dict[str, ObservedSeries]:
    """Return the observed series of the quantity ``name`` by label."""
    observed: Mapping[str, ObservedSeries] = {} if data.run is None else data.run.observed.series
    labelled = {
        key: series
        for key, series in observed.items()
        if key.startswith(f"{name}[") and np.isfinite(series.value).any()
    }
    return {key.removeprefix(f"{name}[").removesuffix("]"): series for key, series in labelled.items()}


def stack_observed(axes: Any, parts: Mapping[str, ObservedSeries]) -> None:
    """Stack series that were observed at different steps: each at the steps of all, with its last value."""
    at = np.unique(np.concatenate([series.step for series in parts.values()]))
    at = decimate(at, at.astype(float))[0]
    areas = {}
    for name, series in sorted(parts.items(), key=lambda pair: -float(np.nanmax(pair[1].value))):
        seen = np.searchsorted(series.step, at, side="right") - 1
        areas[name] = np.where(seen >= 0, series.value[np.maximum(seen, 0)], 0.0)
    colours = {name: draw.CYCLE[index % len(draw.CYCLE)] for index, name in enumerate(areas)}
    stack_areas(axes, at, areas, colours)


def stack_areas(axes: Any, at: np.ndarray, parts: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Stack ``parts`` (points,) over the points ``at``; NaN adds nothing."""
    shown = {name: np.nan_to_num(part) for name, part in parts.items() if np.nansum(part) > 0}
    if len(at) == 1:  # one point has no area
        at, shown = np.array([at[0] - 0.5, at[0] + 0.5]), {name: np.repeat(part, 2) for name, part in shown.items()}
    if shown:
        axes.stackplot(
            at, *shown.values(), labels=list(shown), colors=[colours[name] for name in shown], alpha=0.85, linewidth=0
        )


def mark_resumes(axes: Any, data: PageData, from_step: int = 0) -> None:
    """Mark the first step of each later start, unless there are more than `MAX_RESUMES`."""
    marked = [step for step in data.sessions if step >= from_step]
    for step in marked if len(marked) <= MAX_RESUMES else ():
        axes.axvline(step, color=draw.MUTED, linewidth=0.7, alpha=0.8, linestyle=(0, (4, 3)))


def label_step_axis(axes: Any, what: str) -> None:
    """Label the axes of a chart of ``what`` over steps."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(what)
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    low, high = axes.get_xlim()
    if high - low < 1:  # one step: no fractions of it
        middle = round((low + high) / 2)
        axes.set_xlim(middle - 0.6, middle + 0.6)
        for line in axes.get_lines():
            if len(line.get_xdata()) == 1:
                line.set_marker("o")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    draw.format_thousands(axes.xaxis)


def rows_note(run: SampledMetrics) -> str:
    """Return a note on the rows that a chart is drawn from, "" where from all."""
    if run.complete:
        return ""
    return f"From {len(run.chosen):,} of {len(run.steps['step']):,} steps, spread evenly."


def format_value(value: float | None, form: str = "{:.4f}") -> str:
    """Return ``value`` as text, "not measured" for None."""
    return "not measured" if value is None else form.format(value)
