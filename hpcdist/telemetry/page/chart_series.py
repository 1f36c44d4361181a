"""Series of charts: decimate, smooth and bin long series, and draw step axes, resume marks and stacked areas."""

import itertools
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.reporting import plotting as draw
from hpcdist.telemetry.metrics.observations import ObservedSeries
from hpcdist.telemetry.metrics.side_tables import SampledMetrics
from hpcdist.telemetry.page.run_data import RunData

POINTS: Final = 2000  # largest number of points of a line
BINS: Final = 400  # largest number of bins of an area


def decimate(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) with at most `POINTS` points of a line, including the extremes of ``y`` in equal intervals."""
    if len(x) <= POINTS:
        return x, y
    parts = (POINTS - 2) // 2
    edges = np.linspace(0, len(x), parts + 1).astype(np.int64)
    starts, part = edges[:-1], np.repeat(np.arange(parts), np.diff(edges))
    finite = np.isfinite(y)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    indices = [np.array([0, len(x) - 1])]
    for extreme in (low, high):
        at = np.flatnonzero(finite & (y == extreme[part]))
        _, first = np.unique(part[at], return_index=True)
        indices.append(at[first])
    indices.append(starts[~np.isfinite(low)])
    chosen = np.unique(np.concatenate(indices))
    return x[chosen], y[chosen]


def bin_edges(x: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Split the rows of ``x`` into up to ``bins`` equal bins. Return an array: first row of each bin, then len(x)."""
    return np.unique(np.linspace(0, len(x), min(bins, len(x)) + 1).astype(np.int64))


def means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return an array with the mean of the rows in each bin, ignoring NaN. ``edges``: result of `bin_edges`."""
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges[:-1], axis=0)
    count = np.add.reduceat(finite.astype(np.float64), edges[:-1], axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def medians(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return an array of shape (bins, columns) with the median per bin and column. ``edges``: from `bin_edges`."""
    return np.array([median(values[start:stop]) for start, stop in itertools.pairwise(edges)])


def median(values: np.ndarray) -> np.ndarray:
    """Return the median over the first dimension, ignoring NaN. The median of only NaN is NaN, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=0))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return an array with the mean of the last ``window`` values up to each element of ``values``, ignoring NaN."""
    if window <= 1 or not len(values):
        return values
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    number = count[stop] - count[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)


MAX_RESUMES: Final = 40  # with more resumes, none is marked


def observed_by_label(data: RunData, name: str) -> dict[str, ObservedSeries]:
    """Return a dict {label: recorded values} of the metric ``name``. A GPU number is an example of a label."""
    observed: Mapping[str, ObservedSeries] = {} if data.run is None else data.run.observed.series
    labelled = {
        key: series
        for key, series in observed.items()
        if key.startswith(f"{name}[") and np.isfinite(series.value).any()
    }
    return {key.removeprefix(f"{name}[").removesuffix("]"): series for key, series in labelled.items()}


def stack_observed(axes: Any, parts: Mapping[str, ObservedSeries]) -> None:
    """Draw the series ``parts`` on ``axes`` as stacked areas. Each value holds until the next recorded value."""
    at = np.unique(np.concatenate([series.step for series in parts.values()]))
    at = decimate(at, at.astype(float))[0]
    areas = {}
    for name, series in sorted(parts.items(), key=lambda pair: -float(np.nanmax(pair[1].value))):
        seen = np.searchsorted(series.step, at, side="right") - 1
        areas[name] = np.where(seen >= 0, series.value[np.maximum(seen, 0)], 0.0)
    colours = {name: draw.CYCLE[index % len(draw.CYCLE)] for index, name in enumerate(areas)}
    stack_areas(axes, at, areas, colours)


def stack_areas(axes: Any, at: np.ndarray, parts: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Draw the areas ``parts`` on ``axes``, stacked on each other. NaN counts as 0.

    ``parts``: dict {name: array of y values}. ``at``: array of x values. ``colours``: dict {name: colour}.
    """
    shown = {name: np.nan_to_num(part) for name, part in parts.items() if np.nansum(part) > 0}
    if len(at) == 1:  # one point has no area
        at, shown = np.array([at[0] - 0.5, at[0] + 0.5]), {name: np.repeat(part, 2) for name, part in shown.items()}
    if shown:
        axes.stackplot(
            at, *shown.values(), labels=list(shown), colors=[colours[name] for name in shown], alpha=0.85, linewidth=0
        )


def mark_resumes(axes: Any, data: RunData, from_step: int = 0) -> None:
    """Draw a vertical line on ``axes`` at the first step of each resume of the run ``data``.

    Skip resumes before step ``from_step``. Draw no line if there are more than `MAX_RESUMES` resumes.
    """
    marked = [step for step in data.sessions if step >= from_step]
    for step in marked if len(marked) <= MAX_RESUMES else ():
        axes.axvline(step, color=draw.MUTED, linewidth=0.7, alpha=0.8, linestyle=(0, (4, 3)))


def label_step_axis(axes: Any, y_label: str) -> None:
    """Label the x axis with "step" and the y axis with ``y_label``."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(y_label)
    axes.set_xlabel("step")
    axes.margins(x=0.01)
    low, high = axes.get_xlim()
    if high - low < 1:  # a single step: avoid fractional ticks
        middle = round((low + high) / 2)
        axes.set_xlim(middle - 0.6, middle + 0.6)
        for line in axes.get_lines():
            if len(line.get_xdata()) == 1:
                line.set_marker("o")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    draw.format_thousands(axes.xaxis)


def rows_note(run: SampledMetrics) -> str:
    """Return a note for charts that show only some steps of ``run``, or "" if charts show all steps."""
    if run.complete:
        return ""
    return f"From {len(run.chosen):,} of {len(run.steps['step']):,} steps, spread evenly."


def format_value(value: float | None, form: str = "{:.4f}") -> str:
    """Return ``value`` as text, formatted with the format string ``form``. None gives "not measured"."""
    return "not measured" if value is None else form.format(value)
