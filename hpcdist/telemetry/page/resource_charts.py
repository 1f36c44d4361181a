"""Charts of resources: memory, bytes, joules, and utilisation of the machine."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.reporting import plotting as draw
from hpcdist.reporting.plotting import Chart
from hpcdist.telemetry.metrics.observations import ObservedSeries
from hpcdist.telemetry.metrics.quantities import max_over_ranks
from hpcdist.telemetry.page import chart_series
from hpcdist.telemetry.page.energy_data import UTILISATION_NAMES
from hpcdist.telemetry.page.run_data import RunData

MIB: Final = 2.0**20
NO_MEMORY: Final = "the run stored no memory by category: a script's arrays are not counted, or the run ended too early"
NO_BYTES: Final = (
    "no bytes were counted in messages: one rank sends nothing, shared memory of a node needs none, and traffic of "
    "the MPI library's own collectives is not visible; see Moved a step"
)
NO_USE: Final = "the run stored no utilisation: an earlier version, or energy.utilisation_s = 0"
KIND_COLOURS: Final = {"gpu": draw.BLUE, "cpu": draw.RED, "dram": draw.GREEN, "node": draw.PINK}


def charts(data: RunData) -> dict[str, list[Chart]]:
    """Return a dict of chart lists for the sections "resources" and "energy" of the HTML page."""
    return {
        "resources": [_memory(data), _sent(data)],
        "energy": [_power(data), _joules(data), *_by_phase(data), _use(data)],
    }


def _memory(data: RunData) -> Chart:
    parts = chart_series.observed_by_label(data, "memory_bytes")
    title = "Memory by category"
    if not parts:
        return Chart("memory", title, reason=NO_MEMORY if data.run is not None else data.reason)

    def picture(axes: Any) -> None:
        chart_series.stack_observed(
            axes, {name: ObservedSeries(s.step, s.time_ns, s.value / MIB) for name, s in parts.items()}
        )
        chart_series.mark_resumes(axes, data)
        axes.set_ylim(bottom=0)
        chart_series.label_step_axis(axes, "MiB")
        draw.format_thousands(axes.yaxis)
        draw.legend(axes, 3)

    alt = "Memory by category, stacked: " + ", ".join(f"{k} {v.value[-1] / MIB:.1f} MiB" for k, v in parts.items())
    caption = "Live arrays, on the rank that holds most."
    return Chart("memory", title, draw.draw_svg("memory", picture), caption, alt)


def _sent(data: RunData) -> Chart:
    run, title = data.run, "Bytes sent a step"
    if run is None:
        return Chart("sent", title, reason=data.reason)
    sent = run.sample.steps["sent_bytes"]
    most_bytes = max_over_ranks(sent)
    if not np.nansum(most_bytes) > 0:
        return Chart("sent", title, reason=NO_BYTES)

    def picture(axes: Any) -> None:
        axes.plot(*chart_series.decimate(run.sample.steps["step"], most_bytes / MIB), color=draw.RED)
        chart_series.mark_resumes(axes, data)
        axes.set_ylim(0, draw.robust_upper_limit(most_bytes / MIB, 99.5))
        chart_series.label_step_axis(axes, "MiB, the rank that sends most")
        draw.format_thousands(axes.yaxis)

    alt = f"Bytes sent a step by the rank that sends most, median {np.nanmedian(most_bytes) / MIB:.3g} MiB"
    return Chart("sent", title, draw.draw_svg("sent", picture), chart_series.rows_note(run), alt)


def _power(data: RunData) -> Chart:
    curves = {kind: course for kind, course in data.curves.by_kind.items() if np.isfinite(course.watts).any()}
    means = ", ".join(f"{kind} {np.nanmean(course.watts):.1f} W" for kind, course in curves.items())
    caption = f"{_label(data)}Differences of the counters."
    caption += " From blocks of samples, spread evenly." if data.curves.thinned else ""
    lines = {kind: (course.hours, course.watts) for kind, course in curves.items()}
    return _over_hours(data, "power", "Power", lines, "W, all nodes", caption, f"Power by source, in the mean {means}")


def _joules(data: RunData) -> Chart:
    curves = {kind: course for kind, course in data.curves.by_kind.items() if np.isfinite(course.joules).any()}
    total_joules = max((float(np.nanmax(course.joules)) for course in curves.values()), default=0.0)
    unit, name = (3.6e6, "kWh") if total_joules > 3.6e6 else (1e3, "kJ") if total_joules > 1e4 else (1.0, "J")
    ends = ", ".join(f"{kind} {np.nanmax(course.joules) / unit:.4g} {name}" for kind, course in curves.items())
    lines = {kind: (course.hours, course.joules / unit) for kind, course in curves.items()}
    alt = f"Energy so far by source: {ends}"
    return _over_hours(data, "joules", "Energy so far", lines, name, _label(data), alt)


def _over_hours(
    data: RunData, key: str, title: str, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], what: str, caption: str,
    alt: str,
) -> Chart:  # fmt: skip
    if not lines:
        return Chart(key, title, reason=data.energy.reason or "the run stored no samples of its counters")

    def picture(axes: Any) -> None:
        for index, (kind, line) in enumerate(lines.items()):
            colour = KIND_COLOURS.get(kind, draw.CYCLE[index % 8])
            axes.plot(*line, color=colour, linestyle=draw.STROKES[index % 4], label=kind)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(what)
        draw.format_thousands(axes.yaxis)
        _time_axis(axes, max(float(hours[-1]) for hours, _ in lines.values()))
        draw.legend(axes)

    return Chart(key, title, draw.draw_svg(key, picture), caption, alt)


def _by_phase(data: RunData) -> list[Chart]:
    rows = list(data.energy.phases)
    if any(part.joules for part in data.energy.parts):  # show the parts of training instead of their sum
        rows = [*data.energy.parts, *(phase for phase in rows if phase.name != "training")]
    phases = [(phase.name, phase.joules) for phase in rows if phase.joules]
    if not phases:
        return []
    names, joules = [name for name, _ in phases], [value for _, value in phases if value is not None]

    def picture(axes: Any) -> None:
        at = np.arange(len(names))
        axes.barh(at, joules, color=[draw.PHASE_COLOURS.get(name, draw.BLUE) for name in names], height=0.6)
        axes.set_yticks(at, names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("J")
        axes.margins(x=0.15)
        draw.format_thousands(axes.xaxis)
        for row, value in zip(at, joules, strict=True):
            axes.annotate(draw.short_number(value), (value, row), (3, 0), textcoords="offset points", va="center")

    alt = "Energy by phase: " + ", ".join(f"{name} {value:.4g} J" for name, value in phases)
    return [
        Chart("by-phase", "Energy by phase", draw.draw_svg("by-phase", picture), f"{_label(data)}Over all starts.", alt)
    ]


def _use(data: RunData) -> Chart:
    title, use = "Utilisation", data.use
    if use is None or not use.shares:
        return Chart("use", title, reason=NO_USE)

    def picture(axes: Any) -> None:
        for index, (name, shares) in enumerate(use.shares.items()):
            finite = np.isfinite(shares)
            line = chart_series.decimate(use.hours[finite], 100 * shares[finite])
            axes.plot(*line, color=draw.CYCLE[index], linestyle=draw.STROKES[index % 4], label=UTILISATION_NAMES[name])
        axes.set_ylim(0, 103)
        _time_axis(axes, float(use.hours[-1]))
        axes.set_ylabel("%, mean over nodes")
        draw.legend(axes, 2)

    means = ", ".join(f"{UTILISATION_NAMES[name]} {np.nanmean(shares):.0%}" for name, shares in use.shares.items())
    return Chart("use", title, draw.draw_svg("use", picture), alt=f"Utilisation over time, in the mean {means}")


def _label(data: RunData) -> str:
    return f"{data.energy.label[:1].upper()}{data.energy.label[1:]}. " if data.energy.label else ""


def _time_axis(axes: Any, hours: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, name = (1 / 3600, "s") if hours < 0.1 else (1 / 60, "min") if hours < 3 else (1.0, "h")
    unit, name = (24.0, "days") if hours > 100 else (unit, name)
    steps = MaxNLocator(nbins=7)
    axes.xaxis.set_major_locator(steps)
    ticks = np.asarray(steps.tick_values(0.0, hours / unit)) * unit
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= hours * 1.001])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:.6g}"))
    axes.set_xlabel(f"time of the starts ({name})")
    axes.margins(x=0.01)
