"""Attribute joules to the phases of a node's ranks if phases are shorter than a counter's update interval. Pure.

Each interval between two updates of a counter is one row of a least squares problem for nonnegative watts:

    joules of the interval = sum over phases of watts(phase) x seconds of the phase in the interval

The joules of a phase are its watts x all its seconds. If several ranks use a source, their seconds are averaged. For a
part-time sensor, a row counts only the phases in the time window that the sensor averages.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.energy import part_time_sensor
from hpcdist.energy.part_time_sensor import PowerSensor
from hpcdist.energy.phase_shares import PHASE_NAMES, PhaseGrid, PhaseShares, RankPhases
from hpcdist.energy.report import UPDATES

PERIOD_TOLERANCE: Final = 0.02  # relative error of the expected period
PERIODS_TRIED: Final = 9  # periods in this range
STARTS_TRIED: Final = 5  # phases of the first update within a period
RESOLUTION: Final = 0.1  # of the time between readings: shorter periods are not searched for
MAX_SOLUTIONS: Final = 5  # alternative brackets
JITTER: Final = 0.01  # of a period: deviation of updates from a strict period


def update_brackets(before_ns: np.ndarray, seen_ns: np.ndarray, update_s: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return alternative bounds of a counter's update times in ns: a list of pairs of arrays (earliest, latest).

    ``seen_ns[i]``: time of the first reading after update i. ``before_ns[i]``: time of the preceding reading.
    ``update_s``: expected seconds between updates, or NaN.
    """
    expected = update_s * 1e9
    span = float(seen_ns[-1] - seen_ns[0])
    if not (expected > 0 and span > 0):
        return [(before_ns, seen_ns)]
    if expected < RESOLUTION * float(np.median(seen_ns - before_ns)):
        return [(seen_ns - round(expected), seen_ns)]
    low, high = (before_ns - seen_ns[0]).astype(np.float64), (seen_ns - seen_ns[0]).astype(np.float64)
    steps = np.arange(len(seen_ns), dtype=np.float64)
    if np.diff(seen_ns).max() > 1.5 * (seen_ns - before_ns)[1:].max():
        # Some readings saw no update, so readings are closer than updates and none was missed: update k has number k.
        expected = span / (len(seen_ns) - 1)
        counts = [steps]
    else:
        # Readings are rarer than updates. The number of updates up to each reading is guessed from the period and the
        # phase of the first update; guesses that contradict the brackets are dropped below.
        low = np.maximum(low, high - expected)
        guesses = sorted(
            expected * np.linspace(1 - PERIOD_TOLERANCE, 1 + PERIOD_TOLERANCE, PERIODS_TRIED),
            key=lambda pace: abs(pace - expected),
        )
        counts = [np.floor(high / pace + begin / STARTS_TRIED) for pace in guesses for begin in range(STARTS_TRIED)]
    brackets = []
    for count in {count.tobytes(): count for count in counts}.values():
        bounds = _tight_bounds(low - JITTER * expected, high, count)
        if bounds is not None:
            earliest, latest = (seen_ns[0] + np.rint(bound).astype(np.int64) for bound in bounds)
            brackets.append((earliest, latest))
    return brackets[:MAX_SOLUTIONS] or [(seen_ns[0] + low.astype(np.int64), seen_ns)]


def _tight_bounds(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    apart = count[None, :] - count[:, None]  # (k, j): periods from k to j
    later = apart > 0
    if not later.any():
        return None
    distance = np.where(later, apart, 1.0)
    # Each pair bounds the period: from the earliest k to the latest j, and from the latest k to the earliest j.
    slowest = np.where(later, (high[None, :] - low[:, None]) / distance, math.inf).min()
    fastest = np.where(later, (low[None, :] - high[:, None]) / distance, -math.inf).max()
    if fastest > slowest:
        return None
    earliest = np.where(apart >= 0, low[None, :] - apart * slowest, low[None, :] - apart * fastest).max(axis=1)
    latest = np.where(apart >= 0, high[None, :] - apart * fastest, high[None, :] - apart * slowest).min(axis=1)
    return (earliest, latest) if np.all(earliest <= latest) else None


MAX_PENDING: Final = 20_000  # samples of a source that wait for spans
COLLINEAR: Final = 1e-9  # eigenvalue of the correlation matrix below which phases are in constant proportion
MIN_COMPONENT: Final = 0.05  # of the length of an eigenvector: phases with smaller components are not part of it
UPDATES_PER_BLOCK: Final = (20, 50)  # updates whose moments are determined together: at least, and about
PLACEMENTS: Final = np.linspace(0, 1, 17)  # relative positions in the brackets
MAX_ERROR_SHARE: Final = 0.25  # of all joules of the source: with a larger standard error, a phase is unknown
FOLDS: Final = 16  # groups of intervals of the jackknife, each left out once
MIN_FOLDED: Final = 160  # intervals for a jackknife: ten per fold
MAX_SHARE_OF_INTERVAL: Final = 0.5  # of a phase's squared seconds in one fold; with more, its error is not estimated
CONSECUTIVE: Final = 10  # intervals per fold in a row, because neighbouring intervals share the moment between them
TIMEOUT_NS: Final = 60_000_000_000  # limit of the wait for a rank or source that reports nothing


@dataclass(frozen=True)
class CounterSamples:
    """New samples of one energy counter. `Attribution.add` ignores samples that it has seen before."""

    name: str
    kind: str
    times_ns: np.ndarray  # int64 (n,)
    energy_mj: np.ndarray  # int64 (n,)
    ranks: tuple[int, ...] | None = None  # indices of the ranks that use the device; None: all ranks of the node


@dataclass
class _SourceSums:
    # sums over readings of one counter, for a least squares fit of the watts in each phase
    sensor: PowerSensor
    times_ns: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    energy_mj: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    ranks: tuple[int, ...] | None = None
    grams: np.ndarray = field(default_factory=lambda: np.zeros((FOLDS, len(PHASE_NAMES), len(PHASE_NAMES))))
    rights: np.ndarray = field(default_factory=lambda: np.zeros((FOLDS, len(PHASE_NAMES))))
    square: float = 0.0
    rows: int = 0
    intervals_used: int = 0
    joules: float = 0.0  # in all intervals
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(len(PHASE_NAMES)))  # in intervals with known spans
    intervals_s: float = 0.0
    intervals: int = 0

    @property
    def gram(self) -> np.ndarray:
        return np.asarray(self.grams.sum(axis=0))

    @property
    def right(self) -> np.ndarray:
        return np.asarray(self.rights.sum(axis=0))

    @property
    def update_s(self) -> float:
        return self.intervals_s / self.intervals if self.intervals else math.nan


class Attribution:
    """Estimate of the joules of each training phase on a node. ``sensor_of(name, kind)`` returns a counter's sensor."""

    def __init__(self, sensor_of: Callable[[str, str], PowerSensor]) -> None:
        self._sensor_of = sensor_of
        self._ranks: list[RankPhases] = []
        self._sources: dict[tuple[str, str], _SourceSums] = {}

    def add(self, spans_by_rank: Sequence[np.ndarray], samples: Sequence[CounterSamples]) -> None:
        """Add new ``samples``, and each rank's new spans as rows (phase index, begin in ns, end in ns)."""
        self._ranks += [RankPhases() for _ in range(len(spans_by_rank) - len(self._ranks))]
        for rank, spans in zip(self._ranks, spans_by_rank, strict=True):
            rank.add(spans)
        for counter in samples:
            sums = self._sources.get((counter.name, counter.kind))
            if sums is None:
                sums = _SourceSums(self._sensor_of(counter.name, counter.kind), ranks=counter.ranks)
                self._sources[counter.name, counter.kind] = sums
            new = counter.times_ns > (sums.times_ns[-1] if len(sums.times_ns) else -1)
            sums.times_ns = np.append(sums.times_ns, counter.times_ns[new])
            sums.energy_mj = np.append(sums.energy_mj, counter.energy_mj[new])
        self._settle(False)

    def _settle(self, everything: bool) -> None:
        ends = [rank.until_ns for rank in self._ranks if rank.until_ns is not None]  # dedicated servers have no spans
        frontier = max(min(ends), max(ends) - TIMEOUT_NS) if ends else 0
        waiting = [sums for sums in self._sources.values() if len(sums.times_ns)]
        if not waiting:
            for rank in self._ranks:
                rank.forget(frontier)
            return
        begin = min(int(sums.times_ns[0]) - _reach_ns(sums) for sums in waiting)
        grid = PhaseGrid(self._ranks, begin, max(int(sums.times_ns[-1]) for sums in waiting))
        for sums in waiting:
            late = everything or len(sums.times_ns) > MAX_PENDING
            few = late or sums.times_ns[0] < frontier - TIMEOUT_NS
            _consume_intervals(sums, self._ranks, grid, np.iinfo(np.int64).max if late else frontier, few)
            _discard_stale(sums, frontier)
        needed = [int(sums.times_ns[0]) - _reach_ns(sums) for sums in waiting if len(sums.times_ns)]
        for rank in self._ranks:
            rank.forget(min(needed, default=frontier))

    def rows(self, *, final: bool = True) -> list[dict[str, Any]]:
        """Return a list with a dict per energy counter: ``name``, ``kind``, and ``activities`` from `phase_joules`."""
        if final:
            self._settle(True)
        return [
            {"name": name, "kind": kind, "activities": phase_joules(sums)}
            for (name, kind), sums in self._sources.items()
        ]


def _consume_intervals(
    sums: _SourceSums, all_ranks: Sequence[RankPhases], grid: PhaseGrid, frontier_ns: int, everything: bool
) -> None:
    ready = int(np.searchsorted(sums.times_ns, frontier_ns, side="right"))
    times, energy = sums.times_ns[:ready], sums.energy_mj[:ready]
    edges = np.flatnonzero(np.diff(energy)) + 1  # readings that saw an update; nothing is known before the first
    if len(edges) < 2 or (len(edges) < UPDATES_PER_BLOCK[0] and not everything):
        return
    # The last update is the first update of the next call, with the preceding reading as its lower bracket.
    sums.times_ns, sums.energy_mj = sums.times_ns[edges[-1] - 1 :], sums.energy_mj[edges[-1] - 1 :]
    sums.joules += float(energy[edges[-1]] - energy[edges[0]]) / 1e3
    sums.intervals += len(edges) - 1
    sums.intervals_s += float(times[edges[-1]] - times[edges[0]]) / 1e9
    ranks = all_ranks if sums.ranks is None else [all_ranks[rank] for rank in sums.ranks]
    since = max((rank.since_ns for rank in ranks if rank.since_ns is not None), default=None)
    if since is None:
        return
    edges = edges[int(np.searchsorted(times[edges], since)) :]  # the preceding interval is only partly known
    if len(edges) < 2:
        return
    mixtures = grid.of(sums.ranks)
    pieces = max(1, round((len(edges) - 1) / UPDATES_PER_BLOCK[1]))
    cuts = np.linspace(0, len(edges) - 1, pieces + 1).astype(int)
    for first, last in itertools.pairwise(cuts):
        some = edges[first : last + 1]
        sums.seconds += mixtures.between(times[some[:-1]], times[some[1:]]).sum(axis=0)
        bounds = update_brackets(times[some - 1], times[some], sums.sensor.update_s)
        candidates = [high - np.rint(PLACEMENTS[:, None] * (high - low)).astype(np.int64) for low, high in bounds]
        _add_rows(sums, mixtures, np.concatenate(candidates), np.diff(energy[some]) / 1e3)


def _discard_stale(sums: _SourceSums, frontier_ns: int) -> None:
    new = np.flatnonzero(np.diff(sums.energy_mj))
    # The reading before the first update is its lower bracket, and stays.
    first = int(new[0]) if len(new) else len(sums.times_ns) - 1
    if sums.times_ns[first] < frontier_ns - TIMEOUT_NS:
        first = int(np.searchsorted(sums.times_ns, frontier_ns - TIMEOUT_NS))
    sums.times_ns, sums.energy_mj = sums.times_ns[first:], sums.energy_mj[first:]


def _reach_ns(sums: _SourceSums) -> int:
    return round(2e9 * (sums.sensor.window_s + sums.sensor.update_s))


def _add_rows(sums: _SourceSums, mixtures: PhaseShares, moments: np.ndarray, joules: np.ndarray) -> None:
    # Interval i used `joules[i]`. Each row of `moments` has possible end points of the n intervals: n + 1 times in ns.
    # The row with the best fit is used. `mixtures` has the seconds in each training phase.
    sensor = sums.sensor
    lengths = np.diff(moments, axis=1) / 1e9
    looks, use = moments[:, :-1], lengths > 0
    if sensor.window_s != sensor.update_s:
        # The counter adds the mean of the last window x the period, so the mixture in the window counts. An interval of
        # two periods has two windows, one of which would be missing.
        looks = moments[:, 1:] - round(sensor.window_s * 1e9)
        use = use & (lengths < 1.5 * sensor.update_s)
    share = mixtures.between(looks, moments[:, 1:])
    share /= share.sum(axis=2, keepdims=True).clip(1e-9)
    table = share * (lengths * use)[:, :, None]
    used_j = joules * use
    # Normal equations of each placement, including all earlier rows: (placements, phases, phases).
    grams = sums.gram + np.einsum("pri,prj->pij", table, table)
    rights = sums.right + np.einsum("pri,pr->pi", table, used_j)
    squares, rows = sums.square + (used_j**2).sum(axis=1), sums.rows + use.sum(axis=1)
    # The residual without the bound watts >= 0 orders placements equally, at a hundredth of the cost.
    firm = grams + 1e-9 * np.trace(grams, axis1=1, axis2=2)[:, None, None] * np.eye(len(PHASE_NAMES))
    explained = (rights * np.linalg.solve(firm, rights[..., None])[..., 0]).sum(axis=1)
    best = int(np.argmin((squares - explained) / np.maximum(rows, 1)))
    folds = (sums.intervals_used + np.arange(len(joules))) // CONSECUTIVE % FOLDS
    np.add.at(sums.grams, folds, table[best, :, :, None] * table[best, :, None, :])
    np.add.at(sums.rights, folds, table[best] * used_j[best, :, None])
    sums.square, sums.rows = float(squares[best]), int(rows[best])
    sums.intervals_used += len(joules)


def phase_joules(sums: _SourceSums) -> dict[str, dict[str, Any]]:
    """Return {phase name: dict of results} for one energy counter from its least-squares ``sums``.

    The dict has "joules", "error_j" (standard error), "seconds", and "reason": why the joules are unreliable, or None.
    """
    used = np.flatnonzero(sums.seconds > 0)
    if not len(used):
        return {}
    seconds, gram = sums.seconds[used], sums.gram[np.ix_(used, used)]
    solution = part_time_sensor.solve(gram, sums.right[used], sums.square, sums.rows)
    fitted = solution.values * seconds
    # The joules of all phases add up to the counter's total.
    scale = sums.joules / fitted.sum() if fitted.sum() > 0 else 0.0
    errors = np.sqrt(np.maximum(np.diag(solution.covariance), 0)) * seconds * scale
    if sums.intervals_used >= MIN_FOLDED:
        errors = np.maximum(errors, _jackknife_error(sums, used) * seconds)
    alike = _collinear_phases(gram)
    rows = {}
    for index, column in enumerate(used):
        twins = [PHASE_NAMES[used[other]] for other in alike[index] if other != index]
        reason = _doubt(sums, float(seconds[index]), len(used), twins, float(errors[index]))
        rows[PHASE_NAMES[column]] = {
            "joules": float(fitted[index] * scale),
            "error_j": float(errors[index]),
            "seconds": float(seconds[index]),
            "reason": reason,
        }
    return rows


def _jackknife_error(sums: _SourceSums, used: np.ndarray) -> np.ndarray:
    # Jackknife (Quenouille 1956, Tukey 1958) of the watts of the phases with indices `used`. 0 means unknown.
    inner = np.ix_(np.arange(FOLDS), used, used)
    grams = sums.gram[np.ix_(used, used)] - sums.grams[inner]  # (folds, used, used): the sums without each fold
    rights = sums.right[used] - sums.rights[:, used]
    firm = grams + 1e-9 * np.trace(grams, axis1=1, axis2=2)[:, None, None] * np.eye(len(used))
    watts = np.linalg.solve(firm, rights[..., None])[..., 0]
    parts = np.diagonal(sums.grams, axis1=1, axis2=2)[:, used]
    spread = parts.max(axis=0) <= MAX_SHARE_OF_INTERVAL * parts.sum(axis=0)
    return np.where(spread, np.sqrt((FOLDS - 1) * watts.var(axis=0)), 0.0)


def _collinear_phases(gram: np.ndarray) -> list[list[int]]:
    scale = 1 / np.sqrt(np.maximum(np.diag(gram), np.finfo(np.float64).tiny))
    values, vectors = np.linalg.eigh(gram * np.outer(scale, scale))
    parts = (np.abs(vectors[:, values < COLLINEAR * len(gram)]) > MIN_COMPONENT).T
    # for each phase, the phases that the fit cannot separate from this phase
    return [
        sorted({int(other) for part in parts if part[at] for other in np.flatnonzero(part)}) for at in range(len(gram))
    ]


def _doubt(sums: _SourceSums, seconds: float, phases: int, twins: Sequence[str], error_j: float) -> str | None:
    if sums.rows <= phases:
        return f"the counter had {sums.rows} new values, too few for {phases} phases"
    if seconds < UPDATES * sums.update_s:
        return f"{seconds:.3g} s in all, shorter than {UPDATES} updates of {sums.update_s:.3g} s"
    if twins:
        return f"cannot be separated from {' and '.join(twins)}: always in the same proportion"
    if not error_j <= MAX_ERROR_SHARE * sums.joules:
        return (
            f"known only to {error_j:.3g} J, of {sums.joules:.3g} J: steps are shorter than the updates of the counter "
            "and all alike"
        )
    return None
