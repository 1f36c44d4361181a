"""Report of a sweep: one row per configuration over its repeats, as text, Markdown, JSON or a picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat, status_text
from hpcdist.comm.record.timing import BytesMoved
from hpcdist.errors import UsageError
from hpcdist.reporting import table as text_table
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, text_of


@dataclass(frozen=True)
class SweepRow:
    """The figures of one configuration; None is what was not measured, and ``reasons`` says why, by figure.

    ``tokens_per_s`` is the median, minimum and maximum over the repeats. ``step_s`` is the median, 95th and 99th
    percentile over all steps of all repeats but the first step of each, which compiles and connects; a step takes as
    long as its slowest rank, from one row of its metrics to the next, everything included. ``bytes_sent_per_step`` is
    the median step's maximum over the ranks. ``bytes_moved_per_step`` adds the bytes moved through shared memory and by
    the MPI library. ``peak_bytes`` is the most bytes that one rank held. The rest are medians.
    """

    name: str
    ranks: int
    id: str
    ok: int
    failed: int
    tokens_per_s: dict[str, float] | None
    step_s: dict[str, float] | None
    bytes_sent_per_step: float | None
    bytes_moved_per_step: float | None
    peak_bytes: float | None
    train_loss: float | None
    val_loss: float | None
    energy_j: float | None
    speed_unit: str = "tokens"
    counts_activations: bool = True
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """Numbers of repeats by the way they ended."""
        return status_text(self.ok, self.failed)


def rows(results: SweepResults) -> list[SweepRow]:
    """Return a row for each configuration, in the order of the results."""
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
        # A rank that serves without steps of its own has no such column; the run's summary knows.
        "bytes_sent_per_step": _sent(good) or _median(configuration.figures("bytes_sent_per_step")),
        "peak_bytes": max(filter(None, configuration.figures("peak_bytes_total")), default=None),
        **{name: _median(configuration.figures(name)) for name in ("train_loss", "val_loss", "energy_j")},
    }
    reasons = {name: _reason(name, good) for name, value in figures.items() if value is None and good}
    if bad:
        reasons["failed"] = bad[-1].reason
    known = configuration.name, configuration.ranks, configuration.id, len(good), len(bad)
    figures["bytes_moved_per_step"] = _moved(configuration)
    for name in ("speed_unit", "counts_activations"):
        if values := configuration.figures(name):
            figures[name] = values[0]
    return SweepRow(*known, **figures, reasons=reasons)


def _reason(name: str, good: Sequence[TrialRepeat]) -> str:
    """Return why a figure is missing: in the words of the run, which has a key like bytes_sent_reason."""
    summary = good[-1].summary
    reasons = [key for key in summary if key.endswith("_reason") and name.startswith(key.removesuffix("reason"))]
    if reasons:
        return str(summary[reasons[0]])
    return "the run did not measure it" if name in summary else "the summary of the run has no such figure"


def _pooled(good: Iterable[TrialRepeat], name: str, first: int = 0) -> np.ndarray:
    """Return the known samples of all repeats, each the maximum over the ranks, from iteration ``first`` on."""
    slowest = [most_of_ranks(repeat.samples[name][first:]) for repeat in good]
    return np.concatenate(slowest) if slowest else np.zeros(0)


def most_of_ranks(samples: np.ndarray) -> np.ndarray:
    """Return the maximum of (iterations, ranks) over the ranks that know it, without iterations where none does."""
    most = np.where(np.isnan(samples), -np.inf, samples).max(axis=1, initial=-np.inf)
    known: np.ndarray = most[np.isfinite(most)]
    return known


def _sent(good: Sequence[TrialRepeat]) -> float | None:
    """Return the bytes of the median step; None when any rank of any step does not know: a maximum would lie.

    The first step is left out, as for times: it splits communicators.
    """
    if any(np.isnan(repeat.samples["sent_bytes"][1:]).any() for repeat in good):
        return None
    return _median(_pooled(good, "sent_bytes"))


def _moved(configuration: SweepConfiguration) -> float | None:
    """Return the bytes that a rank moved a step in every way, the median over the repeats; None if a way is unknown."""
    ways = [configuration.figures(f"bytes_moved_per_step.{way}") for way in BytesMoved._fields]
    return sum(map(float, map(np.median, ways))) if all(ways) else None


def _median(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def _range(rates: Mapping[str, float] | None, unit: str) -> str:
    if rates is None:
        return MISSING
    return f"{rates['median']:,.0f} [{rates['min']:,.0f}-{rates['max']:,.0f}] {unit}/s"


def _times(step_s: Mapping[str, float] | None) -> str:
    return MISSING if step_s is None else " / ".join(f"{1e3 * value:.1f}" for value in step_s.values())


def _peak(row: SweepRow) -> str:
    text = text_of(row.peak_bytes, ",.1f", 2**20)
    return text if row.counts_activations or row.peak_bytes is None else f"{text} + activations"


_COLUMNS: Final[text_table.Columns[SweepRow]] = (
    ("configuration", lambda row: row.name),
    ("ranks", lambda row: str(row.ranks)),
    ("speed, median [range]", lambda row: _range(row.tokens_per_s, row.speed_unit)),
    ("step ms median / p95 / p99", lambda row: _times(row.step_s)),
    ("MB moved a step (max over ranks)", lambda row: text_of(row.bytes_moved_per_step, ",.3f", 1e6)),
    ("peak MiB a rank", _peak),
    ("train loss", lambda row: text_of(row.train_loss, ".4f")),
    ("energy J", lambda row: text_of(row.energy_j, ",.1f")),
    ("status", lambda row: row.status),
)


def text(path: Path, results: SweepResults) -> str:
    """Return the table as lines for people, and below it why figures are missing and trials failed."""
    table = rows(results)
    if not table:
        return f"{path}: no trial has ended yet"
    head = [
        f"results    {path}",
        *(f"{name:10} {results.provenance[key]}" for name, key in _HEAD if key in results.provenance),
    ]
    lines = text_table.aligned(text_table.rows_of(_COLUMNS, table), (0, -1))
    return "\n".join([*head, "", *lines, "", *notes(results, table)]).rstrip()


_HEAD: Final = (("started", "created_utc"), ("commit", "git_commit"), ("processor", "processor"), ("cores", "cores"))


def markdown(results: SweepResults) -> str:
    """Return the table as Markdown, with the notes below it."""
    table = rows(results)
    lines = text_table.markdown(text_table.rows_of(_COLUMNS, table))
    return "\n".join([*lines, *(f"\n{note}" for note in notes(results, table))])


def notes(results: SweepResults, table: Sequence[SweepRow]) -> list[str]:
    """Return a line for each reason that a figure is missing or a trial failed, and for what forbids comparing."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in table:
        for name, reason in row.reasons.items():
            by_reason.setdefault((name, reason), []).append(f"{row.name} ({row.ranks})")
    lines, measured = [], sum(1 for row in table if row.ok)
    for (name, reason), names in by_reason.items():
        whose = "all" if len(names) == measured > 1 else ", ".join(names)
        lines.append(f"{', '.join(names)}: {reason}" if name == "failed" else f"no {name} of {whose}: {reason}")
    repeats = [repeat for configuration in results.configurations for repeat in configuration.repeats]
    commits, versions = ({getattr(repeat, name) for repeat in repeats} for name in ("git_commit", "hpcdist_version"))
    for made, what in ((commits, "at {} commits"), (versions - {""}, "with {} versions of hpcdist")):
        if len(made) > 1:
            lines.append(f"measured {what.format(len(made))}, which may differ in speed: {', '.join(sorted(made))}")
    return lines


def jsonable(path: Path, results: SweepResults) -> dict[str, Any]:
    """Return the report as JSON values; what was not measured is null."""
    configurations = [asdict(row) | {"status": row.status} for row in rows(results)]
    return {"results": str(path), "provenance": dict(results.provenance), "configurations": configurations}


def plot(results: SweepResults, file: Path) -> None:
    """Draw the speed of each configuration, a panel for each number of ranks, with the range of the repeats.

    Where configurations were measured on several numbers of ranks, curves over the ranks stand beside them: efficiency,
    bytes and memory.

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    known = [row for row in rows(results) if row.tokens_per_s is not None]
    if not known:
        raise UsageError("no trial has ended well, so there is nothing to plot")
    panels = {ranks: [row for row in known if row.ranks == ranks] for ranks in sorted({row.ranks for row in known})}
    counts = [len(panel) for panel in panels.values()]
    curves = scaling(known)
    height = 1.2 * len(panels) + 0.3 * sum(counts)
    size = (12, max(7.0, height)) if curves else (8, height)
    with drawing(file, *size) as figure:
        bars, beside = figure.subfigures(1, 2, width_ratios=(3, 2)) if curves else (figure, None)
        axes = bars.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
        if beside is not None:
            _curves(beside, curves)
        for axis, (ranks, panel) in zip(axes, panels.items(), strict=True):
            _bars(axis, ranks, panel)
        units = "/s or ".join(sorted({row.speed_unit for row in known}))
        axes[-1].set_xlabel(f"{units}/s (median and range of the repeats)")


def scaling(known: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """Return the rows of each configuration that was measured on several numbers of ranks, by name, fewest first."""
    by_name: dict[str, list[SweepRow]] = {}
    for row in sorted(known, key=lambda row: row.ranks):
        by_name.setdefault(row.name, []).append(row)
    return {name: rows for name, rows in by_name.items() if len({row.ranks for row in rows}) > 1}


def efficiency(rows: Sequence[SweepRow]) -> list[float]:
    """Return the speed per rank of each row relative to the first of ``rows``. All rows have been measured."""
    rates = [row.tokens_per_s["median"] / row.ranks for row in rows if row.tokens_per_s is not None]
    return [rate / rates[0] for rate in rates]


def _curves(figure: Any, curves: Mapping[str, Sequence[SweepRow]]) -> None:
    """Draw efficiency, bytes and memory over the number of ranks, a line for each configuration."""
    above, middle, below = figure.subplots(3, 1, sharex=True)
    for name, rows in curves.items():
        ranks = [row.ranks for row in rows]
        above.plot(ranks, efficiency(rows), "o-", label=name)
        for axes, key, unit in ((middle, "bytes_sent_per_step", 1e6), (below, "peak_bytes", 2**20)):
            values = [getattr(row, key) for row in rows]
            axes.plot(ranks, [np.nan if value is None else value / unit for value in values], "o-")
    above.axhline(1.0, color="0.6", linewidth=0.8)
    above.set_ylabel("efficiency")
    middle.set_ylabel("MB sent a step")
    below.set_ylabel("peak MiB a rank")
    below.set_xlabel("ranks")
    below.set_xticks(sorted({row.ranks for rows in curves.values() for row in rows}))
    above.legend(fontsize=7)


def _bars(axes: Any, ranks: int, panel: Sequence[SweepRow]) -> None:
    rates = [row.tokens_per_s for row in panel if row.tokens_per_s is not None]
    median = np.array([rate["median"] for rate in rates])
    spread = np.array([[rate["median"] - rate["min"], rate["max"] - rate["median"]] for rate in rates]).T  # (2, rows)
    places = np.arange(len(panel))
    axes.barh(places, median, xerr=spread, capsize=3, color="C0", alpha=0.8)
    axes.set_yticks(places, [row.name for row in panel], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{ranks} ranks", fontsize=10)


def read(path: Path) -> SweepResults:
    """Read a results file; its sweep may be under way. Raises StorageError."""
    return results.read(path)
