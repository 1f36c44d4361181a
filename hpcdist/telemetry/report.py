"""Text report and plot of one run."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.constants import METRICS_FILE
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.units import counted
from hpcdist.telemetry.metrics import run_figures
from hpcdist.telemetry.page import run_data
from hpcdist.telemetry.page.charts import over_steps
from hpcdist.telemetry.page.run_data import ExternalData, RunData

CURVE_ROWS: Final = 12
BAR_WIDTH: Final = 40
_HEAD: Final = {"started": "created_utc", "layout": "architecture", "commit": "git_commit", "MPI": "mpi_library"}


def report(run_dir: str | Path, external: ExternalData | None = None) -> RunData:
    """Read the run in ``run_dir``, which may be running. Raises StorageError if it has no readable metrics file.

    ``external``: data about the run that the caller has collected.
    """
    if not (Path(run_dir) / METRICS_FILE).is_file():
        raise StorageError(f"{run_dir} holds no {METRICS_FILE}; give the directory that a training wrote (its --out)")
    return run_data.read(Path(run_dir), external)


def text(run: RunData) -> str:
    """Return the report of ``run`` as text: its properties, its figures, and a table of the loss."""
    if run.run is None:
        return f"{run.run_dir}: no step was completed"
    figures, sessions = run.figures, run.figures.get("sessions", 1)
    steps = f"{figures['steps']} on {counted(figures['world'], 'rank')}"
    head = {"run": run.run_dir, "strategy": run.setting("parallel.strategy") or figures.get("strategy")}
    head |= {label: figures.get(key) for label, key in _HEAD.items()}
    rows = [(label, str(value)) for label, value in head.items() if value]
    rows.append(("steps", steps + (f" in {sessions} sessions" if sessions > 1 else "")))
    rows += [(title, f"{value}  ({note})" if note else value) for title, value, note in run_figures.measured(run)]
    rows += [("none", names)] if (names := run_figures.zero_counters(run)) else []
    if not run.run.complete:
        part = f"{len(run.run.chosen):,} of {len(run.run.steps['step']):,} steps"
        rows.append(("rows", f"times and bytes are from {part}, spread evenly"))
    width = max(len(title) for title, _ in rows)
    lines = [f"{title:{width}}  {value}" for title, value in rows]
    return "\n".join([*lines, *run_figures.RUN.missing([run]), "", *_curve(run.run.steps)])


def _curve(columns: Mapping[str, np.ndarray]) -> list[str]:
    steps, loss = columns["step"], columns["loss"]
    ends = np.unique(np.linspace(0, len(steps), min(CURVE_ROWS, len(steps)) + 1).astype(int))
    means = [float(loss[start:stop].mean()) for start, stop in itertools.pairwise(ends)]
    finite = [mean for mean in means if math.isfinite(mean)]
    unit = (max(finite) - min(finite)) / BAR_WIDTH if finite else 0.0
    lines = ["    step     loss  learning rate"]
    for stop, mean in zip(ends[1:], means, strict=True):
        bar = "█" * round((mean - min(finite)) / unit) if unit and math.isfinite(mean) else ""
        line = f"{steps[stop - 1]:8d} {mean:8.4f} {columns['learning_rate'][stop - 1]:14.3g}  {bar}"
        lines.append(line.rstrip())
    return lines


def plot(run: RunData, file: str | Path) -> None:
    """Plot the loss and the phases of a step into ``file``. The suffix of ``file`` selects the format.

    Raises MissingCapabilityError without matplotlib, and StorageError if ``file`` cannot be written.
    """
    matplotlib = plotting.require_matplotlib()
    if run.run is None:
        raise UsageError(f"{run.run_dir}: no step was completed, so there is nothing to plot")
    with plotting.chart_style():
        figure = matplotlib.Figure(figsize=(8, 7), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        over_steps.draw_loss(above, run)
        over_steps.draw_phases(below, run)
        above.set_xlabel("")
        figure.suptitle(f"{run.name}, {counted(run.world, 'rank')}", fontsize=10)
        plotting.save(figure, file)
