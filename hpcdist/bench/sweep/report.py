"""Report of a sweep: one row per configuration over its repeats, as text, Markdown, JSON or a plot."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.sweep.definition import flat
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat, status_text
from hpcdist.comm.record.timing import BytesMoved
from hpcdist.errors import UsageError
from hpcdist.reporting import plotting
from hpcdist.reporting.table import Catalogue, Figure
from hpcdist.reporting.units import counted


@dataclass(frozen=True)
class SweepRow:
    """Table row of one sweep configuration, with medians over the successful runs. None means unknown."""

    name: str
    ranks: int
    id: str
    ok: int
    failed: int
    tokens_per_s: dict[str, float] | None  # median, minimum and maximum
    step_s: dict[str, float] | None  # median and percentiles of all steps but the first, on the slowest rank
    bytes_sent_per_step: float | None  # maximum over the ranks, in messages
    bytes_moved_per_step: float | None  # also in shared memory and by the MPI library
    peak_bytes: float | None  # maximum over the ranks
    train_loss: float | None
    val_loss: float | None
    energy_j: float | None
    speed_unit: str = "tokens"
    counts_activations: bool = True
    reasons: dict[str, str] = field(default_factory=dict)  # reason of each unknown figure, by name

    @property
    def status(self) -> str:
        """Numbers of successful and failed runs as a text, such as "2 ok, 1 failed"."""
        return status_text(self.ok, self.failed)


def rows(results: SweepResults) -> list[SweepRow]:
    """Return a list of table rows, one for each configuration, in the order of ``results``."""
    return [_row(configuration) for configuration in results.configurations]


def _row(configuration: SweepConfiguration) -> SweepRow:
    good, bad = configuration.good, configuration.failed
    rates = configuration.figures("tokens_per_s")
    steps = _pooled(good, "step_s", first=1)
    figures: dict[str, Any] = {
        "tokens_per_s": {"median": _median(rates), "min": min(rates), "max": max(rates)} if rates else None,
        "step_s": dict(zip(("median", "p95", "p99"), np.percentile(steps, (50, 95, 99)).tolist(), strict=True))
        if len(steps)
        else None,
        # A parameter server makes no steps and has no such column. The summary of the run has its bytes.
        "bytes_sent_per_step": _sent(good) or _median(configuration.figures("bytes_sent_per_step")),
        "peak_bytes": max(filter(None, configuration.figures("peak_bytes_total")), default=None),
        **{name: _median(configuration.figures(name)) for name in ("train_loss", "val_loss", "energy_j")},
    }
    reasons = {name: _reason(name, good) for name, value in figures.items() if value is None and good}
    if bad:
        reasons["failed"] = bad[-1].reason
    origin = configuration.name, configuration.ranks, configuration.id, len(good), len(bad)
    figures["bytes_moved_per_step"] = _moved(configuration)
    if good and figures["bytes_moved_per_step"] is None:
        reasons["bytes_moved_per_step"] = reasons.get(
            "bytes_sent_per_step", "the summary of the run has no such figure"
        )
    for name in ("speed_unit", "counts_activations"):
        if values := configuration.figures(name):
            figures[name] = values[0]
    return SweepRow(*origin, **figures, reasons=reasons)


def _reason(name: str, good: Sequence[TrialRepeat]) -> str:
    summary = good[-1].summary
    reasons = [key for key in summary if key.endswith("_reason") and name.startswith(key.removesuffix("reason"))]
    if reasons:
        return str(summary[reasons[0]])
    return "the run did not measure it" if name in summary else "the summary of the run has no such figure"


def _pooled(good: Iterable[TrialRepeat], name: str, first: int = 0) -> np.ndarray:
    slowest = [max_of_ranks(repeat.samples[name][first:]) for repeat in good]
    return np.concatenate(slowest) if slowest else np.zeros(0)


def max_of_ranks(samples: np.ndarray) -> np.ndarray:
    """Return the maximum over ranks of each iteration in ``samples`` (iterations, ranks). Skip all-NaN iterations."""
    maxima = np.where(np.isnan(samples), -np.inf, samples).max(axis=1, initial=-np.inf)
    finite: np.ndarray = maxima[np.isfinite(maxima)]
    return finite


def _sent(good: Sequence[TrialRepeat]) -> float | None:
    # None if any value is unknown, since the maximum would be wrong. The first step splits communicators.
    if any(np.isnan(repeat.samples["sent_bytes"][1:]).any() for repeat in good):
        return None
    return _median(_pooled(good, "sent_bytes"))


def _moved(configuration: SweepConfiguration) -> float | None:
    ways = [configuration.figures(f"bytes_moved_per_step.{way}") for way in BytesMoved._fields]
    return sum(map(float, map(np.median, ways))) if all(ways) else None


def _median(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _range(median: float, row: SweepRow) -> str:
    assert row.tokens_per_s is not None
    return f"{median:,.0f} [{row.tokens_per_s['min']:,.0f}-{row.tokens_per_s['max']:,.0f}] {row.speed_unit}/s"


def _times(median: float, row: SweepRow) -> str:
    assert row.step_s is not None
    return " / ".join(f"{1e3 * value:.1f}" for value in row.step_s.values())


def _peak(value: float, row: SweepRow) -> str:
    return f"{value / 2**20:,.1f}{'' if row.counts_activations else ' + activations'}"


ROWS: Final[Catalogue[SweepRow]] = Catalogue(
    Figure("name", lambda row: row.name, title="configuration"),
    Figure("ranks", lambda row: row.ranks),
    Figure("tokens_per_s", lambda row: row.tokens_per_s and row.tokens_per_s["median"], _range,
           title="speed, median [range]", reason=lambda row: row.reasons.get("tokens_per_s", "")),
    Figure("step_s", lambda row: row.step_s and row.step_s["median"], _times,
           title="step ms median / p95 / p99", reason=lambda row: row.reasons.get("step_s", "")),
    Figure("bytes_moved_per_step", lambda row: row.bytes_moved_per_step, ",.3f", 1e6,
           title="MB moved a step (max over ranks)", reason=lambda row: row.reasons.get("bytes_moved_per_step", "")),
    Figure("peak_bytes", lambda row: row.peak_bytes, _peak, title="peak MiB a rank",
           reason=lambda row: row.reasons.get("peak_bytes", "")),
    Figure("train_loss", lambda row: row.train_loss, ".4f", title="train loss",
           reason=lambda row: row.reasons.get("train_loss", "")),
    Figure("energy_j", lambda row: row.energy_j, ",.1f", title="energy J",
           reason=lambda row: row.reasons.get("energy_j", "")),
    Figure("status", lambda row: row.status),
    name=lambda row: f"{row.name} ({row.ranks})",
)  # fmt: skip
_HEAD: Final = (("started", "created_utc"), ("commit", "git_commit"), ("processor", "processor"), ("cores", "cores"))


def text(path: Path, results: SweepResults) -> str:
    """Return the results of a sweep as a text table, followed by the lines of `notes`. ``path``: results file."""
    table = rows(results)
    if not table:
        return f"{path}: no trial has ended yet"
    head = [f"{name:10} {results.provenance[key]}" for name, key in _HEAD if key in results.provenance]
    lines = [f"results    {path}", *head, "", *ROWS.aligned(table, (0, -1))]
    remarks = notes(results, table)
    return "\n".join([*lines, *([""] if not ROWS.missing(table) else []), *remarks]).rstrip()


def markdown(results: SweepResults) -> str:
    """Return the results of a sweep as a Markdown table, followed by the lines of `notes`."""
    table = rows(results)
    return "\n".join([*ROWS.markdown(table), *(f"\n{note}" for note in notes(results, table))])


def notes(results: SweepResults, table: Sequence[SweepRow]) -> list[str]:
    """Return a list of text lines about failed runs and different hpcdist versions. ``table``: result of `rows`."""
    by_reason: dict[str, list[str]] = {}
    for row in table:
        if "failed" in row.reasons:
            by_reason.setdefault(row.reasons["failed"], []).append(f"{row.name} ({row.ranks})")
    lines = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    repeats = [repeat for configuration in results.configurations for repeat in configuration.repeats]
    commits, versions = ({getattr(repeat, name) for repeat in repeats} for name in ("git_commit", "hpcdist_version"))
    for made, what in ((commits, "at {} commits"), (versions - {""}, "with {} versions of hpcdist")):
        if len(made) > 1:
            lines.append(f"measured {what.format(len(made))}, which may differ in speed: {', '.join(sorted(made))}")
    return lines


def jsonable(path: Path, results: SweepResults) -> dict[str, Any]:
    """Return the results of a sweep as a dict for JSON. Unknown values are None. ``path``: results file."""
    configurations = [asdict(row) | {"status": row.status} for row in rows(results)]
    return {"results": str(path), "provenance": dict(results.provenance), "configurations": configurations}


def plot(results: SweepResults, file: Path) -> None:
    """Save the plot that `draw` makes of the sweep ``results`` as ``file``. Raises HpcdistError."""
    inches = plot_inches(results)
    plotting.check_plot(file)
    with plotting.chart_style(), plotting.drawing(file, *inches) as figure:
        draw(figure, results)


def plot_inches(results: SweepResults) -> tuple[float, float]:
    """Return (width, height) in inches of a plot of all configurations in ``results``."""
    measured = _measured(results)
    height = 1.2 + 1.2 * len({row.ranks for row in measured}) + 0.3 * len(measured)
    if swept(results, measured) is not None:
        return 8.0, 5.0
    return (12.0, max(7.0, height)) if scaling(measured) else (8.0, height)


def draw(figure: Any, results: SweepResults) -> None:
    """Draw the loss over the recipe key from `swept`, or the speeds if `swept` returns None. Raises UsageError."""
    measured = _measured(results)
    if (axis := swept(results, measured)) is not None:
        _loss_over(figure.subplots(), axis, measured)
        return
    curves = scaling(measured)
    panels = {ranks: [row for row in measured if row.ranks == ranks] for ranks in sorted({r.ranks for r in measured})}
    bars, right = figure.subfigures(1, 2, width_ratios=(3, 2)) if curves else (figure, None)
    counts = [len(panel) for panel in panels.values()]
    axes = bars.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    if right is not None:
        _curves(right, curves)
    for panel_axes, (ranks, panel) in zip(axes, panels.items(), strict=True):
        _bars(panel_axes, ranks, panel)
    units = "/s or ".join(sorted({row.speed_unit for row in measured}))
    axes[-1].set_xlabel(f"{units}/s (median and range of the repeats)")


def _measured(results: SweepResults) -> list[SweepRow]:
    measured = [row for row in rows(results) if row.tokens_per_s is not None]
    if not measured:
        raise UsageError("no trial was successful, so there is nothing to plot")
    return measured


@dataclass(frozen=True)
class SweptKey:
    """Numeric recipe key that varies in a sweep in which no other numeric key varies."""

    key: str
    values: Mapping[str, float]  # value of the key, by row id
    labels: Mapping[str, str]  # values of the other varying keys as text, by row id
    loss: str  # field of `SweepRow`: val_loss, or train_loss if a configuration has no validation


def swept(results: SweepResults, measured: Sequence[SweepRow]) -> SweptKey | None:
    """Return the only numeric recipe key that varies, or None if there is not exactly one, or if all losses are equal.

    ``measured``: rows of successful trials.
    """
    recipes = {c.id: dict(flat(tomllib.loads(c.recipe))) for c in results.configurations}
    recipes = {row.id: recipes[row.id] | {"ranks": counted(row.ranks, "rank")} for row in measured}
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    varied = [key for key in keys if len({str(recipe.get(key)) for recipe in recipes.values()}) > 1]
    numeric = [key for key in varied if all(_is_number(recipe.get(key)) for recipe in recipes.values())]
    finite = [row for row in measured if row.train_loss is not None or row.val_loss is not None]
    loss = next((n for n in ("val_loss", "train_loss") if all(getattr(r, n) is not None for r in finite)), None)
    if len(numeric) != 1 or loss is None or len({getattr(row, loss) for row in finite}) < 2:
        return None
    others = [key for key in varied if key != numeric[0]]
    labels = {
        row_id: ", ".join(str(recipe[key]) for key in others if key in recipe) for row_id, recipe in recipes.items()
    }
    values = {row_id: float(recipe[numeric[0]]) for row_id, recipe in recipes.items()}
    return SweptKey(numeric[0], values, labels, loss)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value_text(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:g}"


def _loss_over(axes: Any, axis: SweptKey, measured: Sequence[SweepRow]) -> None:
    finite = [row for row in measured if getattr(row, axis.loss) is not None]
    points = sorted((axis.values[row.id], getattr(row, axis.loss), axis.labels[row.id]) for row in finite)
    for index, label in enumerate(dict.fromkeys(axis.labels[row.id] for row in finite)):
        line = [(value, loss) for value, loss, of in points if of == label]
        axes.plot(
            *zip(*line, strict=True), "o-", color=plotting.CYCLE[index % len(plotting.CYCLE)], label=label or None
        )
    value, loss, label = min(points, key=lambda point: point[1])
    axes.plot([value], [loss], "*", color=plotting.ORANGE, markersize=15, label="best", zorder=3)
    axes.annotate(f"{_value_text(value)}: {loss:.4f}", (value, loss), (0, -16), textcoords="offset points", ha="center")
    values = sorted({value for value, _, _ in points})
    if values[0] > 0 and values[-1] > 10 * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [_value_text(value) for value in values])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel(axis.key)
    axes.set_ylabel("validation loss" if axis.loss == "val_loss" else "training loss")
    plotting.legend(axes)


def scaling(measured: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """Return {configuration name: rows, sorted by ranks} of configurations measured on several numbers of ranks."""
    by_name: dict[str, list[SweepRow]] = {}
    for row in sorted(measured, key=lambda row: row.ranks):
        by_name.setdefault(row.name, []).append(row)
    return {name: rows for name, rows in by_name.items() if len({row.ranks for row in rows}) > 1}


def efficiency(rows: Sequence[SweepRow]) -> list[float]:
    """Return a list of parallel efficiencies: speed per rank relative to the first row. Skip rows without a speed."""
    rates = [row.tokens_per_s["median"] / row.ranks for row in rows if row.tokens_per_s is not None]
    return [rate / rates[0] for rate in rates]


def _curves(figure: Any, curves: Mapping[str, Sequence[SweepRow]]) -> None:
    above, middle, below = figure.subplots(3, 1, sharex=True)
    for index, (name, rows) in enumerate(curves.items()):
        ranks, colour = [row.ranks for row in rows], plotting.CYCLE[index % len(plotting.CYCLE)]
        above.plot(ranks, efficiency(rows), "o-", color=colour, label=name)
        for axes, key, unit in ((middle, "bytes_sent_per_step", 1e6), (below, "peak_bytes", 2**20)):
            values = [getattr(row, key) for row in rows]
            axes.plot(ranks, [np.nan if value is None else value / unit for value in values], "o-", color=colour)
    above.axhline(1.0, color="0.6", linewidth=0.8)
    above.set_ylabel("efficiency")
    middle.set_ylabel("MB sent a step")
    below.set_ylabel("peak MiB a rank")
    below.set_xlabel("ranks")
    below.set_xticks(sorted({row.ranks for rows in curves.values() for row in rows}))
    above.legend(fontsize=7)


def _bars(axes: Any, ranks: int, panel: Sequence[SweepRow]) -> None:
    ordered = sorted(panel, key=lambda row: -row.tokens_per_s["median"] if row.tokens_per_s is not None else 0.0)
    rates = [row.tokens_per_s for row in ordered if row.tokens_per_s is not None]
    median = np.array([rate["median"] for rate in rates])
    spread = np.array([[rate["median"] - rate["min"], rate["max"] - rate["median"]] for rate in rates]).T  # (2, rows)
    positions, others = np.arange(len(ordered)), [plotting.BLUE] * (len(ordered) - 1)
    bars = axes.barh(positions, median, xerr=spread, capsize=3, color=[plotting.ORANGE, *others], alpha=0.8)
    if others:
        axes.bar_label(bars, ["fastest", *("" for _ in others)], padding=5, fontsize=8)
    axes.margins(x=0.12)
    axes.set_yticks(positions, [row.name for row in ordered], fontsize=8)
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.set_title(counted(ranks, "rank"), fontsize=10)
