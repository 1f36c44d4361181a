"""Report of the power study: a table with the Pareto front, the recommendation, notes, and the plot."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.power import pareto
from benchmarks.power.pareto import Candidate, Interval, Recommendation
from hpcdist.bench.sweep import report as sweep_report
from hpcdist.bench.sweep.report import SweepRow
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults
from hpcdist.bench.sweep.trial import TrialOutcome
from hpcdist.errors import UsageError
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, Catalogue, Figure, aligned
from hpcdist.reporting.units import counted, format_joules

GROUP: Final = "power"  # group of the figures in the summary of a trial
# Attributes of the results file
SEED: Final = "power_seed"
DEVICES: Final = "power_devices"
LIMITED: Final = "power_limited"  # "gpu", "cpu" or ""
DECLARED: Final = "power_declared"
WHOLE: Final = "node"  # the kind of an energy counter that includes all devices of a node
TRAINING: Final = "training"
MARGIN: Final = 1.05  # tolerated ratio of the mean power of a device to its limit
TOKENS: Final = 1e6  # unit of the plot


def figures(outcome: TrialOutcome) -> dict[str, float | str | None]:
    """Return time and energy of the training in a good trial, without checkpoints and validation.

    Unknown figures are None; ``energy_reason`` has the reason. ``edp_js``: energy-delay product in J s.
    """
    summary = outcome.summary
    seconds = _finite(summary.get("seconds_by_phase", {}).get(TRAINING))
    joules = _finite(summary.get("energy_j_by_phase", {}).get(TRAINING))
    tokens = float(np.sum(outcome.samples["tokens"].values)) if "tokens" in outcome.samples else None
    reason = summary.get("energy_reason_by_phase", {}).get(TRAINING) or summary.get("energy_reason")
    kinds = summary.get("energy_j_by_kind", {})
    return {
        "training_s": seconds,
        "training_j": joules,
        "tokens": tokens,
        "s_per_token": _quotient(seconds, tokens),
        "j_per_token": _quotient(joules, tokens),
        "mean_w": _quotient(joules, seconds),
        "edp_js": None if joules is None or seconds is None else joules * seconds,
        "total_j": _finite(summary.get("energy_j")),
        **{f"{kind}_j": _finite(value) for kind, value in kinds.items()},
        "kinds": " + ".join(sorted(kinds)),
        "not_included": "; ".join(map(str, summary.get("energy_not_included", ()))),
        "energy_reason": str(reason or "the run did not measure it") if joules is None else "",
    }


def _finite(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _quotient(value: float | None, divisor: float | None) -> float | None:
    return value / divisor if value is not None and divisor else None


@dataclass(frozen=True)
class Row:
    """A configuration with its verdict. ``candidate`` is None if time or energy is unknown."""

    name: str
    sweep: SweepRow
    configuration: SweepConfiguration
    candidate: Candidate | None
    verdict: str

    def values(self, figure: str) -> list[Any]:
        """Return a figure of the good repeats that measured it."""
        return self.configuration.figures(f"{GROUP}.{figure}")

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the good repeats, or None if no repeat measured it."""
        return float(statistics.median(values)) if (values := self.values(figure)) else None

    @property
    def in_force_w(self) -> float | None:
        """Lowest power limit in W that the devices reported."""
        return min(self.values("in_force_w"), default=None)


@dataclass(frozen=True)
class Summary:
    """All configurations in the order of the study, and the recommendation."""

    rows: Sequence[Row]
    chosen: Recommendation
    notes: Sequence[str]
    provenance: Mapping[str, str]

    @property
    def candidates(self) -> list[Candidate]:
        """Configurations with both time and energy."""
        return [row.candidate for row in self.rows if row.candidate is not None]


def summarize(results: SweepResults, objective: str, max_slowdown: float | None = None) -> Summary:
    """Return the summary of a results file. Raises UsageError for a file of another benchmark."""
    if SEED not in results.provenance:
        raise UsageError("this file has the results of another benchmark; `hpcdist report` shows it")
    several = len({configuration.ranks for configuration in results.configurations}) > 1
    candidates: list[Candidate | None] = []
    names = []
    for configuration in results.configurations:
        ranks = f" on {counted(configuration.ranks, 'rank')}" if several else ""
        names.append(configuration.name + ranks)
        candidates.append(_candidate(configuration, names[-1]))
    complete = [candidate for candidate in candidates if candidate is not None]
    verdicts = iter(pareto.verdicts(complete))
    rows = [
        Row(name, sweep, configuration, candidate, next(verdicts) if candidate else MISSING)
        for name, sweep, configuration, candidate in zip(
            names, sweep_report.rows(results), results.configurations, candidates, strict=True
        )
    ]
    notes, objection = _notes(results, rows)
    if objection:
        return Summary(rows, Recommendation(None, f"no recommendation: {objection}"), notes, results.provenance)
    return Summary(rows, pareto.recommend(complete, objective, max_slowdown), notes, results.provenance)


def _candidate(configuration: SweepConfiguration, name: str) -> Candidate | None:
    pairs = {
        repeat.number: tuple(repeat.summary.get(f"{GROUP}.{figure}") for figure in ("s_per_token", "j_per_token"))
        for repeat in configuration.good
    }
    complete = {number: (s, j) for number, (s, j) in pairs.items() if s is not None and j is not None and min(s, j) > 0}
    limited = any(configuration.figures(f"{GROUP}.{figure}") for figure in ("limit_w", "clock_mhz"))
    return Candidate(name, complete, limited) if complete else None


def _notes(results: SweepResults, rows: Sequence[Row]) -> tuple[list[str], str]:
    """Return notes for the reader, and the reason why nothing can be recommended, or ""."""
    lines, objection = sweep_report.notes(results, [row.sweep for row in rows]), ""
    summaries = [repeat.summary for configuration in results.configurations for repeat in configuration.good]
    measured = [summary for summary in summaries if summary.get(f"{GROUP}.j_per_token") is not None]
    kinds = sorted({str(summary.get(f"{GROUP}.kinds")) for summary in measured})
    missing = sorted({str(text) for summary in measured if (text := summary.get(f"{GROUP}.not_included"))})
    limited = results.provenance.get(LIMITED, "")
    if len(kinds) > 1:
        objection = f"the energy includes different devices: {' or '.join(kinds)}"
    elif kinds:
        if limited and not {limited, WHOLE} & set(kinds[0].split(" + ")):
            objection = f"the limits apply to {limited}, but the energy includes only {kinds[0]}"
        lines.append(f"the energy includes {kinds[0]}" + (f"; not included: {'; '.join(missing)}" if missing else ""))
    elif summaries:
        objection = "energy was not measured (see `hpcdist energy sources`)"
    if results.provenance.get(DECLARED):
        lines.append("the energy is from a declared model, not measured")
        if limited:
            objection = objection or "the declared energy model does not depend on the limits"
    devices = len(results.provenance.get(DEVICES, "").split(", "))
    return [*lines, *(line for row in rows if (line := _excess(row, limited, devices)))], objection


def _excess(row: Row, limited: str, devices: int) -> str:
    """Return a note if the mean power of a device exceeded its limit, or ""."""
    figures = [row.median(name) for name in ("limit_w", "mean_w", f"{limited}_j", "total_j")]
    if not all(figures):
        return ""
    limit_w, mean_w, device_j, total_j = map(float, filter(None, figures))
    device_w = mean_w * device_j / total_j / devices
    if device_w <= MARGIN * limit_w:
        return ""
    return (
        f"{row.name}: a device used {device_w:.3g} W on average: a limit applies to an average over seconds, so this "
        "training is too short, or the limit has no effect"
    )


def lines(summary: Summary) -> list[str]:
    """Return the table without empty columns, the recommendation and the notes."""
    if not summary.rows:
        return ["no trial has ended yet"]
    titles = (("started", "created_utc"), ("limits of", DEVICES), ("processor", "processor"))
    head = [f"{title:10} {text}" for title, name in titles if (text := summary.provenance.get(name))]
    catalogue = _catalogue(summary)
    cells = catalogue.rows(summary.rows)
    columns = [column for column in zip(*cells, strict=True) if set(column[1:]) != {MISSING}]
    table = aligned(list(zip(*columns, strict=True)), (0, -2, -1))
    choice = f"recommended: {summary.chosen.reason}" if summary.chosen.name else summary.chosen.reason
    return [*head, "", *table, "", choice, *catalogue.missing(summary.rows), *summary.notes]


def _catalogue(summary: Summary) -> Catalogue[Row]:
    base = pareto.reference(summary.candidates) if summary.candidates else None

    def relative(objective: str) -> Callable[[Row], str]:
        def change(row: Row) -> str:
            if base is None or row.candidate is None:
                return MISSING
            ratio = pareto.ratio(row.candidate, base, objective).value
            return "=" if row.candidate is base else f"{(ratio - 1) * 100:+.1f} %"

        return change

    return Catalogue(
        Figure("configuration", lambda row: row.name),
        Figure("W in force", lambda row: row.in_force_w, "g"),
        Figure("step ms", lambda row: row.sweep.step_s and row.sweep.step_s["median"], ".2f", 1e-3),
        Figure("tokens/s", lambda row: row.sweep.tokens_per_s and row.sweep.tokens_per_s["median"], ",.0f"),
        Figure("mean W", lambda row: row.median("mean_w"), ".1f"),
        Figure("energy/token", lambda row: row.candidate and _energy(row.candidate),
               reason=lambda row: "".join(row.values("energy_reason")[:1])),
        Figure("EDP J s", lambda row: row.median("edp_js"), ".4g"),
        Figure("time", relative("time")),
        Figure("energy", relative("energy")),
        Figure("train loss", lambda row: row.sweep.train_loss, ".4f"),
        Figure("front", lambda row: row.verdict),
        Figure("status", lambda row: row.sweep.status),
    )  # fmt: skip


def _energy(candidate: Candidate) -> str:
    energy = _interval(candidate, "energy")
    percent = (energy.high - energy.low) / 2 / energy.value * 100
    return format_joules(energy.value) + ("" if math.isnan(percent) else f" +-{min(percent, 999):.3g} %")


def _interval(candidate: Candidate, objective: str) -> Interval:
    return pareto.estimate(list(candidate.logarithms(objective).values()))


CHOSEN: Final = "recommended"
BLUE: Final = "#1f6f8b"
STYLES: Final = {  # verdict -> label, marker, its size, colours of its edge and of its inside
    pareto.FRONT: ("on the Pareto front", "o", 7, BLUE, BLUE),
    pareto.NEAR: ("worse, but within the noise", "o", 7, BLUE, "white"),
    pareto.BEHIND: ("worse in time and energy", "o", 7, "#a9b0b7", "#a9b0b7"),
    CHOSEN: ("recommended", "*", 14, "#d1495b", "#d1495b"),
}


def plot(summary: Summary, file: Path) -> None:
    """Draw the time and the energy of a million tokens with 95 % intervals. Raises UsageError without candidates."""
    if not summary.candidates:
        raise UsageError("no configuration has both time and energy, so there is nothing to draw")
    intervals = np.array(  # (candidate, time and energy, value and low and high)
        [[_bounds(candidate, name) for name in ("time", "energy")] for candidate in summary.candidates]
    )
    verdicts = np.array([row.verdict for row in summary.rows if row.candidate is not None])
    chosen = np.array([candidate.name == summary.chosen.name for candidate in summary.candidates])
    with drawing(file, 8.5, 6.0) as figure:
        from matplotlib.ticker import EngFormatter

        axes = figure.subplots()
        for bounds, setter in zip(np.moveaxis(intervals, 1, 0), (axes.set_xlim, axes.set_ylim), strict=True):
            setter(*_frame(*bounds.T))
        front = intervals[verdicts == pareto.FRONT, :, 0]
        x, y = front[np.argsort(front[:, 0])].T
        axes.step([x[0], *x, axes.get_xlim()[1]], [axes.get_ylim()[1], *y, y[-1]], where="post", color=BLUE)
        for kind, (text, marker, size, colour, inside) in STYLES.items():
            points = intervals[chosen if kind == CHOSEN else (verdicts == kind) & ~chosen]
            if len(points):
                (x, y), errors = points[:, :, 0].T, np.abs(points[:, :, 1:] - points[:, :, :1])
                axes.errorbar(
                    x, y, xerr=errors[:, 0].T, yerr=errors[:, 1].T, fmt=marker, color=colour, label=text, capsize=2.5,
                    elinewidth=1, markersize=size, markerfacecolor=inside, zorder=4,
                )  # fmt: skip
        for candidate, point in zip(summary.candidates, intervals[:, :, 0], strict=True):
            axes.annotate(candidate.name, point, xytext=(7, 7), textcoords="offset points", fontsize=9, zorder=5)
        axes.xaxis.set_major_formatter(EngFormatter("s"))
        axes.yaxis.set_major_formatter(EngFormatter("J"))
        axes.set_xlabel("time of a million tokens")
        axes.set_ylabel("energy of a million tokens")
        devices = summary.provenance.get(DEVICES, "") or summary.provenance.get("processor", "")
        repeats = max(len(candidate.repeats) for candidate in summary.candidates)
        axes.set_title(f"{devices[:80]}; up to {counted(repeats, 'repeat')}; bars are 95 % intervals", fontsize=9)
        axes.legend(fontsize=8.5, loc="upper right")


def _bounds(candidate: Candidate, objective: str) -> list[float]:
    interval = _interval(candidate, objective)
    ends = [interval.value if math.isnan(end) else end for end in (interval.low, interval.high)]
    return [TOKENS * value for value in (interval.value, *ends)]


def _frame(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float]:
    """Return axis limits with all ``values`` and their intervals, but truncate very wide intervals."""
    least, most = values.min(), values.max()
    room = max(0.12 * (most - least), 0.02 * most)
    left, right = max(low.min(), least - 4 * room), min(high.max(), most + 4 * room)
    return max(0.0, left - room), right + 1.6 * room
