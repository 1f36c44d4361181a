"""Energy metrics: history, kWh of the site, emissions, cost, energy-delay products, joules to a target loss.

Emissions are kWh at the socket x PUE x the carbon intensity of the grid. All functions but `read` are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.constants import ENERGY_COLUMNS, ENERGY_GROUP, ENERGY_SAMPLES, J_PER_KWH
from hpcdist.energy.node_rows import TABLES
from hpcdist.energy.report import NODE
from hpcdist.hdf5 import files
from hpcdist.hdf5.datasets import texts
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import json_number

BLOCK: Final = 1 << 16  # rows read at once
MOST_BLOCKS: Final = 1024  # with more samples, a start may appear shorter by the time of a block
POINTS: Final = (64, 16384)  # samples of a source to keep: per block at least, and of all blocks about
NO_INTENSITY: Final = "no carbon intensity is known: set energy.carbon_g_per_kwh, with energy.carbon_source"
NO_PRICE: Final = "no price is known: set energy.price_per_kwh"
NO_ENERGY: Final = "the energy is not known"
SMOOTHED_SHARE: Final = 0.02  # of the steps: losses are averaged over so many steps before the comparison
MIN_LOSSES: Final = 5  # in this average


@dataclass(frozen=True)
class SourceHistory:
    """Joules of one energy source over time, in one start (execution) of a run."""

    node: int  # index
    kind: str
    name: str
    note: str
    declared: bool  # the joules are modelled, not measured
    seconds: np.ndarray  # since the start
    joules: np.ndarray  # used until `seconds`
    gaps: bool = False  # some joules are unknown

    @property
    def total_j(self) -> float:
        """Joules from the first to the last sample, or NaN if samples between them are missing."""
        return math.nan if self.gaps or not len(self.joules) else float(self.joules[-1])


@dataclass(frozen=True)
class StartHistory:
    """Joules of all energy sources over time, in one start (execution) of a run."""

    session: int  # number of the start, from 0
    courses: tuple[SourceHistory, ...]  # history of each source

    @property
    def counted(self) -> tuple[SourceHistory, ...]:
        """Energy sources to add up: the counters of whole nodes if every node has such a counter, else all others."""
        nodes = {course.node for course in self.courses}
        if nodes and nodes == {course.node for course in self.courses if course.kind == NODE}:
            return tuple(course for course in self.courses if course.kind == NODE)
        return tuple(course for course in self.courses if course.kind != NODE)

    @property
    def seconds(self) -> float:
        """Duration in seconds of the longest measurement of an energy source."""
        return max((float(course.seconds[-1]) for course in self.courses if len(course.seconds)), default=0.0)

    @property
    def joules(self) -> float:
        """Joules used in this start of the run, or NaN if samples are missing or no energy source was measured."""
        return math.fsum(course.total_j for course in self.counted) if self.counted else math.nan

    def until(self, seconds: np.ndarray) -> np.ndarray:
        """Return an array of the joules used in the first ``seconds[i]`` seconds of this start. NaN: unknown."""
        joules = np.zeros(len(seconds)) if self.counted else np.full(len(seconds), math.nan)
        for course in self.counted:
            if course.gaps or not len(course.seconds):
                return np.full(len(seconds), math.nan)
            joules += np.interp(seconds, course.seconds, course.joules)
        return joules


def read(path: Path) -> list[StartHistory]:
    """Return a `StartHistory` per start of the run, from the metrics file ``path``. Without energy data, return []."""
    with files.open_read(path) as file, regular.damage(path, f"its {ENERGY_GROUP} is damaged, or of another program"):
        if ENERGY_SAMPLES not in file:
            return []
        sources, samples = _sources(file), _samples(file)
        gaps = _source_keys(TABLES["gaps"].read(file)) if TABLES["gaps"].name in file else []
    starts: dict[int, list[SourceHistory]] = {}
    for key, (kind, name, note, declared) in sources.items():
        rows = samples.get(key, np.empty((0, 2), np.int64))
        since = rows - rows[0] if len(rows) else rows
        course = SourceHistory(key[1], kind, name, note, declared, since[:, 0] / 1e9, since[:, 1] / 1e3, key in gaps)
        starts.setdefault(key[0], []).append(course)
    return [StartHistory(session, tuple(courses)) for session, courses in sorted(starts.items())]


_SourceKey = tuple[int, int, int]  # session, node, source


def _source_keys(table: dict[str, np.ndarray]) -> list[_SourceKey]:
    return [tuple(map(int, row)) for row in zip(table["session"], table["node"], table["source"], strict=True)]  # type: ignore[misc]


def _sources(file: Any) -> dict[_SourceKey, tuple[str, str, str, bool]]:
    table, rows = TABLES["sources"].read(file), TABLES["about"].read(file)
    about: dict[_SourceKey, tuple[str, bool]] = {}
    if rows:  # older files lack this table
        notes = zip(texts(rows["note"]), rows["declared"].astype(bool).tolist(), strict=True)
        about = dict(zip(_source_keys(rows), notes, strict=True))
    return {
        key: (kind, name, *about.get(key, ("", False)))
        for key, kind, name in zip(_source_keys(table), texts(table["kind"]), texts(table["name"]), strict=True)
    }


def _samples(file: Any) -> dict[_SourceKey, np.ndarray]:
    columns = [file[f"{ENERGY_SAMPLES}/{name}"] for name in ENERGY_COLUMNS]
    num_rows = min(column.shape[0] for column in columns)
    blocks = -(-num_rows // BLOCK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(int)) if blocks else ()
    parts_by_source: dict[_SourceKey, list[np.ndarray]] = {}
    for block in chosen:
        part = slice(block * BLOCK, min(num_rows, (block + 1) * BLOCK))
        times, session, node, source, energy = (column[part] for column in columns)
        keys, which = np.unique(np.stack([session, node, source], axis=1), axis=0, return_inverse=True)
        for index, key in enumerate(keys):
            keep = np.flatnonzero(which.ravel() == index)
            count = min(len(keep), max(POINTS[0], POINTS[1] // len(chosen)))
            keep = keep[np.unique(np.linspace(0, len(keep) - 1, count).astype(int))]
            parts_by_source.setdefault(tuple(map(int, key)), []).append(np.stack([times[keep], energy[keep]], axis=1))  # type: ignore[arg-type]
    rows_by_source = {key: np.concatenate(parts) for key, parts in parts_by_source.items()}
    return {key: rows[np.argsort(rows[:, 0], kind="stable")] for key, rows in rows_by_source.items()}


def joules_at(starts: Sequence[StartHistory], session: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the joules that a run has used in total ``seconds[i]`` s after the begin of its start ``session[i]``."""
    joules = np.full(len(seconds), math.nan)
    earlier_j = 0.0  # of earlier starts
    for start in starts:
        is_here = session == start.session
        joules[is_here] = earlier_j + start.until(seconds[is_here])
        earlier_j += start.joules
    return joules


@dataclass(frozen=True)
class CarbonIntensity:
    """Carbon intensity of the grid, in grams of CO2 equivalents per kWh, with lower and upper limits. NaN: unknown."""

    g_per_kwh: float = math.nan
    source: str = ""
    date: str = ""
    low: float = math.nan  # unknown: equal to the intensity
    high: float = math.nan


@dataclass(frozen=True)
class Emissions:
    """Emissions in grams of CO2 equivalents, with lower and upper limits. NaN: unknown because of ``reason``."""

    grams: float
    low: float
    high: float
    reason: str = ""


def kwh(energy_j: float, pue: float = 1.0) -> float:
    """Return the kWh that a site uses while its nodes use ``energy_j`` joules. ``pue``: power usage effectiveness."""
    return energy_j / J_PER_KWH * pue


def emissions(energy_j: float, pue: float, intensity: CarbonIntensity) -> Emissions:
    """Return the emissions of a site while its nodes use ``energy_j`` joules. ``pue``: power usage effectiveness."""
    if math.isnan(energy_j) or math.isnan(intensity.g_per_kwh):
        reason = NO_ENERGY if math.isnan(energy_j) else NO_INTENSITY
        return Emissions(math.nan, math.nan, math.nan, reason)
    of_site = kwh(energy_j, pue)
    mean = intensity.g_per_kwh
    low, high = (mean if math.isnan(limit) else limit for limit in (intensity.low, intensity.high))
    return Emissions(of_site * mean, of_site * low, of_site * high)


def over_time(
    edges_s: np.ndarray, g_per_kwh: np.ndarray, begins_s: np.ndarray, ends_s: np.ndarray, joules: np.ndarray
) -> tuple[float, float, float]:
    """Return (mean weighted by ``joules``, minimum, maximum) of the carbon intensity in g/kWh over time intervals.

    Interval i is from ``begins_s[i]`` to ``ends_s[i]``. The intensity is ``g_per_kwh[j]`` from ``edges_s[j]`` to
    ``edges_s[j + 1]``. All results are NaN if an interval is not within the edges.
    """
    if not len(joules) or begins_s.min() < edges_s[0] or ends_s.max() > edges_s[-1]:
        return math.nan, math.nan, math.nan
    sums = np.append(0.0, np.cumsum(np.diff(edges_s) * g_per_kwh))
    lengths = ends_s - begins_s
    integral = np.interp(ends_s, edges_s, sums) - np.interp(begins_s, edges_s, sums)
    at = np.clip(np.searchsorted(edges_s, begins_s, side="right") - 1, 0, len(g_per_kwh) - 1)
    means = np.where(lengths > 0, integral / np.maximum(lengths, 1e-12), g_per_kwh[at])
    total = float(joules.sum())
    first = int(at.min())
    last = int(np.clip(np.searchsorted(edges_s, ends_s.max(), side="left") - 1, first, len(g_per_kwh) - 1))
    met = g_per_kwh[first : last + 1]
    mean = float(means @ joules) / total if total > 0 else float(means.mean())
    return mean, float(met.min()), float(met.max())


@dataclass(frozen=True)
class EnergyToTarget:
    """Joules, seconds and steps until the loss reached a target. NaN: unknown because of ``reason``."""

    joules: float
    seconds: float
    step: float
    reason: str = ""


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Return the moving average of ``losses`` over 5 consecutive values, or over 2 % of all values if that is more."""
    width = max(MIN_LOSSES, round(SMOOTHED_SHARE * len(losses)))
    sums = np.append(0.0, np.cumsum(losses))
    last = np.arange(1, len(losses) + 1)
    first = np.maximum(0, last - width)
    return np.asarray((sums[last] - sums[first]) / (last - first))


def to_target(
    target: float, steps: np.ndarray, losses: np.ndarray, seconds: np.ndarray, joules: np.ndarray
) -> EnergyToTarget:
    """Return the interpolated step, seconds and joules at which the smoothed loss first was at most ``target``.

    ``losses[i]``: loss of step ``steps[i]``. ``seconds[i]``, ``joules[i]``: totals until the end of this step.
    """
    is_finite = np.isfinite(losses)
    steps, losses, seconds, joules = (values[is_finite] for values in (steps, losses, seconds, joules))
    if not len(losses):
        return EnergyToTarget(math.nan, math.nan, math.nan, "no loss is known")
    shown = smoothed(losses)
    reached = np.flatnonzero(shown <= target)
    if not len(reached):
        reason = f"the loss never reached {target:g}; the smallest was {shown.min():.4g} after step {steps[-1]:g}"
        return EnergyToTarget(math.nan, math.nan, math.nan, reason)
    at = int(reached[0])
    before = max(0, at - 1)
    fraction = float((shown[before] - target) / (shown[before] - shown[at])) if at else 0.0  # of step `at`
    step, taken_s, used_j = (
        float(values[before] + fraction * (values[at] - values[before]))
        for values in (steps.astype(np.float64), seconds, joules)
    )
    reason = "the energy until then is not known" if math.isnan(used_j) else ""
    return EnergyToTarget(used_j, taken_s, step, reason)


def figures(
    energy_j: float,
    seconds: float,
    *,
    pue: float = 1.0,
    intensity: CarbonIntensity | None = None,
    price_per_kwh: float = 0.0,
    currency: str = "",
) -> dict[str, Any]:
    """Return a dict of metrics, such as "average_w", for ``energy_j`` joules used in ``seconds`` s. None: unknown."""
    intensity = intensity or CarbonIntensity()
    emitted = emissions(energy_j, pue, intensity)
    unknown = NO_ENERGY if math.isnan(energy_j) else None
    return {
        "average_w": json_number(energy_j / seconds) if seconds > 0 else None,
        # Gonzalez, Horowitz, IEEE J. Solid-State Circuits 31, 1996; squared: Martin, Nystroem, Penzes, 2001
        "energy_delay_product_js": json_number(energy_j * seconds),
        "energy_delay_squared_js2": json_number(energy_j * seconds**2),
        "energy_kwh": json_number(kwh(energy_j)),
        "pue": pue,
        "facility_kwh": json_number(kwh(energy_j, pue)),
        "emissions_g": json_number(emitted.grams),
        "emissions_spread_g": None if math.isnan(emitted.low) else [emitted.low, emitted.high],
        "emissions_reason": emitted.reason or None,
        "carbon_g_per_kwh": json_number(intensity.g_per_kwh),
        "carbon_source": intensity.source or None,
        "carbon_date": intensity.date or None,
        "cost": json_number(kwh(energy_j, pue) * price_per_kwh) if price_per_kwh else None,
        "cost_reason": NO_PRICE if not price_per_kwh else unknown,
        "currency": currency or None,
    }


def joules_per_item(joules: float, items: float) -> float | None:
    """Return ``joules`` / ``items``, such as the joules per token, or None if the quotient is unknown."""
    return json_number(joules / items) if items and items > 0 else None


def rates(training_j: float, steps: float, samples: float, tokens: float) -> dict[str, float | None]:
    """Return a dict of the joules per step, sample and token of a training of ``training_j`` joules. None: unknown."""
    counts = {"j_per_step": steps, "j_per_sample": samples, "j_per_token": tokens}
    return {name: joules_per_item(training_j, count) for name, count in counts.items()}
