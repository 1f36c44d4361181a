"""Charts over steps: loss, learning rate, speed, phases and ranks; and the chart of one step by rank."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.comm.record.spans import Span
from hpcdist.reporting import plotting as draw
from hpcdist.reporting.plotting import Chart, GanttBar, GanttStyle
from hpcdist.reporting.units import counted
from hpcdist.telemetry.metrics import run_figures
from hpcdist.telemetry.metrics.observations import ObservedSeries
from hpcdist.telemetry.metrics.quantities import PHASES, max_over_ranks, mean_over_ranks
from hpcdist.telemetry.metrics.run_figures import ENTROPIES
from hpcdist.telemetry.metrics.side_tables import SampledMetrics
from hpcdist.telemetry.page import chart_series
from hpcdist.telemetry.page.energy_data import RankLane, StepSpans, finite_number
from hpcdist.telemetry.page.run_data import RunData

MIN_SMOOTHED_STEPS: Final = 60  # fewer validation points get a marker each
MAX_LOGGED: Final = 12  # charts of values that a script logged
MAX_RANK_ROWS: Final = 128  # rows in a chart of ranks; a row then shows the slowest of several ranks


def charts(data: RunData) -> dict[str, list[Chart]]:
    """Return a dict of chart lists, keyed by section of the HTML page: "learning", "speed" and "step"."""
    return {
        "learning": [_loss(data), _rate(data), *_end(data), *_routers(data), *_logged(data)],
        "speed": [_throughput(data), _phases(data), _ranks(data)],
        "step": [_step(data)],
    }


def _unit(data: RunData) -> str:
    return f" {data.loss_unit}".rstrip()


def _loss(data: RunData) -> Chart:
    run, title = data.run, "Loss"
    if run is None:
        return Chart("loss", title, reason=data.reason, wide=True)
    steps = run.steps["step"]
    last = data.figures["train_loss_mean"]
    alt = f"Training loss over {int(steps[-1]):,} steps, {chart_series.format_value(last)}{_unit(data)} at the end"
    caption = "Thin: each step. " if _window(len(steps)) > 1 else ""
    if any(name in data.attributes for name in ENTROPIES):
        caption += "Horizontals: entropies of the training data, which a table of counts can reach."
    if data.sessions:
        caption += f" Vertical lines: {counted(len(data.sessions), 'resume')}."
    drawing = draw.draw_svg("loss", lambda axes: draw_loss(axes, data), draw.WIDE)
    return Chart("loss", title, drawing, caption, alt, wide=True)


def _end(data: RunData) -> list[Chart]:
    if data.run is None or len(data.run.steps["step"]) < 40:
        return []
    loss = data.run.steps["loss"]
    mean = chart_series.smooth(loss, _window(len(loss)))
    alt = f"Loss of the second half of the steps, {chart_series.format_value(_last(mean))}{_unit(data)} at the end"
    drawing = draw.draw_svg("end", lambda axes: draw_loss(axes, data, len(loss) // 2))
    return [Chart("end", "Loss, second half", drawing, alt=alt)]


def draw_loss(axes: Any, data: RunData, first: int = 0) -> None:
    """Draw the training loss, its moving mean and the validation loss on ``axes``, from table row ``first`` on."""
    assert data.run is not None
    rows, evaluations = data.run.steps, data.run.sample.evaluations
    steps, loss, window = rows["step"][first:], rows["loss"][first:], _window(len(rows["step"]))
    since = int(steps[0]) if first else 0
    pale = {"color": draw.SKY, "linewidth": 0.7, "alpha": 0.7} if window > 1 else {"color": draw.BLUE}
    axes.plot(*chart_series.decimate(steps, loss), **pale, label="training")
    if window > 1:
        mean = chart_series.smooth(rows["loss"], window)[first:]
        axes.plot(*chart_series.decimate(steps, mean), color=draw.BLUE, label=f"training, mean of {window} steps")
    late = evaluations["step"] >= since
    if late.any():
        seen = chart_series.decimate(evaluations["step"][late], evaluations["val_loss"][late])
        marker = "o" if len(seen[0]) < MIN_SMOOTHED_STEPS else ""
        axes.plot(*seen, color=draw.RED, marker=marker, markersize=3.5, linestyle="--", label="validation")
    entropies = {} if first else {key: finite_number(data.attributes.get(key)) for key in ENTROPIES}
    for (key, value), stroke in zip(entropies.items(), (":", "-.", "--"), strict=False):
        if value is not None:
            name = f"{key.removesuffix('_nats')} entropy {value:.2f}"
            axes.axhline(value, color=draw.MUTED, linestyle=stroke, linewidth=0.8, label=name)
    chart_series.mark_resumes(axes, data, since)
    marks = [value for value in entropies.values() if value is not None]
    _limits_of_loss(axes, loss, evaluations["val_loss"][late], marks)
    chart_series.label_step_axis(axes, "loss (nats)" if _unit(data) else "loss")
    draw.legend(axes, 4 if first else 7)


def _window(steps: int) -> int:
    return min(500, steps // 50) if steps >= 200 else 1


def _last(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else None


def _limits_of_loss(axes: Any, loss: np.ndarray, validation: np.ndarray, marks: Sequence[float]) -> None:
    finite = loss[np.isfinite(loss)]
    if finite.size < 10:
        return
    finite = np.concatenate([finite, validation[np.isfinite(validation)]])
    low, high, top = (float(np.percentile(finite, share)) for share in (0.1, 99.5, 100))
    # Keep marks that are close to the curve in the picture.
    low = min([low, *(mark for mark in marks if low - 0.4 * (high - low) < mark < low)])
    room = 0.05 * max(high - low, 1e-9)
    axes.set_ylim(min(low, finite.min()) - room, (top if top < high + 1.5 * (high - low) else high + room) + room)


def _rate(data: RunData) -> Chart:
    if data.run is None:
        return Chart("rate", "Learning rate", reason=data.reason)
    steps, rate = data.run.steps["step"], data.run.steps["learning_rate"]

    def picture(axes: Any) -> None:
        axes.plot(*chart_series.decimate(steps, rate), color=draw.GREEN)
        chart_series.mark_resumes(axes, data)
        axes.set_ylim(bottom=0)
        chart_series.label_step_axis(axes, "learning rate")

    alt = f"Learning rate over the steps, highest {np.nanmax(rate):.3g}, last {rate[-1]:.3g}"
    return Chart("rate", "Learning rate", draw.draw_svg("rate", picture), alt=alt)


def _logged(data: RunData) -> list[Chart]:
    charts: list[Chart] = []
    for name, values in itertools.islice(run_figures.logged_values(data).items(), MAX_LOGGED):

        def picture(axes: Any, name: str = name, values: ObservedSeries = values) -> None:
            marker = "o" if len(values.step) < MIN_SMOOTHED_STEPS else ""
            axes.plot(*chart_series.decimate(values.step, values.value), color=draw.BLUE, marker=marker, markersize=3.5)
            chart_series.mark_resumes(axes, data)
            chart_series.label_step_axis(axes, name)

        alt = f"{name} over the steps, {chart_series.format_value(float(values.value[-1]))} at the end"
        drawing = draw.draw_svg(f"logged-{len(charts)}", picture)
        charts.append(Chart(f"logged-{len(charts)}", name, drawing, "Logged by the script.", alt))
    return charts


def _routers(data: RunData) -> list[Chart]:
    rows = {} if data.run is None else data.run.tables.get("experts", {})
    if not len(rows.get("step", ())):
        return []
    steps = rows["step"]

    def lines(*drawn: tuple[str, str, str], unit: str) -> Callable[[Any], None]:
        def picture(axes: Any) -> None:
            for name, label, colour in drawn:
                axes.plot(*chart_series.decimate(steps, rows[name]), color=colour, label=label)
            chart_series.mark_resumes(axes, data)
            axes.set_ylim(bottom=0)
            chart_series.label_step_axis(axes, unit)
            draw.legend(axes)

        return picture

    loads = lines(("worst", "worst layer", draw.RED), ("imbalance", "mean of the layers", draw.BLUE), unit="load")
    choice = lines(
        ("entropy", "entropy of a token (nats)", draw.GREEN), ("dropped", "share dropped", draw.RED), unit="router"
    )
    last = {name: chart_series.format_value(float(values[-1])) for name, values in rows.items() if name != "step"}
    caption = "Of the busiest expert, over the mean load: 1 is even."
    alt = (
        f"Load of the busiest expert over the mean, {last['imbalance']} at the end, {last['worst']} in the worst layer"
    )
    of_choice = f"Entropy of the scores of a token, {last['entropy']} nats at the end; share dropped, {last['dropped']}"
    return [
        Chart("loads", "Load of experts", draw.draw_svg("loads", loads), caption, alt),
        Chart("router", "Choice of experts", draw.draw_svg("router", choice), alt=of_choice),
    ]


def _throughput(data: RunData) -> Chart:
    run, title = data.run, "Throughput"
    if run is None:
        return Chart("speed", title, reason=data.reason)
    rows = run.sample.steps
    if "step_s" not in rows:
        return Chart("speed", title, reason="a file of the first version, which does not have the time of a step")
    slowest = max_over_ranks(np.where(rows["step_s"] > 0, rows["step_s"], np.nan))
    rate = rows["tokens"] / slowest
    edges = chart_series.bin_edges(rows["step"])
    # Tokens over time, not a mean of rates: a slow step counts by its duration.
    mean = chart_series.means(np.where(np.isfinite(slowest), rows["tokens"], np.nan), edges) / chart_series.means(
        slowest, edges
    )
    at = rows["step"][np.minimum(edges[1:] - 1, len(rows["step"]) - 1)]

    counted_unit = data.speed_unit

    def picture(axes: Any) -> None:
        if len(rate) > chart_series.BINS:
            axes.plot(
                *chart_series.decimate(rows["step"], rate), color=draw.SKY, linewidth=0.5, alpha=0.6, label="each step"
            )
        axes.plot(at, mean, color=draw.BLUE, label="mean")
        chart_series.mark_resumes(axes, data)
        axes.set_ylim(0, draw.robust_upper_limit(rate, 99.5))
        chart_series.label_step_axis(axes, f"{counted_unit}/s")
        draw.format_thousands(axes.yaxis)
        draw.legend(axes)

    speed = chart_series.format_value(data.figures["tokens_per_s"], "{:,.0f}")
    alt = f"{counted_unit.capitalize()} per second over the steps, {speed} in the mean"
    return Chart("speed", title, draw.draw_svg("speed", picture), chart_series.rows_note(run), alt)


def _phases(data: RunData) -> Chart:
    run, title = data.run, "Time of a step by phase"
    if run is None:
        return Chart("phases", title, reason=data.reason)
    parts = phase_times(run)[1]
    if not any(np.isfinite(part).any() for part in parts.values()):
        return Chart("phases", title, reason="no time was measured")
    caption = "Mean over the ranks that compute. Rest: data, logging, checkpoints and unmeasured time. "
    alt = "Time of a step by phase, stacked: " + ", ".join(f"{k} {np.nanmean(v):.3g} ms" for k, v in parts.items())
    drawing = draw.draw_svg("phases", lambda axes: draw_phases(axes, data))
    return Chart("phases", title, drawing, caption + chart_series.rows_note(run), alt)


def phase_times(run: SampledMetrics) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a pair: an array of the last step of each bin of steps, and a dict {phase: mean milliseconds per bin}."""
    # Means are over the steps of a bin, and over all ranks except parameter servers.
    rows, edges = run.sample.steps, chart_series.bin_edges(run.sample.steps["step"])
    works = np.nansum(rows["compute_s"], axis=0) > 0
    parts = {name: chart_series.means(mean_over_ranks(rows[f"{name}_s"][:, works]), edges) * 1e3 for name in PHASES}
    if "step_s" in rows:
        step_ms = chart_series.means(mean_over_ranks(rows["step_s"][:, works]), edges) * 1e3
        parts["rest"] = np.maximum(step_ms - np.sum([np.nan_to_num(part) for part in parts.values()], axis=0), 0)
    return rows["step"][np.minimum(edges[1:] - 1, len(rows["step"]) - 1)], parts


def draw_phases(axes: Any, data: RunData) -> None:
    """Draw the mean time of each phase of a step on ``axes``, as stacked areas over the steps of the run ``data``."""
    assert data.run is not None
    at, parts = phase_times(data.run)
    chart_series.stack_areas(axes, at, parts, draw.PHASE_COLOURS)
    chart_series.mark_resumes(axes, data)
    axes.set_ylim(0, draw.robust_upper_limit(np.sum([np.nan_to_num(part) for part in parts.values()], axis=0)))
    chart_series.label_step_axis(axes, "ms a step")
    draw.legend(axes)


def _ranks(data: RunData) -> Chart:
    run, title = data.run, "Compute time of each rank"
    if run is None:
        return Chart("ranks", title, reason=data.reason, wide=True)
    rows = run.sample.steps
    compute = np.where(rows["compute_s"] > 0, rows["compute_s"], np.nan)
    ranks = np.flatnonzero(np.isfinite(compute).any(axis=0))
    if len(ranks) < 2:
        return Chart("ranks", title, reason="one rank computes: there is nothing to compare", wide=True)
    edges = chart_series.bin_edges(rows["step"], 200)
    per_bin = chart_series.medians(compute[:, ranks], edges)  # (bins, ranks)
    ratio = per_bin / chart_series.median(per_bin.T)[:, None]
    groups = np.array_split(np.arange(len(ranks)), min(MAX_RANK_ROWS, len(ranks)))
    worst = np.array([np.where(np.isnan(ratio[:, group]), -np.inf, ratio[:, group]).max(axis=1) for group in groups])
    worst[~np.isfinite(worst)] = np.nan
    limits = (rows["step"][0] - 0.5, rows["step"][-1] + 0.5, float(ranks[-1]) + 0.5, float(ranks[0]) - 0.5)

    def picture(axes: Any) -> None:
        from matplotlib.colors import TwoSlopeNorm

        # A rank that is always slow sets the scale, a single slow moment does not.
        off = np.abs(worst - 1)
        finite = off[np.isfinite(off)]
        always = chart_series.median(off.T)
        far = max(np.percentile(finite, 99), always[np.isfinite(always)].max()) if finite.size else 0.1
        span = float(np.clip(far, 0.05, 1.0))
        norm = TwoSlopeNorm(1.0, 1 - span, 1 + span)
        image = axes.imshow(
            worst, aspect="auto", interpolation="nearest", cmap="PuOr_r", norm=norm, extent=limits, origin="upper"
        )
        axes.grid(False)
        chart_series.mark_resumes(axes, data)
        chart_series.label_step_axis(axes, "rank")
        axes.yaxis.get_major_locator().set_params(integer=True)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
        bar.set_label("time / median rank")
        bar.outline.set_visible(False)

    slowest, imbalance = data.figures.get("slowest_rank"), data.figures.get("imbalance")
    together = f" A row is the slowest of up to {len(groups[0])} ranks." if len(groups) < len(ranks) else ""
    caption = (
        f"Over the median rank of that time, without waiting; orange is slower.{together} "
        + chart_series.rows_note(run)
    )
    alt = f"Compute time of {len(ranks)} ranks over the steps; rank {slowest} is slowest, "
    alt += f"{chart_series.format_value(imbalance, '{:.2f}')} times the median rank"
    size = (draw.WIDE[0], float(np.clip(1.2 + 0.16 * len(groups), 2.0, 4.2)))
    return Chart("ranks", title, draw.draw_svg("ranks", picture, size), caption, alt, wide=True)


LANE_STYLES: Final = {
    phase + suffix: GanttStyle(colour, -0.36, 0.72, alpha)
    for suffix, alpha in (("", 1.0), (" (backward)", 0.62))
    for phase, colour in draw.PHASE_COLOURS.items()
}
NAMED_SHARE: Final = 0.012  # fraction of the step that a span needs for each digit of its number
JOINED_SHARE: Final = 0.004  # largest gap, as a fraction of the step, between spans of a micro-batch that are merged
BACKWARD: Final = "BACKWARD"  # prefix of backward operations, drawn paler than forward


def _step(data: RunData) -> Chart:
    step, title = data.timeline, "Timeline of a step"
    if not step.lanes:
        return Chart("timeline", title, reason=step.reason, wide=True)

    def picture(axes: Any) -> None:
        for row, lane in enumerate(step.lanes):
            axes.plot([lane.begin_s * 1e3, lane.end_s * 1e3], [row, row], color=draw.GRID, linewidth=1, zorder=0)
        bars = [bar for row, lane in enumerate(step.lanes) for bar in _bars(row, lane, step.seconds)]
        font = {"va": "center_baseline", "fontsize": 6.5, "color": draw.PAPER}
        character = NAMED_SHARE * step.seconds * 1e3
        draw.draw_gantt(axes, bars, LANE_STYLES, edge=draw.PAPER, character=character, font=font)
        draw.label_rows(axes, [f"rank {lane.rank}" for lane in step.lanes], max_labels=16)
        axes.set_xlim(0, step.seconds * 1e3)
        axes.set_xlabel("ms since the first rank began the step")
        axes.grid(axis="y", visible=False)
        handles = draw.kind_handles((p for p in draw.PHASE_COLOURS if p in step.totals()), LANE_STYLES, {})
        axes.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0.0, 1.0))

    size = (draw.WIDE[0], float(np.clip(1.1 + 0.3 * len(step.lanes), 1.7, 6.0)))
    totals = ", ".join(f"{phase} {seconds * 1e3:.3g} ms" for phase, seconds in step.totals().items())
    alt = f"Step {step.step}: {len(step.lanes)} ranks over {step.seconds * 1e3:.3g} ms; in the mean {totals}"
    return Chart("timeline", title, draw.draw_svg("timeline", picture, size), _caption(step), alt, wide=True)


def _caption(step: StepSpans) -> str:
    text = f"Step {step.step}, of median length among the last that all ranks have."
    if any(_is_pale(span.name) for lane in step.lanes for _, _, span in lane.spans):
        text += " Pale: backward. Numbers: micro-batches."
    if len(step.lanes) < step.world:
        text += f" {len(step.lanes)} of {counted(step.world, 'rank')}, spread evenly."
    if step.left_out:
        text += f" {step.left_out:,} spans are too short to show."
    return text + (f" Times of different nodes are by {step.clocks}." if step.clocks else "")


def _bars(row: int, lane: RankLane, whole_s: float) -> Iterator[GanttBar]:
    for begin, end, span in sorted(_merged(lane, JOINED_SHARE * whole_s), key=lambda spans: spans[0] - spans[1]):
        left, right = max(begin, lane.begin_s) * 1e3, min(end, lane.end_s) * 1e3
        kind = span.phase if span.phase in draw.PHASE_COLOURS else "other"
        number = str(span.microbatch) if span.microbatch >= 0 and span.phase == "compute" else ""
        yield GanttBar(row, left, right, f"{kind} (backward)" if _is_pale(span.name) else kind, number)


def _merged(lane: RankLane, gap_s: float) -> list[tuple[float, float, Span]]:
    merged: list[tuple[float, float, Span]] = []
    for begin, end, span in sorted(lane.spans, key=lambda spans: spans[0]):
        if merged:
            first, last, before = merged[-1]
            same = (before.phase, before.name, before.microbatch) == (span.phase, span.name, span.microbatch)
            if same and span.microbatch >= 0 and -gap_s <= begin - last <= gap_s:
                merged[-1] = (first, max(last, end), before)
                continue
        merged.append((begin, end, span))
    return merged


def _is_pale(name: str) -> bool:
    return name.upper().startswith(BACKWARD)
