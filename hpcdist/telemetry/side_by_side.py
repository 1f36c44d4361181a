"""Several runs side by side: a table of their figures, what differs between two of them, and one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.models.config import FOREIGN
from hpcdist.reporting import plotting, regular
from hpcdist.reporting.table import MISSING, Columns, aligned, rows_of, text_of
from hpcdist.reporting.units import format_bytes
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.telemetry.page.charts import style
from hpcdist.telemetry.report import RunReport

SPEED: Final = "speed"  # tokens, or samples, of a step over the median time of one: a slow first one does not count
MOVED: Final = "moved"  # bytes in messages, through shared memory, and in buffers of the MPI library
# key of `RunReport.figures` -> title, form, and unit of a figure that two runs are compared by
FIGURES: Final = {
    "train_loss_mean": ("loss of last 20", ".4f", 1.0),
    "val_loss": ("validation", ".4f", 1.0),
    "step_s_median": ("step ms", ".1f", 1e-3),
    SPEED: ("speed", ",.0f", 1.0),
    "comm_fraction": ("communication", ".1%", 1.0),
    "peak_bytes_total": ("memory", "bytes", 1.0),
    MOVED: ("moved a step", "bytes", 1.0),
    "energy_j": ("joules", ",.0f", 1.0),
}
MOST_RUNS: Final = 10  # that a picture can tell apart


def figure(report: RunReport, key: str) -> float | None:
    """Return a figure of `FIGURES`; None where it was not measured."""
    value: Any = report.figures.get(key)
    if key == SPEED:
        step_s, tokens = report.figures.get("step_s_median"), report.steps["tokens"]
        value = float(np.median(tokens)) / step_s if step_s and len(tokens) else None
    if key == MOVED:
        moved = step_metrics.moved_bytes(report.figures)
        value = None if moved is None else sum(moved)
    return None if value is None or not math.isfinite(value) else float(value)


def figure_text(report: RunReport, key: str) -> str:
    """Return a figure of `FIGURES` as text, or `MISSING` if it was not measured.

    PyTorch and JAX hold the activations of a script's model: the memory of such a run is marked "+ activations".
    """
    _, form, unit = FIGURES[key]
    value = figure(report, key)
    if value is not None and form == "bytes":
        is_partial = key == "peak_bytes_total" and _recipe_value(report.run_dir, "model", "kind") in FOREIGN
        return format_bytes(round(value)) + (" + activations" if is_partial else "")
    return text_of(value, form, unit)


def strategy_of(run_dir: Path) -> str:
    """Return ``parallel.strategy`` of the recipe of a run, or `MISSING` if it cannot be read."""
    return _recipe_value(run_dir, "parallel", "strategy")


def _recipe_value(run_dir: Path, section: str, key: str) -> str:
    try:
        return str(regular.toml(run_dir / "recipe.toml")[section][key])
    except (OSError, ValueError, KeyError):
        return MISSING


def _title(key: str, reports: Sequence[RunReport]) -> str:
    """Return the title of a figure: of a speed with what the runs count, where they count the same."""
    units = {str(report.figures.get("speed_unit", "tokens")) for report in reports}
    return f"{units.pop()}/s" if key == SPEED and len(units) == 1 else FIGURES[key][0]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return short names that tell the directories apart: their last parts, as many as that takes (local)."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError("a run is given twice; each is shown once")


def table(reports: Sequence[RunReport]) -> str:
    """Return a line for each run, below a head."""
    names = dict(zip(map(id, reports), names_of([report.run_dir for report in reports]), strict=True))
    columns: Columns[RunReport] = [
        ("run", lambda report: names[id(report)]),
        ("strategy", lambda report: strategy_of(report.run_dir)),
        ("ranks", lambda report: str(report.figures["world"])),
        ("steps", lambda report: str(report.figures["steps"])),
        *((_title(key, reports), lambda report, key=key: figure_text(report, key)) for key in FIGURES),
    ]
    return "\n".join(aligned(rows_of(columns, reports), left=(0, 1)))


def comparison(before: RunReport, after: RunReport) -> list[dict[str, Any]]:
    """Return for each figure its value in both runs, and the ratio of the second to the first (None: not known)."""
    rows: list[dict[str, Any]] = []
    for name, title in (("steps", "steps"), ("world", "ranks")):
        earlier, later = before.figures[name], after.figures[name]
        rows.append({"figure": title, "before": earlier, "after": later, "ratio": None})
    for key in FIGURES:
        title = _title(key, [before, after])
        old, new = figure(before, key), figure(after, key)
        ratio = new / old if new is not None and old else None
        rows.append({"figure": title, "before": old, "after": new, "ratio": ratio})
    return rows


def comparison_text(before: RunReport, after: RunReport, keys: dict[str, tuple[str, str]]) -> str:
    """Return the figures of both runs beside each other, and the ``keys`` of their recipes that differ."""
    names = names_of([before.run_dir, after.run_dir])
    rows = [["", *names, "ratio"]]
    for key, row in zip(["steps", "ranks", *FIGURES], comparison(before, after), strict=True):
        known = key in FIGURES
        texts = [figure_text(before, key), figure_text(after, key)] if known else [row["before"], row["after"]]
        rows.append([row["figure"], *map(str, texts), text_of(row["ratio"], ".3f")])
    lines = aligned(rows)
    if keys:
        lines += ["", *aligned([["recipe", *names], *([key, *values] for key, values in keys.items())], left=(0, 1, 2))]
    return "\n".join(lines)


def plot(reports: Sequence[RunReport], file: Path) -> None:
    """Draw the losses of the runs over their steps, and bars of seconds, memory and bytes beside them.

    Raises UsageError for more than MOST_RUNS runs or one without steps, what `plotting.drawing` raises else.
    """
    if len(reports) > MOST_RUNS:
        raise UsageError(f"a picture of {len(reports)} runs cannot be read; give at most {MOST_RUNS}")
    for report in reports:
        if not len(report.steps["step"]):
            raise UsageError(f"{report.run_dir}: no step was completed, so there is nothing to plot")
    plotting.check_plot(file)
    names = names_of([report.run_dir for report in reports])
    bars = ("step_s_median", "peak_bytes_total", MOVED)
    with style.chart_style(), plotting.drawing(file, 10, 4.5) as picture:
        colors = [style.CYCLE[index % len(style.CYCLE)] for index in range(len(reports))]
        grid = picture.add_gridspec(len(bars), 2, width_ratios=(3, 2))
        losses = picture.add_subplot(grid[:, 0])
        for index, (report, name) in enumerate(zip(reports, names, strict=True)):
            line = dict(color=colors[index], label=name, linewidth=1.5 + 2 * (len(reports) - index - 1))
            losses.plot(report.steps["step"], report.steps["loss"], **line)
        losses.set_xlabel("step")
        losses.set_ylabel("training loss")
        losses.legend()
        for row, key in enumerate(bars):
            axis = picture.add_subplot(grid[row, 1])
            values = [figure(report, key) or 0.0 for report in reports]
            drawn = axis.barh(names, values, color=colors)
            axis.bar_label(drawn, [figure_text(report, key) for report in reports], padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.set_xlim(0, 1.3 * max([*values, 1e-9]))
            axis.set_xticks([])
            axis.set_title(FIGURES[key][0], fontsize=9, loc="left")
