"""Text reports and plots of a run, and of several runs next to each other."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.constants import METRICS_FILE
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.table import Catalogue, Figure, aligned, markdown, text_of
from hpcdist.reporting.units import counted
from hpcdist.telemetry.metrics import run_figures
from hpcdist.telemetry.metrics.run_figures import FIGURES, figures_of
from hpcdist.telemetry.page import run_data, step_charts
from hpcdist.telemetry.page.run_data import ExternalData, RunData

CURVE_ROWS: Final = 12
BAR_WIDTH: Final = 40
_HEAD: Final = {"started": "created_utc", "layout": "architecture", "commit": "git_commit", "MPI": "mpi_library"}


def report(run_dir: str | Path, external: ExternalData | None = None) -> RunData:
    """Return the data of the run in ``run_dir``, which may be running. Raises StorageError without readable metrics."""
    if not (Path(run_dir) / METRICS_FILE).is_file():
        raise StorageError(f"{run_dir} holds no {METRICS_FILE}; give the --out directory of a training run")
    return run_data.read(Path(run_dir), external)


def text(run: RunData) -> str:
    """Return the report of ``run`` as text: properties of the run, metrics, and a table of the loss."""
    if run.run is None:
        return f"{run.run_dir}: no step was completed"
    figures, sessions = run.figures, run.figures.get("sessions", 1)
    steps = f"{figures['steps']} on {counted(figures['world'], 'rank')}"
    head = {"run": run.run_dir, "strategy": run.setting("parallel.strategy") or figures.get("strategy")}
    head |= {label: figures.get(key) for label, key in _HEAD.items()}
    rows = [(label, str(value)) for label, value in head.items() if value]
    rows.append(("steps", steps + (f" in {sessions} sessions" if sessions > 1 else "")))
    if not run.run.complete:
        sampled = f"{len(run.run.chosen):,} of {len(run.run.steps['step']):,} steps"
        rows.append(("rows", f"times and bytes are from {sampled}, spread evenly"))
    return "\n".join([*run_figures.lines(run, rows), "", *_curve(run.run.steps)])


def _curve(columns: Mapping[str, np.ndarray]) -> list[str]:
    steps, loss = columns["step"], columns["loss"]
    ends = np.unique(np.linspace(0, len(steps), min(CURVE_ROWS, len(steps)) + 1).astype(int))
    means = [float(loss[start:stop].mean()) for start, stop in itertools.pairwise(ends)]
    finite = [mean for mean in means if math.isfinite(mean)]
    loss_per_character = (max(finite) - min(finite)) / BAR_WIDTH if finite else 0.0
    lines = ["    step     loss  learning rate"]
    for stop, mean in zip(ends[1:], means, strict=True):
        bar = (
            "█" * round((mean - min(finite)) / loss_per_character) if loss_per_character and math.isfinite(mean) else ""
        )
        line = f"{steps[stop - 1]:8d} {mean:8.4f} {columns['learning_rate'][stop - 1]:14.3g}  {bar}"
        lines.append(line.rstrip())
    return lines


def plot(run: RunData, file: str | Path) -> None:
    """Plot the loss and the time of each phase over the steps of ``run``. Save to ``file``. Raises HpcdistError."""
    matplotlib = plotting.require_matplotlib()
    if run.run is None:
        raise UsageError(f"{run.run_dir}: no step was completed, so there is nothing to plot")
    with plotting.chart_style():
        figure = matplotlib.Figure(figsize=(8, 7), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        step_charts.draw_loss(above, run)
        step_charts.draw_phases(below, run)
        above.set_xlabel("")
        figure.suptitle(f"{run.name}, {counted(run.world, 'rank')}", fontsize=10)
        plotting.save(figure, file)


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
    """Return a `Catalogue` to compare ``runs``, with one column per metric. ``details``: include detail metrics."""
    names = {run.run_dir: name for run, name in zip(runs, _names(runs), strict=True)}
    name: Figure[RunData] = Figure("run", lambda run: names[run.run_dir], meaning="last parts of the run directory")
    return Catalogue(name, *(figure for figure in figures_of(*runs) if details or not figure.is_detail))


def runs_table(runs: Sequence[RunData]) -> tuple[list[list[str]], list[str]]:
    """Return a pair for ``runs``: table rows, headings first, and notes on unknown values. Omit empty columns."""
    figures = catalogue(runs, details=False)
    shown = [figure for figure in figures.figures if any(figure.value(run) not in (None, 0) for run in runs)]
    return Catalogue(*shown).rows(runs), figures.missing(runs)


def runs_text(runs: Sequence[RunData]) -> str:
    """Return a text: a table with one line per run, and then the reasons why values are unknown."""
    rows, notes = runs_table(runs)
    return "\n".join([*aligned(rows, left=(0, 1)), *([""] if notes else []), *notes])


def comparison(before: RunData, after: RunData) -> list[dict[str, Any]]:
    """Return a list of dicts, one per metric, with the keys "figure" (name), "before", "after" and "ratio".

    Unknown values are None. Metrics that are unknown for both runs are left out.
    """
    rows = []
    for figure in figures_of(before, after):
        old, new = figure.value(before), figure.value(after)
        is_ratio = not figure.is_fact and isinstance(old, int | float) and isinstance(new, int | float) and old
        rows.append({"figure": figure.name, "before": old, "after": new, "ratio": new / old if is_ratio else None})
    return [row for row in rows if not row["before"] is row["after"] is None]


def comparison_text(
    before: RunData, after: RunData, keys: Mapping[str, tuple[str, str]], *, as_markdown: bool = False
) -> str:
    """Return a text with a table of the metrics of two runs, and a table of the recipe keys that differ.

    ``keys``: dict {recipe key: (value before, value after)}. ``as_markdown``: format the tables as Markdown.
    """
    names, figures = _names([before, after]), {figure.name: figure for figure in figures_of(before, after)}
    rows = [["", *names, "ratio"]]
    for row in comparison(before, after):
        figure = figures[row["figure"]]
        if not figure.is_counter or row["before"] or row["after"]:
            rows.append([figure.heading, figure.text(before), figure.text(after), text_of(row["ratio"], ".3f")])
    settings = [["recipe", *names], *([key, *values] for key, values in keys.items())]
    tables = [markdown(rows), markdown(settings)] if as_markdown else [aligned(rows), aligned(settings, left=(0, 1, 2))]
    return "\n\n".join("\n".join(table) for table in (tables if keys else tables[:1]))


def draw_runs(picture: Any, runs: Sequence[RunData]) -> None:
    """Draw loss curves and bars of time, memory and bytes into the matplotlib figure ``picture``. Raises UsageError."""
    if len(runs) > MAX_PLOTTED_RUNS:
        raise UsageError(f"a plot of {len(runs)} runs cannot be read; give at most {MAX_PLOTTED_RUNS} runs")
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


def plot_runs(runs: Sequence[RunData], file: Path) -> None:
    """Plot the comparison of ``runs`` to ``file``. Raises UsageError, StorageError and MissingCapabilityError."""
    plotting.check_plot(file)
    with plotting.chart_style(), plotting.drawing(file, *PLOT_INCHES) as picture:
        draw_runs(picture, runs)
