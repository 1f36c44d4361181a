"""Energy of a load measured by a part-time sensor, from readings folded over the position in a step.

Steps are alike, so all readings together determine the power at each position in a step
(`hpcdist.energy.part_time_sensor.solve`), if the sensor has seen every position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.energy.part_time_sensor import PowerSensor, solve

# Share of the step time: up to this share, unseen positions take the power of their neighbours.
OPEN_SHARE: Final = 0.02
MIN_UPDATES: Final = 8
MAX_BINS: Final = 96
STIFFNESS: Final = 1e-4  # weight of the smoothness of the profile, relative to the mean weight of a bin's readings


@dataclass(frozen=True)
class WorkIntervals:
    """Intervals of a job's work in ns of one clock: ``steps``, and ``others`` by name. The rest is idle.

    A step is a row of at least two increasing times: start, intermediate events (such as the end of the backward pass),
    and end. Intervals must not overlap.
    """

    steps: np.ndarray  # (steps, edges) int64
    others: Mapping[str, np.ndarray] = field(default_factory=dict)  # each (n, 2) int64


@dataclass(frozen=True)
class EnergyEstimate:
    """Estimated joules of a load with standard error ``error_j``, or NaN with a ``reason``.

    ``by_phase``: joules of "step", of each of the others, and of "idle". ``profile_w``: watts over the step, in equal
    bins between two edges. ``seen_share``: share of the step time whose positions the sensor has seen.
    """

    energy_j: float
    error_j: float
    by_phase: Mapping[str, float]
    profile_w: np.ndarray
    seen_share: float
    reason: str = ""


def naive_j(power_w: np.ndarray, update_s: float) -> float:
    """Return the sum of power x time, which is wrong for a part-time sensor; for comparison."""
    return float(np.sum(power_w)) * update_s


def estimate(
    sensor: PowerSensor, updates_ns: np.ndarray, power_w: np.ndarray, work: WorkIntervals, begin_ns: int, end_ns: int
) -> EnergyEstimate:
    """Estimate the energy from ``begin_ns`` to ``end_ns`` by readings ``power_w`` (n,) published at ``updates_ns``.

    Update times must be accurate to a small part of the window, so poll frequently.

    The method fails if power is not a function of the position in the step: random bursts, different kinds of steps
    (pass these as ``others``), or power that drifts as the chip warms up. Events shorter than the window are smeared,
    which does not change the sum. Gain errors (5 % between boards) and sensor delay are not corrected.
    """
    # Times since the start: float64 cannot represent nanoseconds of a wall clock.
    # Times since the begin: a float64 does not hold the nanoseconds of a wall clock.
    work = WorkIntervals(work.steps - begin_ns, {name: spans - begin_ns for name, spans in work.others.items()})
    updates_ns, begin_ns, end_ns = updates_ns - begin_ns, 0, end_ns - begin_ns
    inside = (updates_ns - round(sensor.window_s * 1e9) >= begin_ns) & (updates_ns <= end_ns)
    ends, power_w = updates_ns[inside], power_w[inside]
    starts = ends - round(sensor.window_s * 1e9)
    lengths = np.diff(work.steps, axis=1)
    seen = _summarise_seen(_cells(work, begin_ns, end_ns, _bins(lengths, sensor.window_s / 8, 1000)), starts, ends)
    open_share = float(seen.open_s / seen.steps_s) if seen.steps_s else 0.0
    reason = ""
    if len(ends) < MIN_UPDATES:
        reason = f"the sensor had {len(ends)} new values, but {MIN_UPDATES} are needed: measure for longer"
    elif open_share > OPEN_SHARE:
        reason = (
            f"the sensor never looked at {open_share:.0%} of the step; the steps and the sensor are in step: shift them"
        )
    if reason:
        return EnergyEstimate(math.nan, math.nan, {}, np.empty(0), 1 - open_share, reason)
    bins = _bins(lengths, sensor.window_s / 2, max(len(lengths[0]), min(MAX_BINS, len(ends) // 3)))
    return _solved(sensor, _cells(work, begin_ns, end_ns, bins), starts, ends, power_w, open_share)


@dataclass(frozen=True)
class _Cells:
    """Disjoint ordered intervals. ``labels`` below ``bins`` are positions in a step, then others, then idle."""

    begins: np.ndarray
    ends: np.ndarray
    labels: np.ndarray
    bins: int
    names: tuple[str, ...]

    @property
    def unknowns(self) -> int:
        return self.bins + len(self.names)

    def seconds(self) -> np.ndarray:
        return np.bincount(self.labels, (self.ends - self.begins) / 1e9, self.unknowns)


@dataclass(frozen=True)
class _SeenSummary:
    steps_s: float
    open_s: float


def _bins(lengths: np.ndarray, bin_s: float, most: int) -> list[int]:
    """Return the number of bins of each part of a step, each about ``bin_s`` seconds long, ``most`` in total."""
    if not lengths.size:
        return [1] * lengths.shape[1]
    typical = np.median(lengths, axis=0) / 1e9
    total = min(most, max(1, math.ceil(typical.sum() / bin_s)))
    return [max(1, round(total * part)) for part in typical / typical.sum()]


def _cells(work: WorkIntervals, begin_ns: int, end_ns: int, bins: Sequence[int]) -> _Cells:
    """Divide ``begin_ns`` to ``end_ns`` into cells; ``bins`` has the number of bins of each part of a step."""
    # Each part of a step, between two edges, is divided evenly: (steps, bins of the part) starts.
    edges = [work.steps[:, part : part + 1] + np.diff(work.steps)[:, part : part + 1] * (np.arange(count) / count)
             for part, count in enumerate(bins)]  # fmt: skip
    inner = np.concatenate([*edges, work.steps[:, -1:]], axis=1)  # (steps, bins + 1)
    count = inner.shape[1] - 1
    begins, ends = [inner[:, :-1].ravel()], [inner[:, 1:].ravel()]
    labels = [np.tile(np.arange(count), len(inner))]
    for index, spans in enumerate(work.others.values()):
        begins.append(spans[:, 0].astype(np.float64))
        ends.append(spans[:, 1].astype(np.float64))
        labels.append(np.full(len(spans), count + index))
    begin, end, label = np.concatenate(begins), np.concatenate(ends), np.concatenate(labels)
    order = np.argsort(begin, kind="stable")
    begin, end, label = begin[order], end[order], label[order]
    if np.any(end < begin) or np.any(begin[1:] < end[:-1] - 1):
        raise ValueError("steps and others overlap, or an interval ends before it begins; pass disjoint intervals")
    # Gaps between neighbours are idle.
    free_begin, free_end = np.append(begin_ns, end), np.append(begin, end_ns)
    idle = free_end > free_begin
    begin, end = np.append(begin, free_begin[idle]), np.append(end, free_end[idle])
    label = np.append(label, np.full(int(idle.sum()), count + len(work.others)))
    begin, end = np.clip(begin, begin_ns, end_ns), np.clip(end, begin_ns, end_ns)
    order = np.argsort(begin, kind="stable")
    return _Cells(begin[order], end[order], label[order], count, (*work.others, "idle"))


def _overlaps(cells: _Cells, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intersect cells with windows: return window number, cell label and seconds, each (intersections,).

    Cells are ordered and disjoint, so window k intersects the cells ``first[k]`` to ``last[k]`` - 1.
    """
    first = np.searchsorted(cells.ends, starts, side="right")
    last = np.searchsorted(cells.begins, ends, side="left")
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(starts)), counts)
    # Concatenate the cell ranges of all windows without a loop: position in the concatenation, minus the start of the
    # window's range there, plus the first cell of the window.
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    seconds = np.minimum(cells.ends[index], ends[rows]) - np.maximum(cells.begins[index], starts[rows])
    return rows, cells.labels[index], np.maximum(seconds, 0) / 1e9


def _summarise_seen(cells: _Cells, starts: np.ndarray, ends: np.ndarray) -> _SeenSummary:
    _, labels, seconds = _overlaps(cells, starts, ends)
    is_seen = np.bincount(labels, seconds, cells.unknowns)[: cells.bins] > 0
    spent = cells.seconds()[: cells.bins]
    return _SeenSummary(float(spent.sum()), float(spent[~is_seen].sum()))


def _solved(
    sensor: PowerSensor, cells: _Cells, starts: np.ndarray, ends: np.ndarray, power_w: np.ndarray, open_share: float
) -> EnergyEstimate:
    rows, labels, seconds = _overlaps(cells, starts, ends)
    unknowns = cells.unknowns
    flat = np.bincount(rows * unknowns + labels, seconds / sensor.window_s, len(starts) * unknowns)
    table = flat.reshape(-1, unknowns)
    spent = cells.seconds()
    used = np.flatnonzero(spent > 0)
    table = table[:, used]
    gram = table.T @ table
    # A penalty on differences of neighbouring bins, including last and first since step follows step: the Laplacian of
    # a ring, which does not constrain the mean.
    stiffness = np.zeros((unknowns, unknowns))
    ring = np.arange(cells.bins)
    np.add.at(stiffness, (ring, ring), 2.0)
    np.add.at(stiffness, (ring, (ring + 1) % cells.bins), -1.0)
    np.add.at(stiffness, (ring, (ring - 1) % cells.bins), -1.0)
    penalty = stiffness[np.ix_(used, used)] * STIFFNESS * np.trace(gram) / max(1, cells.bins)
    independent = len(power_w) * min(1.0, sensor.update_s / sensor.window_s)
    solution = solve(gram, table.T @ power_w, float(power_w @ power_w), independent, penalty)
    watts = np.zeros(unknowns)
    watts[used] = solution.values
    unseen = used[(used >= cells.bins) & ~table.any(axis=0)]
    watts[unseen] = watts[: cells.bins].mean()
    names = [cells.names[label - cells.bins] for label in unseen]
    joules = watts * spent
    by_phase = {"step": float(joules[: cells.bins].sum())} if spent[: cells.bins].any() else {}
    for index, name in enumerate(cells.names, start=cells.bins):
        if spent[index] > 0:
            by_phase[name] = math.nan if name in names else float(joules[index])
    # The power in time that no window covers is bounded by the least and the greatest reading.
    open_s = open_share * float(spent[: cells.bins].sum()) + float(spent[unseen].sum())
    error = math.hypot(math.sqrt(spent[used] @ solution.covariance @ spent[used]), open_s * float(np.ptp(power_w)) / 2)
    if spent[unseen].sum() > OPEN_SHARE * spent.sum():
        reason = f"the sensor never looked at {', '.join(names)}: measure for longer"
        return EnergyEstimate(math.nan, math.nan, by_phase, watts[: cells.bins], 1 - open_share, reason)
    return EnergyEstimate(float(joules.sum()), error, by_phase, watts[: cells.bins], 1 - open_share)
