"""The report of a sweep over limits: what each configuration takes in time and energy, and which one to choose."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays.sizes import counted
from hpcdist.bench import power_pareto as pareto
from hpcdist.bench.power import GROUP
from hpcdist.bench.power_pareto import Candidate, Interval, Recommendation
from hpcdist.bench.results import Configuration, Repeat, Results
from hpcdist.bench.trial import OK
from hpcdist.errors import UsageError

SEED: Final = "power_seed"  # what the results file says of the sweep
DEVICES: Final = "power_devices"
LIMITED: Final = "power_limited"  # gpu, cpu, or nothing
DECLARED: Final = "power_declared"
WHOLE: Final = "node"  # the kind of a counter that counts all parts of a node
MARGIN: Final = 1.05  # what a device may draw above its limit before it is told


@dataclass(frozen=True)
class Row:
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
    s_per_token: Interval | None
    j_per_token: Interval | None
    mean_w: float | None
    edp_js: float | None
    total_j: float | None
    joules: Mapping[str, float]
    train_loss: float | None
    val_loss: float | None
    verdict: str
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """All configurations in the order of the sweep, and the choice among those whose energy is known."""

    rows: tuple[Row, ...]
    candidates: tuple[Candidate, ...]
    chosen: Recommendation
    notes: tuple[str, ...]
    provenance: Mapping[str, str]

    def row(self, name: str) -> Row:
        """Return the row of a candidate."""
        return next(row for row in self.rows if label(row, self.rows) == name)


def is_one(found: Results) -> bool:
    """Whether the results are those of a sweep over limits."""
    return SEED in found.provenance


def report(found: Results, objective: str, max_slowdown: float | None = None) -> Report:
    """Return what the results say. Raises UsageError for results of another kind of sweep, or a wrong objective."""
    if not is_one(found):
        raise UsageError("these are results of another sweep; `hpcdist report` shows them")
    names = {one.id: _label(one.name, one.ranks, found.configurations) for one in found.configurations}
    known = {one.id: candidate for one in found.configurations if (candidate := _candidate(one, names[one.id]))}
    verdicts = dict(zip(known, pareto.verdicts(list(known.values())), strict=True))
    rows = tuple(_row(one, verdicts.get(one.id, "")) for one in found.configurations)
    notes, trouble = _notes(found, rows)
    if trouble:
        pareto.recommend([], objective, max_slowdown)  # refuses what cannot be meant
        chosen = Recommendation(None, f"no recommendation: {trouble}")
    else:
        chosen = pareto.recommend(list(known.values()), objective, max_slowdown)
    return Report(rows, tuple(known.values()), chosen, tuple(notes), found.provenance)


def label(row: Row, rows: Sequence[Row]) -> str:
    """Return what a row is called where numbers of ranks may differ."""
    return _label(row.name, row.ranks, rows)


def _label(name: str, ranks: int, among: Sequence[Row | Configuration]) -> str:
    return f"{name} on {counted(ranks, 'rank')}" if len({one.ranks for one in among}) > 1 else name


def _good(configuration: Configuration) -> list[Repeat]:
    return [repeat for repeat in configuration.repeats if repeat.status == OK]


def _of(repeat: Repeat, name: str) -> Any:
    return repeat.summary.get(f"{GROUP}.{name}")


def _candidate(configuration: Configuration, name: str) -> Candidate | None:
    pairs = {repeat.number: (_of(repeat, "s_per_token"), _of(repeat, "j_per_token")) for repeat in _good(configuration)}
    known = {number: pair for number, pair in pairs.items() if all(value is not None and value > 0 for value in pair)}
    capped = any(
        _of(repeat, asked) is not None for repeat in _good(configuration) for asked in ("limit_w", "clock_mhz")
    )
    return Candidate(name, known, capped) if known else None


def _row(one: Configuration, verdict: str) -> Row:
    good = _good(one)
    bad = [repeat for repeat in one.repeats if repeat.status != OK]
    joules = {
        name.removeprefix(f"{GROUP}.").removesuffix("_j"): _median(good, name.removeprefix(f"{GROUP}."))
        for name in sorted({name for repeat in good for name in repeat.summary})
        if name.startswith(f"{GROUP}.")
        and name.endswith("_j")
        and name[len(GROUP) + 1 :] not in ("training_j", "total_j")
    }
    reasons = {"failed": bad[-1].reason} if bad else {}
    why = next((str(_of(repeat, "energy_reason")) for repeat in good if _of(repeat, "energy_reason")), "")
    figures = {name: _median(good, name) for name in ("limit_w", "clock_mhz", "mean_w", "edp_js", "total_j")}
    threads = _median(good, "threads")
    return Row(
        name=one.name,
        ranks=one.ranks,
        threads=None if threads is None else int(threads),
        in_force_w=min((value for repeat in good if (value := _of(repeat, "in_force_w")) is not None), default=None),
        ok=len(good),
        failed=len(bad),
        step_s=_steps(good),
        tokens_per_s=_middle([repeat.summary.get("tokens_per_s") for repeat in good]),
        s_per_token=_interval(good, "s_per_token"),
        j_per_token=_interval(good, "j_per_token"),
        joules={name: value for name, value in joules.items() if value is not None},
        train_loss=_middle([repeat.summary.get("train_loss") for repeat in good]),
        val_loss=_middle([repeat.summary.get("val_loss") for repeat in good]),
        verdict=verdict,
        reasons=reasons | ({"energy": why} if why else {}),
        **figures,
    )


def _steps(good: Sequence[Repeat]) -> float | None:
    """Return the median step of all repeats but the first of each, each that of its slowest rank."""
    slowest = [np.nanmax(repeat.samples["step_s"][1:], axis=1) for repeat in good if len(repeat.samples["step_s"]) > 1]
    return float(np.median(np.concatenate(slowest))) if slowest else None


def _interval(good: Sequence[Repeat], name: str) -> Interval | None:
    values = [value for repeat in good if (value := _of(repeat, name)) is not None and value > 0]
    return pareto.estimate([math.log(value) for value in values]) if values else None


def _median(good: Sequence[Repeat], name: str) -> float | None:
    return _middle([_of(repeat, name) for repeat in good])


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _notes(found: Results, rows: Sequence[Row]) -> tuple[list[str], str]:
    """Return what a reader has to know, and what stands against any recommendation ("" for nothing)."""
    lines, trouble = [], ""
    for name, what in (("failed", "failed"), ("energy", "no energy")):
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if name in row.reasons:
                by_reason.setdefault(row.reasons[name], []).append(label(row, rows))
        for reason, whose in by_reason.items():
            lines.append(f"{what}: {'all' if len(whose) == len(rows) > 1 else ', '.join(whose)}: {reason}")
    good = [repeat for one in found.configurations for repeat in _good(one)]
    kinds = {str(_of(repeat, "kinds")) for repeat in good if _of(repeat, "j_per_token") is not None}
    limited = found.provenance.get(LIMITED, "")
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
    if found.provenance.get(DECLARED):
        lines.append("energy is that of a declared model, not measured")
        if limited:
            trouble = trouble or "the declared model of energy does not know of limits"
    lines += _beyond(rows, limited, len(found.provenance.get(DEVICES, "").split(", ")))
    if len({repeat.git_commit for repeat in good}) > 1:
        lines.append("measured at several commits, which may differ in speed")
    return lines, trouble


def _beyond(rows: Sequence[Row], limited: str, devices: int) -> list[str]:
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
