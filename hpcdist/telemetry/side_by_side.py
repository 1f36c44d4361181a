"""Several runs next to each other: a table of their figures, the differences between two runs, and one plot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.table import aligned, text_of
from hpcdist.telemetry.metrics.run_figures import FIGURES
from hpcdist.telemetry.page.run_data import RunData

MAX_PLOTTED_RUNS: Final = 10  # more runs cannot be told apart in one plot
PLOTTED: Final = ("step_s_median", "peak_bytes_total", "moved_bytes_per_step")  # figures drawn as bars
PLOT_INCHES: Final = (10.0, 4.5)


def _names(runs: Sequence[RunData]) -> list[str]:
    parts = [run.run_dir.absolute().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError("a run is given twice; give each run once")


def catalogue(runs: Sequence[RunData], *, details: bool = True) -> Catalogue[RunData]:
    """Return the `Catalogue` of columns to compare ``runs``. Keyword-only ``details`` False: omit detailed figures."""
    names = {run.run_dir: name for run, name in zip(runs, _names(runs), strict=True)}
    name: Figure[RunData] = Figure("run", lambda run: names[run.run_dir], meaning="last parts of the run directory")
    return Catalogue(name, *(figure for figure in FIGURES if details or not figure.is_detail))


def table(runs: Sequence[RunData]) -> tuple[list[list[str]], list[str]]:
    """Return two lists: the rows of a table of ``runs``, headings first, and notes about unknown values.

    Columns without a value and counters that are 0 in all runs are omitted.
    """
    figures = catalogue(runs, details=False)
    shown = [figure for figure in figures.figures if any(figure.value(run) not in (None, 0) for run in runs)]
    return Catalogue(*shown).rows(runs), figures.missing(runs)


def text(runs: Sequence[RunData]) -> str:
    """Return a table with one line per run, followed by the reasons why values are unknown."""
    rows, notes = table(runs)
    return "\n".join([*aligned(rows, left=(0, 1)), *([""] if notes else []), *notes])


def comparison(before: RunData, after: RunData) -> list[dict[str, Any]]:
    """Return one dict per figure with its name, its values in two runs and their ratio. Unknown values are None."""
    rows = []
    for figure in FIGURES:
        old, new = figure.value(before), figure.value(after)
        is_ratio = not figure.is_fact and isinstance(old, int | float) and isinstance(new, int | float) and old
        rows.append({"figure": figure.name, "before": old, "after": new, "ratio": new / old if is_ratio else None})
    return [row for row in rows if not row["before"] is row["after"] is None]


def comparison_text(before: RunData, after: RunData, keys: Mapping[str, tuple[str, str]]) -> str:
    """Return two tables as text: figures of two runs, and differing recipe ``keys`` with both values."""
    names, figures = _names([before, after]), {figure.name: figure for figure in FIGURES}
    rows = [["", *names, "ratio"]]
    for row in comparison(before, after):
        figure = figures[row["figure"]]
        if not figure.is_counter or row["before"] or row["after"]:
            rows.append([figure.heading, figure.text(before), figure.text(after), text_of(row["ratio"], ".3f")])
    lines = aligned(rows)
    if keys:
        lines += ["", *aligned([["recipe", *names], *([key, *values] for key, values in keys.items())], left=(0, 1, 2))]
    return "\n".join(lines)


def draw(picture: Any, runs: Sequence[RunData]) -> None:
    """Draw the losses of ``runs`` over their steps into the figure ``picture``, and bars of time, memory and bytes.

    Raises UsageError for more than `MAX_PLOTTED_RUNS` runs, and for a run without steps.
    """
    if len(runs) > MAX_PLOTTED_RUNS:
        raise UsageError(f"a plot of {len(runs)} runs cannot be read; give at most {MAX_PLOTTED_RUNS}")
    names = _names(runs)
    grid = picture.add_gridspec(len(PLOTTED), 2, width_ratios=(3, 2))
    losses, colours = (
        picture.add_subplot(grid[:, 0]),
        [plotting.CYCLE[n % len(plotting.CYCLE)] for n in range(len(runs))],
    )
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run.run is None:
            raise UsageError(f"{run.run_dir}: no step was completed, so there is nothing to plot")
        width = 1.5 + 2 * (len(runs) - index - 1)  # equal curves stay visible
        losses.plot(run.run.steps["step"], run.run.steps["loss"], color=colours[index], label=name, linewidth=width)
    losses.set_xlabel("step")
    losses.set_ylabel("training loss")
    losses.legend()
    for row, figure in enumerate(figure for figure in FIGURES if figure.name in PLOTTED):
        axes = picture.add_subplot(grid[row, 1])
        values = [figure.value(run) or 0.0 for run in runs]
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, [figure.text(run) for run in runs], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * max([*filter(math.isfinite, values), 1e-9]))
        axes.set_xticks([])
        axes.set_title(figure.heading, fontsize=9, loc="left")


def plot(runs: Sequence[RunData], file: Path) -> None:
    """Plot the comparison of ``runs`` to ``file``. Raises UsageError, StorageError and MissingCapabilityError."""
    plotting.check_plot(file)
    with plotting.chart_style(), plotting.drawing(file, *PLOT_INCHES) as picture:
        draw(picture, runs)
