"""Part-time power sensors: a table of known ones, and estimates of the energy of a load seen only in part.

On an A100 or H100 the power sensor takes the mean of 25 ms and shows it for 100 ms. The draw of a GPU in the other
75 ms is not measured; where steps of a training take as long as the sensor's period, or a simple fraction or multiple
of it, the same part of each step is seen again and again, and power times time may be off by more than half. (Z. Yang,
K. Adamek and W. Armour, "Part-time Power Measurements: nvidia-smi's Lack of Attention", arXiv 2312.02741, SC24
doi 10.1109/SC41406.2024.00028. They repeat the load 32 times with eight delays, evenly spread over the period.)

The remedy is to know what the job did in the windows of the sensor. Steps are alike: all readings are folded over the
position in the step, and solved for the power there (`estimate`). It needs every position to be seen: `SensorShift`
delays some steps a little, so that it is.

`solve` is non-negative least squares from sums that can be collected piece by piece, with standard errors; watts are
not negative:

    minimise |A x - y|^2  over x >= 0,   known by  gram = A^T A,  right = A^T y,  square = y^T y  and the rows of A

By the active set method of C. Lawson and R. Hanson, Solving Least Squares Problems, 1974, chapter 23, in the form of
R. Bro and S. de Jong, J. Chemometrics 11, 1997, which needs no more than these sums.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

MAX_ROUNDS: Final = 30  # per unknown; a problem that is not degenerate takes about one
TOLERANCE: Final = 1e-12


@dataclass(frozen=True)
class NnlsSolution:
    """Solution ``values`` (n,) and their ``covariance`` (n, n), an upper bound: it ignores that they are >= 0."""

    values: np.ndarray
    covariance: np.ndarray


def solve(
    gram: np.ndarray, right: np.ndarray, square: float, rows: float, penalty: np.ndarray | None = None
) -> NnlsSolution:
    """Return the solution of minimal residual over x >= 0 (local).

    ``penalty`` (n, n), positive semidefinite, is added to ``gram`` for what ``A`` leaves open. ``rows`` is the number
    of independent rows: fewer than those of A, where these overlap.
    """
    whole = gram if penalty is None else gram + penalty
    # Unknowns in units in which the diagonal is 1, so that one tolerance suits all of them.
    scale = 1 / np.sqrt(np.maximum(np.diag(whole), np.finfo(np.float64).tiny))
    scaled, target = whole * np.outer(scale, scale), right * scale
    values = _active_set(scaled, target) * scale
    inverse = np.linalg.pinv(scaled, rcond=TOLERANCE, hermitian=True) * np.outer(scale, scale)
    # The residual |A x - y|^2 from the sums, and the degrees of freedom that the penalty leaves.
    left = max(0.0, square - 2 * values @ right + values @ gram @ values)
    used = min(float(np.trace(inverse @ gram)), rows - 1)
    variance = left / (rows - used) if rows > 1 else np.inf
    return NnlsSolution(values, inverse @ gram @ inverse * variance if np.isfinite(variance) else inverse * np.inf)


def _active_set(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return x >= 0 of minimal x^T gram x - 2 x^T right, by the algorithm of Lawson and Hanson.

    ``passive`` are the unknowns that are free; all others are 0.
    """
    free = np.linalg.lstsq(gram, right, rcond=TOLERANCE)[0]
    if free.min(initial=0.0) >= 0:
        return np.asarray(free)
    values, passive = np.zeros_like(right), np.zeros(len(right), bool)
    slack = TOLERANCE * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(MAX_ROUNDS * len(right)):
        # The negative gradient: an unknown at 0 with a positive one would lower the residual if it were free.
        slope = np.where(passive, -np.inf, right - gram @ values)
        if slope.max() <= slack:
            break
        passive[slope.argmax()] = True
        while True:
            candidate = np.zeros_like(values)
            candidate[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], right[passive], rcond=TOLERANCE)[0]
            blocked = passive & (candidate <= 0)
            if not blocked.any():
                break
            # Go towards the solution as far as no unknown becomes negative; those that reach 0 leave the free ones.
            way = np.min(values[blocked] / np.maximum(values[blocked] - candidate[blocked], TOLERANCE))
            values = values + way * (candidate - values)
            passive &= values > TOLERANCE * max(1.0, float(values.max()))
            values[~passive] = 0.0
        values = candidate
    return values


# Yang, Adamek and Armour, the table of update periods and averaging windows. Later drivers name two fields: "average"
# is the mean of the last second on Ampere (but for the A100) and all that followed, as NVML's own documentation says.
_PAPER: Final = "arXiv 2312.02741"
_KNOWN: Final = (
    (r"GH200", 0.1, 0.02, _PAPER),
    (r"H100|H800", 0.1, 0.025, _PAPER),
    (r"H200|H20", 0.1, 0.025, f"as the H100, which has the same chip: {_PAPER}"),
    (r"A100|A800", 0.1, 0.025, _PAPER),
    (r"A30", 0.1, 0.025, f"as the A100, which has the same chip: {_PAPER}"),
    (r"V100S?|TITAN V|P100|P40|P4|GTX 10[5-8]0|TITAN X[Pp]?", 0.02, 0.01, _PAPER),
    (r"T4|RTX 20[5-8]0|TITAN RTX|GTX 16[5-6]0", 0.1, 0.1, _PAPER),
    (r"RTX 30[5-9]0|RTX A\d000|A40|A16|A10G?|A2", 0.1, 0.1, _PAPER),
)
_AVERAGED: Final = re.compile(
    r"\b(GH200|H\d00|H20|L40?S?|RTX [3-6]0\d0|RTX A\d000|A40|A30|A16|A10G?|A2|[GB]B?[23]00)\b"
)
AVERAGE_S: Final = 1.0
UNKNOWN_SENSOR: Final = "not in the table of known sensors: taken to see all of the time"
OPEN_SHARE: Final = (
    0.02  # of the time of the steps; up to so much, positions never seen are taken from their neighbours
)
MIN_UPDATES: Final = 8
MAX_BINS: Final = 96
STIFFNESS: Final = 1e-4  # of the profile, against the mean weight of what was seen of a bin


@dataclass(frozen=True)
class PowerSensor:
    """Power sensor with a new value every ``update_s`` seconds: the mean of the last ``window_s`` before."""

    update_s: float
    window_s: float
    source: str = ""  # of these two

    @property
    def seen_share(self) -> float:
        """The share of the time that lies in its windows."""
        return min(1.0, self.window_s / self.update_s)

    def paced(self, update_s: float) -> "PowerSensor":
        """Return the sensor with the observed period of updates; one without blind time stays without."""
        if not update_s > 0:  # NaN, too
            return self
        return replace(self, update_s=update_s, window_s=update_s if self.window_s == self.update_s else self.window_s)


def sensor_of(gpu_name: str, field_name: str = "") -> PowerSensor:
    """Return the sensor of a GPU by the name that its driver has for it, such as "NVIDIA A100-SXM4-40GB".

    ``field_name``: of its energy counter and instantaneous power (""), or "average", which newer drivers show beside.
    """
    if field_name == "average" and _AVERAGED.search(gpu_name):
        return PowerSensor(0.1, AVERAGE_S, "NVML: POWER_AVERAGE is the mean of the last second")
    for pattern, update_s, window_s, source in _KNOWN:
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", gpu_name):
            return PowerSensor(update_s, window_s, source)
    return PowerSensor(0.1, 0.1, UNKNOWN_SENSOR)


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


class SensorShift:
    """Shift of the begins of steps, so that a part-time sensor sees all positions in ``steps`` steps equally often.

    The period of the sensor is cut into slots of half a window, each with room for an equal share of the steps. A step
    that would begin in a full slot waits for the next slot with room. Steps that drift through the period by themselves
    hardly ever wait; steps locked to the period wait for less than one period in total.
    """

    def __init__(self, sensor: PowerSensor, steps: int) -> None:
        self.slots = 1 if sensor.seen_share >= 1 else math.ceil(2 * sensor.update_s / sensor.window_s)
        self._slot_ns = sensor.update_s * 1e9 / self.slots
        self._room = [math.ceil(steps / self.slots)] * self.slots

    def pause_s(self, now_ns: int) -> float:
        """Return the seconds to wait before the step that could begin now (local); it is counted as begun then.

        ``now_ns`` is of a monotonic clock. Steps beyond the number of the constructor do not wait.
        """
        slot = int(now_ns // self._slot_ns) % self.slots
        ahead = next((ahead for ahead in range(self.slots) if self._room[(slot + ahead) % self.slots]), 0)
        at = (slot + ahead) % self.slots
        self._room[at] = max(0, self._room[at] - 1)
        return ahead * self._slot_ns / 1e9
