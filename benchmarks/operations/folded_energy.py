"""Energy of a load that a part-time sensor saw, from its readings folded over the position in the step.

Steps are alike: all readings are solved for the power at each position in a step
(`hpcdist.energy.accounts.part_time_sensor.solve`), which needs every position to be seen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.energy.accounts.part_time_sensor import PowerSensor, solve

# Of the time of the steps; up to so much, positions never seen are taken from their neighbours.
OPEN_SHARE: Final = 0.02
MIN_UPDATES: Final = 8
MAX_BINS: Final = 96
STIFFNESS: Final = 1e-4  # of the profile, against the mean weight of what was seen of a bin


@dataclass(frozen=True)
class WorkIntervals:
    """Work of a job, in ns of one clock: its ``steps``, and ``others`` by name; the rest is idle.

    A step is a row of at least two increasing times: its begin, moments that all steps have at positions that vary
    (as the end of the backward), and its end. Nothing overlaps.
    """

    steps: np.ndarray  # (steps, edges) int64
    others: Mapping[str, np.ndarray] = field(default_factory=dict)  # each (n, 2) int64


@dataclass(frozen=True)
class EnergyEstimate:
    """Estimate of the joules of a load, NaN with a ``reason`` where not known; ``error_j`` is a standard error.

    ``by_phase``: joules of "step", of each of the others, and of "idle". ``profile_w``: watts over the step, in bins of
    equal shares of the time between two of its edges. ``seen_share``: of the time of steps, in all positions together.
    """

    energy_j: float
    error_j: float
    by_phase: Mapping[str, float]
    profile_w: np.ndarray
    seen_share: float
    reason: str = ""


def naive_j(power_w: np.ndarray, update_s: float) -> float:
    """Return the plain sum of power x time, which is wrong for a part-time sensor (for comparison)."""
    return float(np.sum(power_w)) * update_s


def estimate(
    sensor: PowerSensor, updates_ns: np.ndarray, power_w: np.ndarray, work: WorkIntervals, begin_ns: int, end_ns: int
) -> EnergyEstimate:
    """Return the energy between ``begin_ns`` and ``end_ns``, of updates (n,) at which ``power_w`` (n,) became visible.

    The moments of the updates have to be known to a small part of the window, so polling has to be as frequent.

    It does not work where power is no function of the position in the step: random bursts, steps of different kinds
    (give those that differ as ``others``), a power that drifts as the chip warms up while one position is seen early
    and another late. What is shorter than the window is smeared over it, which leaves the sum as it is. An error of the
    gain, 5 % from board to board, and a delay of the sensor are not corrected.
    """
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
        reason = f"the sensor had {len(ends)} new values, and less than {MIN_UPDATES} say nothing: measure for longer"
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
    """Cells: disjoint intervals in order. ``labels`` below ``bins`` are positions in a step, then others, then idle."""

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
    """Return how many bins each part of a step gets, of about ``bin_s`` seconds, ``most`` together."""
    if not lengths.size:
        return [1] * lengths.shape[1]
    typical = np.median(lengths, axis=0) / 1e9
    total = min(most, max(1, math.ceil(typical.sum() / bin_s)))
    return [max(1, round(total * part)) for part in typical / typical.sum()]


def _cells(work: WorkIntervals, begin_ns: int, end_ns: int, bins: Sequence[int]) -> _Cells:
    """Return the time from ``begin_ns`` to ``end_ns`` as cells; ``bins`` are those of each part of a step."""
    # Each part of a step, between two of its edges, is cut evenly: (steps, bins of the part) begins.
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
        raise ValueError("steps and others overlap, or end before they begin; give what was done when, one by one")
    # What lies between two neighbours is idle.
    free_begin, free_end = np.append(begin_ns, end), np.append(begin, end_ns)
    idle = free_end > free_begin
    begin, end = np.append(begin, free_begin[idle]), np.append(end, free_end[idle])
    label = np.append(label, np.full(int(idle.sum()), count + len(work.others)))
    begin, end = np.clip(begin, begin_ns, end_ns), np.clip(end, begin_ns, end_ns)
    order = np.argsort(begin, kind="stable")
    return _Cells(begin[order], end[order], label[order], count, (*work.others, "idle"))


def _overlaps(cells: _Cells, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the parts of cells that lie in windows: the window's number, the cell's label, and seconds, each (parts,).

    Cells are ordered and disjoint, so those of window k are a range, from ``first[k]`` to ``last[k]``.
    """
    first = np.searchsorted(cells.ends, starts, side="right")
    last = np.searchsorted(cells.begins, ends, side="left")
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(starts)), counts)
    # The ranges of all windows one behind the other, without a loop: the place in that list, minus where the range of
    # the window begins in it, plus the first cell of the window.
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    seconds = np.minimum(cells.ends[index], ends[rows]) - np.maximum(cells.begins[index], starts[rows])
    return rows, cells.labels[index], np.maximum(seconds, 0) / 1e9


def _summarise_seen(cells: _Cells, starts: np.ndarray, ends: np.ndarray) -> _SeenSummary:
    _, labels, seconds = _overlaps(cells, starts, ends)
    looked = np.bincount(labels, seconds, cells.unknowns)[: cells.bins] > 0
    spent = cells.seconds()[: cells.bins]
    return _SeenSummary(float(spent.sum()), float(spent[~looked].sum()))


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
    # A penalty on differences of neighbouring bins, the last and the first too, as a step follows a step: the Laplacian
    # of a ring, which leaves their mean free.
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
    blind = used[(used >= cells.bins) & ~table.any(axis=0)]
    watts[blind] = watts[: cells.bins].mean()
    names = [cells.names[label - cells.bins] for label in blind]
    joules = watts * spent
    by_phase = {"step": float(joules[: cells.bins].sum())} if spent[: cells.bins].any() else {}
    for index, name in enumerate(cells.names, start=cells.bins):
        if spent[index] > 0:
            by_phase[name] = math.nan if name in names else float(joules[index])
    # The power in time that no window covers may be anything between the least and the most that was seen.
    open_s = open_share * float(spent[: cells.bins].sum()) + float(spent[blind].sum())
    error = math.hypot(math.sqrt(spent[used] @ solution.covariance @ spent[used]), open_s * float(np.ptp(power_w)) / 2)
    if spent[blind].sum() > OPEN_SHARE * spent.sum():
        reason = f"the sensor never looked at {', '.join(names)}: measure for longer"
        return EnergyEstimate(math.nan, math.nan, by_phase, watts[: cells.bins], 1 - open_share, reason)
    return EnergyEstimate(float(joules.sum()), error, by_phase, watts[: cells.bins], 1 - open_share)
