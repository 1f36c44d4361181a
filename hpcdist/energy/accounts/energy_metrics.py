"""Energy metrics: history, kWh of the site, emissions, cost, energy-delay products, joules to a target loss.

Emissions are kWh at the socket x PUE x the carbon intensity of the grid. All functions but `read` are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.constants import ENERGY_COLUMNS, ENERGY_GROUP, ENERGY_SAMPLES, ENERGY_SOURCES, J_PER_KWH
from hpcdist.energy.report import NODE
from hpcdist.hdf5 import datasets, files
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
    """Joules of one energy source over time, from a first start or restart of a run."""

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
        """Joules from the first to the last sample, or NaN if samples are missing in between."""
        return math.nan if self.gaps or not len(self.joules) else float(self.joules[-1])


@dataclass(frozen=True)
class StartHistory:
    """Energy histories of all energy sources from one first start or restart of a run.

    ``courses``: history of each source. ``session``: number of the start or restart, from 0.
    """

    session: int
    courses: tuple[SourceHistory, ...]

    @property
    def counted(self) -> tuple[SourceHistory, ...]:
        """Energy sources that make up the total: node-wide counters if every node has one, else all other sources."""
        nodes = {course.node for course in self.courses}
        if nodes and nodes == {course.node for course in self.courses if course.kind == NODE}:
            return tuple(course for course in self.courses if course.kind == NODE)
        return tuple(course for course in self.courses if course.kind != NODE)

    @property
    def seconds(self) -> float:
        """Length of the measurement in seconds, on the node that was measured longest."""
        return max((float(course.seconds[-1]) for course in self.courses if len(course.seconds)), default=0.0)

    @property
    def joules(self) -> float:
        """Joules used in this start or restart of the run. NaN if samples or energy sources are missing."""
        return math.fsum(course.total_j for course in self.counted) if self.counted else math.nan

    def until(self, seconds: np.ndarray) -> np.ndarray:
        """Return an array: the joules used in the first ``seconds[i]`` seconds of this launch, or NaN if unknown."""
        joules = np.zeros(len(seconds)) if self.counted else np.full(len(seconds), math.nan)
        for course in self.counted:
            if course.gaps or not len(course.seconds):
                return np.full(len(seconds), math.nan)
            joules += np.interp(seconds, course.seconds, course.joules)
        return joules


def read(path: Path) -> list[StartHistory]:
    """Return the energy history of each start or restart of a run from its metrics file ``path``; [] without data."""
    with files.open_read(path) as file, regular.damage(path, f"its {ENERGY_GROUP} is damaged, or of another program"):
        if ENERGY_SAMPLES not in file:
            return []
        sources, samples, gaps = _sources(file), _samples(file), _gaps(file)
    starts: dict[int, list[SourceHistory]] = {}
    for key, (kind, name, note, declared) in sources.items():
        rows = samples.get(key, np.empty((0, 2), np.int64))
        since = rows - rows[0] if len(rows) else rows
        course = SourceHistory(key[1], kind, name, note, declared, since[:, 0] / 1e9, since[:, 1] / 1e3, key in gaps)
        starts.setdefault(key[0], []).append(course)
    return [StartHistory(session, tuple(courses)) for session, courses in sorted(starts.items())]


_Place = tuple[int, int, int]  # session, node, source


def _places(table: dict[str, np.ndarray]) -> list[_Place]:
    return [tuple(map(int, row)) for row in zip(table["session"], table["node"], table["source"], strict=True)]  # type: ignore[misc]


def _sources(file: Any) -> dict[_Place, tuple[str, str, str, bool]]:
    table = datasets.read(file, ENERGY_SOURCES)
    about: dict[_Place, tuple[str, bool]] = {}
    if f"{ENERGY_GROUP}/about" in file:  # not in older files
        rows = datasets.read(file, f"{ENERGY_GROUP}/about")
        about = dict(
            zip(_places(rows), zip(map(_text, rows["note"]), map(bool, rows["declared"]), strict=True), strict=True)
        )
    return {
        place: (_text(kind), _text(name), *about.get(place, ("", False)))
        for place, kind, name in zip(_places(table), table["kind"], table["name"], strict=True)
    }


def _gaps(file: Any) -> set[_Place]:
    return set(_places(datasets.read(file, f"{ENERGY_GROUP}/gaps"))) if f"{ENERGY_GROUP}/gaps" in file else set()


def _samples(file: Any) -> dict[_Place, np.ndarray]:
    columns = [file[f"{ENERGY_SAMPLES}/{name}"] for name in ENERGY_COLUMNS]
    rows = min(column.shape[0] for column in columns)
    blocks = -(-rows // BLOCK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(int)) if blocks else ()
    parts_by_source: dict[_Place, list[np.ndarray]] = {}
    for block in chosen:
        part = slice(block * BLOCK, min(rows, (block + 1) * BLOCK))
        times, session, node, source, energy = (column[part] for column in columns)
        places, which = np.unique(np.stack([session, node, source], axis=1), axis=0, return_inverse=True)
        for index, place in enumerate(places):
            keep = np.flatnonzero(which.ravel() == index)
            keep = keep[_thinned(len(keep), max(POINTS[0], POINTS[1] // len(chosen)))]
            parts_by_source.setdefault(tuple(map(int, place)), []).append(np.stack([times[keep], energy[keep]], axis=1))  # type: ignore[arg-type]
    return {place: _ordered(np.concatenate(parts)) for place, parts in parts_by_source.items()}


def _thinned(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _ordered(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def joules_at(starts: Sequence[StartHistory], session: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the joules that a run had used at each of n times, as an array of shape (n,).

    Time i is ``seconds[i]`` seconds after start number ``session[i]`` of the run.
    """
    joules = np.full(len(seconds), math.nan)
    before = 0.0
    for start in starts:
        is_here = session == start.session
        joules[is_here] = before + start.until(seconds[is_here])
        # joules of earlier starts
        before += start.joules
    return joules


@dataclass(frozen=True)
class CarbonIntensity:
    """Carbon intensity in grams of CO2 equivalents per kWh (NaN if unknown), with lower and upper limits."""

    g_per_kwh: float = math.nan
    source: str = ""
    date: str = ""
    low: float = math.nan
    high: float = math.nan

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper limit of the carbon intensity in g/kWh. An unknown limit equals the intensity itself."""
        low = self.g_per_kwh if math.isnan(self.low) else self.low
        high = self.g_per_kwh if math.isnan(self.high) else self.high
        return low, high


@dataclass(frozen=True)
class Emissions:
    """Emissions in ``grams`` of CO2 equivalents, with lower and upper limits. If unknown: NaN, and the ``reason``."""

    grams: float
    low: float
    high: float
    reason: str = ""


def kwh(energy_j: float, pue: float = 1.0) -> float:
    """Convert ``energy_j``, joules of the nodes, to kWh of the site. ``pue``: power usage effectiveness, at least 1."""
    return energy_j / J_PER_KWH * pue


def emissions(energy_j: float, pue: float, intensity: CarbonIntensity) -> Emissions:
    """Return the emissions for ``energy_j``, joules of the nodes, at the carbon ``intensity`` of the grid.

    ``pue`` (power usage effectiveness) adds cooling and losses of the site.
    """
    if math.isnan(energy_j) or math.isnan(intensity.g_per_kwh):
        reason = NO_ENERGY if math.isnan(energy_j) else NO_INTENSITY
        return Emissions(math.nan, math.nan, math.nan, reason)
    of_site = kwh(energy_j, pue)
    low, high = intensity.spread
    return Emissions(of_site * intensity.g_per_kwh, of_site * low, of_site * high)


def over_time(
    edges_s: np.ndarray, g_per_kwh: np.ndarray, begins_s: np.ndarray, ends_s: np.ndarray, joules: np.ndarray
) -> tuple[float, float, float]:
    """Return the mean, smallest and largest carbon intensity, in g/kWh, of the energy used in time intervals.

    The energy is ``joules[i]`` from ``begins_s[i]`` to ``ends_s[i]``. The intensity is ``g_per_kwh[j]`` from
    ``edges_s[j]`` to ``edges_s[j + 1]``. The results are NaN if an interval is outside of ``edges_s``.
    """
    # The power is constant in an interval.
    if not len(joules) or begins_s.min() < edges_s[0] or ends_s.max() > edges_s[-1]:
        return math.nan, math.nan, math.nan
    # Interval i used `joules[i]` at constant power. The intensity is g_per_kwh[j] from edges_s[j] to edges_s[j + 1].
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
    """Joules, seconds and steps (interpolated) until the loss reached a target. If unknown: NaN, and a ``reason``."""

    joules: float
    seconds: float
    step: float
    reason: str = ""


def smoothed(losses: np.ndarray) -> np.ndarray:
    """Return the moving average of ``losses``: at each step, the mean over the last max(5, 2 % of all) steps."""
    width = max(MIN_LOSSES, round(SMOOTHED_SHARE * len(losses)))
    sums = np.append(0.0, np.cumsum(losses))
    last = np.arange(1, len(losses) + 1)
    first = np.maximum(0, last - width)
    return np.asarray((sums[last] - sums[first]) / (last - first))


def to_target(
    target: float,
    steps: np.ndarray,
    losses: np.ndarray,
    seconds: np.ndarray,
    joules: np.ndarray,
) -> EnergyToTarget:
    """Return the interpolated step, seconds and joules at which the smoothed loss first reached the loss ``target``.

    ``steps``, ``losses``: one element per step. ``seconds``, ``joules``: totals until the end of each step.
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
    part = 1.0
    if at:
        part = float((shown[at - 1] - target) / (shown[at - 1] - shown[at]))
    before = max(0, at - 1)
    step, taken_s, used_j = (
        float(values[before] + part * (values[at] - values[before])) if at else float(values[at])
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
    """Return a dict of metrics of ``energy_j`` joules used in ``seconds`` seconds, such as the mean power.

    The values are JSON values, or None if unknown.
    """
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


def joules_per_part(joules: float, parts: float) -> float | None:
    """Return ``joules`` / ``parts`` (number of steps, samples or tokens), or None if it is unknown."""
    return json_number(joules / parts) if parts and parts > 0 else None


def rates(training_j: float, steps: float, samples: float, tokens: float) -> dict[str, float | None]:
    """Return joules per step, sample and token: a dict, with None if unknown. ``training_j``: total joules."""
    names: Sequence[tuple[str, float]] = (("j_per_step", steps), ("j_per_sample", samples), ("j_per_token", tokens))
    return {name: joules_per_part(training_j, parts) for name, parts in names}
