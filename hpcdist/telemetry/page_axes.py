"""What the charts of a page have in common: steps along the bottom, resumes, areas that are stacked."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.telemetry import page_draw as draw
from hpcdist.telemetry import series
from hpcdist.telemetry.observations import Series
from hpcdist.telemetry.page_data import PageData
from hpcdist.telemetry.sampled import Run

MOST_RESUMES: Final = 40  # that are marked: more would hide everything else


def labelled(data: PageData, name: str) -> dict[str, Series]:
    """Return what was observed of ``name`` by label."""
    observed: Mapping[str, Series] = {} if data.run is None else data.run.observed.series
    found = {key: one for key, one in observed.items() if key.startswith(f"{name}[") and np.isfinite(one.value).any()}
    return {key.removeprefix(f"{name}[").removesuffix("]"): one for key, one in found.items()}


def stacked_over(axes: Any, parts: Mapping[str, Series]) -> None:
    """Stack what was seen at different steps: each at the steps of all, as it was seen last."""
    at = np.unique(np.concatenate([one.step for one in parts.values()]))
    at = series.decimate(at, at.astype(float))[0]
    found = {}
    for name, one in sorted(parts.items(), key=lambda pair: -float(np.nanmax(pair[1].value))):
        seen = np.searchsorted(one.step, at, side="right") - 1
        found[name] = np.where(seen >= 0, one.value[np.maximum(seen, 0)], 0.0)
    colours = {name: draw.CYCLE[index % len(draw.CYCLE)] for index, name in enumerate(found)}
    stacked(axes, at, found, colours)


def stacked(axes: Any, at: np.ndarray, parts: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Stack ``parts`` (points,) over the points ``at``; NaN adds nothing."""
    shown = {name: np.nan_to_num(part) for name, part in parts.items() if np.nansum(part) > 0}
    if len(at) == 1:  # one point has no area
        at, shown = np.array([at[0] - 0.5, at[0] + 0.5]), {name: np.repeat(part, 2) for name, part in shown.items()}
    if shown:
        axes.stackplot(
            at, *shown.values(), labels=list(shown), colors=[colours[name] for name in shown], alpha=0.85, linewidth=0
        )


def sessions(axes: Any, data: PageData, from_step: int = 0) -> None:
    """Mark where a start went on after another, unless there are so many that nothing else would show."""
    marked = [step for step in data.sessions if step >= from_step]
    for step in marked if len(marked) <= MOST_RESUMES else ():
        axes.axvline(step, color=draw.MUTED, linewidth=0.7, alpha=0.8, linestyle=(0, (4, 3)))


def over_steps(axes: Any, what: str) -> None:
    """Let the chart be of ``what`` over steps."""
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
    draw.thousands(axes.xaxis)


def mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the ranks that know, (steps, ranks) -> (steps,)."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    return np.where(count > 0, np.where(known, values, 0).sum(axis=1) / np.maximum(count, 1), np.nan)


def of_rows(run: Run) -> str:
    """Return which rows a chart is from, "" where from all."""
    if run.complete:
        return ""
    return f"From {len(run.chosen):,} of {len(run.steps['step']):,} steps, spread evenly."


def said(value: float | None, form: str = ".4f") -> str:
    """Return ``value`` in words that tell where there is none."""
    return "not measured" if value is None else format(value, form)
