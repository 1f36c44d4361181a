"""Report of a power sweep: time and energy of each configuration, the recommended one; text and JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.power import pareto
from hpcdist.bench.power.pareto import GROUP, EstimateInterval, ParetoCandidate, PowerRecommendation
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat, status_text
from hpcdist.errors import UsageError
from hpcdist.reporting import jsonable as json_values
from hpcdist.reporting.table import MISSING, aligned, text_of
from hpcdist.reporting.units import counted

SEED: Final = "power_seed"  # what the results file says of the sweep
DEVICES: Final = "power_devices"
LIMITED: Final = "power_limited"  # gpu, cpu, or nothing
DECLARED: Final = "power_declared"
WHOLE: Final = "node"  # the kind of a counter that counts all parts of a node
MARGIN: Final = 1.05  # what a device may draw above its limit before it is told


@dataclass(frozen=True)
class PowerRow:
    """One configuration; medians over its good repeats, None where nothing was measured, and ``reasons`` say why.

    ``in_force_w`` is the least that any device showed, ``step_s`` the median step. ``s_per_token`` and ``j_per_token``
    are geometric means with their intervals, of the training without checkpoints and validation; so are ``mean_w`` and
    ``edp_js``. ``joules`` are of the whole run, by kind.
    """

    name: str
    ranks: int
    threads: int | None
    limit_w: float | None
    clock_mhz: float | None
    in_force_w: float | None
    ok: int
    failed: int
    step_s: float | None
    tokens_per_s: float | None
    s_per_token: EstimateInterval | None
    j_per_token: EstimateInterval | None
    mean_w: float | None
    edp_js: float | None
    total_j: float | None
    joules: Mapping[str, float]
    train_loss: float | None
    val_loss: float | None
    verdict: str
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class PowerReport:
    """All configurations in the order of the sweep, and the choice among those whose energy is known."""

    rows: tuple[PowerRow, ...]
    candidates: tuple[ParetoCandidate, ...]
    chosen: PowerRecommendation
    notes: tuple[str, ...]
    provenance: Mapping[str, str]

    def row(self, name: str) -> PowerRow:
        """Return the row of a candidate."""
        return next(row for row in self.rows if label(row, self.rows) == name)


def is_power_sweep(results: SweepResults) -> bool:
    """Whether the results are those of a sweep over limits."""
    return SEED in results.provenance


def report(results: SweepResults, objective: str, max_slowdown: float | None = None) -> PowerReport:
    """Return the report of a power sweep. Raises UsageError for another kind of sweep, or a wrong objective."""
    if not is_power_sweep(results):
        raise UsageError("these are results of another sweep; `hpcdist report` shows them")
    names = {
        configuration.id: _label(configuration.name, configuration.ranks, results.configurations)
        for configuration in results.configurations
    }
    known = {
        configuration.id: candidate
        for configuration in results.configurations
        if (candidate := _candidate(configuration, names[configuration.id]))
    }
    verdicts = dict(zip(known, pareto.verdicts(list(known.values())), strict=True))
    rows = tuple(_row(configuration, verdicts.get(configuration.id, "")) for configuration in results.configurations)
    notes, trouble = _notes(results, rows)
    if trouble:
        pareto.recommend([], objective, max_slowdown)  # refuses what cannot be meant
        chosen = PowerRecommendation(None, f"no recommendation: {trouble}")
    else:
        chosen = pareto.recommend(list(known.values()), objective, max_slowdown)
    return PowerReport(rows, tuple(known.values()), chosen, tuple(notes), results.provenance)


def label(row: PowerRow, rows: Sequence[PowerRow]) -> str:
    """Return the name of a row, with its ranks where their numbers differ."""
    return _label(row.name, row.ranks, rows)


def _label(name: str, ranks: int, among: Sequence[PowerRow | SweepConfiguration]) -> str:
    return f"{name} on {counted(ranks, 'rank')}" if len({row.ranks for row in among}) > 1 else name


def _of(repeat: TrialRepeat, name: str) -> Any:
    return repeat.summary.get(f"{GROUP}.{name}")


def _candidate(configuration: SweepConfiguration, name: str) -> ParetoCandidate | None:
    good = configuration.good
    pairs = {repeat.number: (_of(repeat, "s_per_token"), _of(repeat, "j_per_token")) for repeat in good}
    known = {number: pair for number, pair in pairs.items() if all(value is not None and value > 0 for value in pair)}
    capped = any(_of(repeat, asked) is not None for repeat in good for asked in ("limit_w", "clock_mhz"))
    return ParetoCandidate(name, known, capped) if known else None


def _row(configuration: SweepConfiguration, verdict: str) -> PowerRow:
    good, bad = configuration.good, configuration.failed
    prefix = f"{GROUP}."
    names = sorted({name.removeprefix(prefix) for repeat in good for name in repeat.summary if name.startswith(prefix)})
    kinds = [name for name in names if name.endswith("_j") and name not in ("training_j", "total_j")]
    joules = {name.removesuffix("_j"): middle for name in kinds if (middle := _median(good, name)) is not None}
    reasons = {"failed": bad[-1].reason} if bad else {}
    why = next((str(_of(repeat, "energy_reason")) for repeat in good if _of(repeat, "energy_reason")), "")
    figures = {name: _median(good, name) for name in ("limit_w", "clock_mhz", "mean_w", "edp_js", "total_j")}
    threads = _median(good, "threads")
    return PowerRow(
        name=configuration.name,
        ranks=configuration.ranks,
        threads=None if threads is None else int(threads),
        in_force_w=min((value for repeat in good if (value := _of(repeat, "in_force_w")) is not None), default=None),
        ok=len(good),
        failed=len(bad),
        step_s=_steps(good),
        tokens_per_s=_middle(configuration.figures("tokens_per_s")),
        s_per_token=_interval(good, "s_per_token"),
        j_per_token=_interval(good, "j_per_token"),
        joules=joules,
        train_loss=_middle(configuration.figures("train_loss")),
        val_loss=_middle(configuration.figures("val_loss")),
        verdict=verdict,
        reasons=reasons | ({"energy": why} if why else {}),
        **figures,
    )


def _steps(good: Sequence[TrialRepeat]) -> float | None:
    """Return the median step of all repeats but the first of each, each that of its slowest rank."""
    slowest = [np.nanmax(repeat.samples["step_s"][1:], axis=1) for repeat in good if len(repeat.samples["step_s"]) > 1]
    return float(np.median(np.concatenate(slowest))) if slowest else None


def _interval(good: Sequence[TrialRepeat], name: str) -> EstimateInterval | None:
    values = [value for repeat in good if (value := _of(repeat, name)) is not None and value > 0]
    return pareto.estimate([math.log(value) for value in values]) if values else None


def _median(good: Sequence[TrialRepeat], name: str) -> float | None:
    return _middle([_of(repeat, name) for repeat in good])


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _notes(results: SweepResults, rows: Sequence[PowerRow]) -> tuple[list[str], str]:
    """Return the notes for readers, and the objection to any recommendation ("" for none)."""
    lines, trouble = [], ""
    for name, what in (("failed", "failed"), ("energy", "no energy")):
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if name in row.reasons:
                by_reason.setdefault(row.reasons[name], []).append(label(row, rows))
        for reason, whose in by_reason.items():
            lines.append(f"{what}: {'all' if len(whose) == len(rows) > 1 else ', '.join(whose)}: {reason}")
    good = [repeat for configuration in results.configurations for repeat in configuration.good]
    kinds = {str(_of(repeat, "kinds")) for repeat in good if _of(repeat, "j_per_token") is not None}
    limited = results.provenance.get(LIMITED, "")
    if len(kinds) > 1:
        trouble = f"energy is that of different parts: {' or '.join(sorted(kinds))}"
    elif kinds:
        parts = next(iter(kinds)).split(" + ")
        if limited and limited not in parts and WHOLE not in parts:
            trouble = f"the limits are those of {limited}, and energy is that of {kinds.copy().pop()}"
        missing = sorted({str(_of(repeat, "not_included")) for repeat in good if _of(repeat, "not_included")})
        lines.append(f"energy is that of {kinds.pop()}" + (f"; not included: {'; '.join(missing)}" if missing else ""))
    elif good:
        trouble = "energy was not measured (see `hpcdist energy sources`)"
    if results.provenance.get(DECLARED):
        lines.append("energy is that of a declared model, not measured")
        if limited:
            trouble = trouble or "the declared model of energy does not know of limits"
    lines += _beyond(rows, limited, len(results.provenance.get(DEVICES, "").split(", ")))
    if len({repeat.git_commit for repeat in good}) > 1:
        lines.append("measured at several commits, which may differ in speed")
    return lines, trouble


def _beyond(rows: Sequence[PowerRow], limited: str, devices: int) -> list[str]:
    """Return a line for each configuration whose devices drew more than they were allowed: in short trials they can."""
    lines = []
    for row in rows:
        if row.limit_w is None or row.mean_w is None or not row.total_j or limited not in row.joules:
            continue
        drawn_w = row.mean_w * row.joules[limited] / row.total_j / devices
        if drawn_w > MARGIN * row.limit_w:
            lines.append(
                f"{label(row, rows)}: a device drew {drawn_w:.3g} W in the mean: a limit holds for an average over "
                "seconds, and this training is too short for it, or the limit has no effect"
            )
    return lines


_PREFIXES: Final = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def jsonable(report: PowerReport) -> dict[str, Any]:
    """Return the report as JSON values; what was not measured is null."""
    shown = {"configurations": report.rows, "recommendation": report.chosen, "notes": report.notes}
    values: dict[str, Any] = json_values.jsonable({"provenance": report.provenance, **shown})
    return values


def text(path: Path, report: PowerReport) -> str:
    """Return the table as lines for people, the recommendation, and what they have to know."""
    if not report.rows:
        return f"{path}: no trial has ended yet"
    head = [("results", str(path)), ("started", report.provenance.get("created_utc", ""))]
    head += [("limits of", report.provenance.get(DEVICES, "")), ("processor", report.provenance.get("processor", ""))]
    lines = [f"{name:10} {value}" for name, value in head if value]
    choice = f"recommended: {report.chosen.reason}" if report.chosen.name else report.chosen.reason
    return "\n".join([*lines, "", *table(report), "", choice, *report.notes])


def table(report: PowerReport) -> list[str]:
    """Return head and rows as aligned lines; a column that no row fills is left out."""
    columns = [[title, *cells] for title, cells in _columns(report) if any(cell != MISSING for cell in cells)]
    return aligned(list(zip(*columns, strict=True)), (0, -2, -1))


def _columns(report: PowerReport) -> list[tuple[str, list[str]]]:
    rows = report.rows
    base = pareto.reference(report.candidates) if report.candidates else None
    joules, unit = _scaled([row.j_per_token for row in rows], "J")
    kinds = sorted({kind for row in rows for kind in row.joules})
    several = len({row.ranks for row in rows}) > 1
    return [
        ("configuration", [row.name for row in rows]),
        ("ranks", [str(row.ranks) if several else MISSING for row in rows]),
        ("W in force", [text_of(row.in_force_w, "g") for row in rows]),
        ("step ms", [text_of(row.step_s, ".2f", 1e-3) for row in rows]),
        ("tokens/s", [text_of(row.tokens_per_s, ",.0f") for row in rows]),
        ("mean W", [text_of(row.mean_w, ".1f") for row in rows]),
        (f"{unit}/token", joules),
        ("run J", [text_of(row.total_j, ",.1f") for row in rows]),
        *((f"{kind} J", [text_of(row.joules.get(kind), ",.1f") for row in rows]) for kind in kinds if len(kinds) > 1),
        ("EDP J s", [text_of(row.edp_js, ".4g") for row in rows]),
        ("time", [_against(report, row, base, "time") for row in rows]),
        ("energy", [_against(report, row, base, "energy") for row in rows]),
        ("train loss", [text_of(row.train_loss, ".4f") for row in rows]),
        ("front", [row.verdict or MISSING for row in rows]),
        ("status", [status_text(row.ok, row.failed) for row in rows]),
    ]


def _scaled(values: Sequence[EstimateInterval | None], unit: str) -> tuple[list[str], str]:
    """Return values with half of their intervals in percent, in the unit with the prefix that suits them."""
    known = [value.value for value in values if value is not None]
    scale, prefix = next((pair for pair in _PREFIXES if known and max(known) >= pair[0]), _PREFIXES[-1])
    return [
        MISSING if value is None else f"{value.value / scale:.4g}{_spread(value)}" for value in values
    ], prefix + unit


def _spread(value: EstimateInterval) -> str:
    if math.isnan(value.high):
        return ""
    percent = (value.high - value.low) / 2 / value.value * 100
    return " +-100 % or more" if percent >= 100 else f" +-{percent:.2g} %"


def _against(report: PowerReport, row: PowerRow, base: ParetoCandidate | None, what: str) -> str:
    """Return how much more than the reference, in percent."""
    own = next((candidate for candidate in report.candidates if candidate.name == label(row, report.rows)), None)
    if base is None or own is None:
        return MISSING
    return "=" if own is base else f"{(pareto.ratio(own, base, what).value - 1) * 100:+.1f} %"
