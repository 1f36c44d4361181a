"""Report of a run directory: its figures as text or JSON, and its curves as a picture."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.record.timing import BytesMoved
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.units import counted, format_bytes
from hpcdist.telemetry.metrics import sampling, step_metrics
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE, MetricsData
from hpcdist.telemetry.page import energy_data, run_data
from hpcdist.telemetry.page.charts import over_steps, style
from hpcdist.telemetry.page.charts.over_steps import ENTROPIES
from hpcdist.telemetry.page.charts.series import format_value
from hpcdist.telemetry.page.energy_data import RunEnergy

CURVE_ROWS: Final = 12
BAR_WIDTH: Final = 40


@dataclass(frozen=True)
class RunReport:
    """Report of a run: ``figures`` are those of `step_metrics.summarise` with the entropies and provenance of the run.

    ``metrics`` are all rows, or of a large run some that are spread evenly; see `sampling.read`.
    """

    run_dir: Path
    metrics: MetricsData
    figures: dict[str, Any]
    steps: dict[str, np.ndarray]  # the columns of one number a step, in full
    energy: RunEnergy


def report(run_dir: str | Path) -> RunReport:
    """Read a run directory; the run may be under way. Raises StorageError when it holds no readable metrics."""
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise StorageError(f"{run_dir} holds no {METRICS_FILE}; give the directory that a training wrote (its --out)")
    run = sampling.read(path)
    attributes = run_data.shown_attributes(run)
    energy = energy_data.read_energy(run_dir, None, attributes, run_data.last_step(run))
    figures = {"run_dir": str(run_dir)} | attributes | run_data.summary_figures(run)
    if energy.joules is not None:
        figures |= {"energy_j": energy.joules, "j_per_step": energy.j_per_step}
    figures["energy_j_by_phase"] = {phase.name: phase.joules for phase in energy.phases}
    scales = run.tables.get("noise_scale", {}).get("noise_scale", np.zeros(0))
    if len(scales) and math.isfinite(scales[-1]):
        figures["noise_scale"] = float(scales[-1])
    return RunReport(run_dir, run.sample, figures, run.steps, energy)


def text(run_report: RunReport) -> str:
    """Return the report as lines for people."""
    figures = run_report.figures
    steps = run_report.metrics.steps
    if not len(steps["step"]):
        return f"{run_report.run_dir}: no step was completed"
    lines = [f"run        {run_report.run_dir}"]
    lines += [f"{label:10} {figures[key]}" for label, key in _HEAD if figures.get(key)]
    sessions = f" in {figures['sessions']} sessions" if figures.get("sessions", 1) > 1 else ""
    lines.append(f"steps      {figures['steps']} on {counted(figures['world'], 'rank')}{sessions}")
    train, mean = (format_value(figures[name]) for name in ("train_loss", "train_loss_mean"))
    val = "no validation" if figures["val_loss"] is None else f"validation {format_value(figures['val_loss'])}"
    lines.append(f"loss       train {train} ({mean} over the last steps), {val}")
    entropies = [f"{key.removesuffix('_nats')} {format_value(figures[key])}" for key in ENTROPIES if figures.get(key)]
    if entropies:
        lines.append(f"entropies  {', '.join(entropies)} (of the training data)")
    lines += _speed(figures, figures.get("speed_unit", "tokens"))
    if figures.get("communication_hidden_share") is not None:  # of a run that has ended, with overlap
        hidden = figures["communication_hidden_share"]
        lines.append(f"overlap    {hidden:.0%} of the time of reductions was not waited for")
    lines.append(f"moved      {_moved(figures)}")
    if figures.get("noise_scale") is not None:
        lines.append(f"noise      scale {figures['noise_scale']:,.1f} samples, the critical batch")
    if run_report.energy.joules is not None or "energy_j" in figures:  # else the run has not come so far
        lines += [f"energy     {_energy(run_report.energy)}", *_phases(run_report.energy)]
    if figures.get("peak_bytes_total"):
        lines.append(
            f"memory     {format_bytes(round(figures['peak_bytes_total']))} at most, on the rank that holds most"
        )
    if figures["world"] > 1 and figures["imbalance"] is not None:
        score = f"straggler score {figures['imbalance']:.2f}: its compute time over that of the median rank"
        lines.append(f"slowest    rank {figures['slowest_rank']}, {score}")
    lines += [f"{name:10} {text}" for name, text in _anomaly_lines(figures)]
    if len(steps["step"]) < len(run_report.steps["step"]):
        part = f"{len(steps['step']):,} of {len(run_report.steps['step']):,} steps"
        lines.append(f"rows       times and bytes are from {part}, spread evenly")
    return "\n".join([*lines, "", *_curve(run_report.steps)])


def _speed(figures: Mapping[str, Any], unit: str) -> list[str]:
    """Return the lines about the time of a step and of its parts."""
    if figures["step_s_median"] is None:
        return ["step       no times yet: the first step of each start, which compiles and allocates, does not count"]
    known = {name: figures[f"{key}_fraction"] for name, key in _SHARES}
    if known["data"] is None:  # of an earlier version
        known["data and other"] = known.pop("other")
        del known["data"]
    shares = [f"{name} {format_value(share, '{:.1%}')}" for name, share in known.items()]
    return [
        f"step       median {_seconds(figures['step_s_median'])}, 95 % {_seconds(figures['step_s_p95'])}",
        f"speed      {format_value(figures['tokens_per_s'], '{:,.0f} ' + unit + '/s')}",
        f"time       {', '.join(shares)}",
    ]


def _moved(figures: Mapping[str, Any]) -> str:
    """Return the bytes that a rank moved in a step; of a run that has not ended, those sent in messages."""
    if figures["world"] == 1:
        return "one rank moves nothing"
    if (known := step_metrics.moved_bytes(figures)) is not None:
        return f"{known.described()} a step and rank"
    sent = figures["bytes_sent_per_step"]
    if sent is None:
        return "not known before the end of the run"
    if "bytes_loaded_per_step" in figures:  # noted at its end by an earlier version
        return f"{BytesMoved(sent, figures['bytes_loaded_per_step']).described()} a step and rank"
    messages = f"{format_bytes(round(sent))} in messages a step and rank" if sent else "nothing in messages"
    return f"{messages}; what takes other ways is noted at the end of the run"


def _anomaly_lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if figures["skipped_steps"]:
        yield "skipped", f"{counted(figures['skipped_steps'], 'step')}: the gradient overflowed, nothing was updated"
    if figures["anomalies"]:
        number = figures["anomalies"]
        yield "odd", f"{number} {'anomalies' if number > 1 else 'anomaly'}; the page (--html) lists what was flagged"


def _energy(energy: RunEnergy) -> str:
    if energy.joules is None:
        return f"unknown ({energy.reason})"
    label = f" ({energy.label})" if energy.label else ""
    step = "unknown" if energy.j_per_step is None else f"{energy.j_per_step:.3g} J a step"
    return f"{energy.joules:,.1f} J{label}, training {step}"


def _phases(energy: RunEnergy) -> list[str]:
    """Return a line with the joules of each phase, of training by its parts where they are known."""
    parts = [phase for phase in energy.parts if phase.joules is not None]
    phases = [phase for phase in energy.phases if not parts or phase.name != "training"]
    texts = [f"{phase.name} {phase.joules:,.1f} J" for phase in [*parts, *phases] if phase.joules is not None]
    return [f"by phase   {', '.join(texts)}"] if texts else []


_HEAD: Final = (("started", "created_utc"), ("strategy", "strategy"), ("commit", "git_commit"), ("MPI", "mpi_library"))
_SHARES: Final = (
    *(("compute", "compute"), ("communication", "comm"), ("update", "update")),
    *(("data", "data"), ("other", "other")),
)


def _curve(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return a table of the loss at steps spread evenly over the run, each a mean since the line before, with bars.

    A bar is as long as the loss is above the least of the table.
    """
    steps, loss = columns["step"], columns["loss"]
    ends = np.unique(np.linspace(0, len(steps), min(CURVE_ROWS, len(steps)) + 1).astype(int))
    means = [float(loss[start:stop].mean()) for start, stop in itertools.pairwise(ends)]
    known = [mean for mean in means if math.isfinite(mean)]
    unit = (max(known) - min(known)) / BAR_WIDTH if known else 0.0
    lines = ["    step     loss  learning rate"]
    for stop, mean in zip(ends[1:], means, strict=True):
        bar = "█" * round((mean - min(known)) / unit) if unit and math.isfinite(mean) else ""
        line = f"{steps[stop - 1]:8d} {mean:8.4f} {columns['learning_rate'][stop - 1]:14.3g}  {bar}"
        lines.append(line.rstrip())
    return lines


def _seconds(value: float | None) -> str:
    return format_value(value and value * 1e3, "{:.2f} ms")


def plot(run_report: RunReport, file: str | Path) -> None:
    """Draw the charts of loss and phases of the page into ``file``, whose ending names the format.

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    matplotlib = plotting.require_matplotlib()
    if not len(run_report.metrics.steps["step"]):
        raise UsageError(f"{run_report.run_dir}: no step was completed, so there is nothing to plot")
    data = run_data.read(run_report.run_dir)
    with style.chart_style():
        figure = matplotlib.Figure(figsize=(8, 7), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        over_steps.draw_loss(above, data)
        over_steps.draw_phases(below, data)
        above.set_xlabel("")
        figure.suptitle(f"{data.name}, {counted(data.world, 'rank')}", fontsize=10)
        plotting.save(figure, file)
