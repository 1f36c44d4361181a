"""Seconds that the ranks of a node spend in each phase, and the joules of training by activity. Pure.

The joules of all activities, such as "compute" and "idle", add up to the joules of training.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from hpcdist.comm.record.spans import CAPACITY, PHASES, STEP
from hpcdist.energy.report import EARLIER_START, Amount, Count, EnergyState

IDLE: Final = "idle"  # time without a span
PHASE_NAMES: Final = (*PHASES[:STEP], IDLE)
GRID_NS: Final = 1_000_000
MAX_GRID_POINTS: Final = 200_000

assert len(PHASES) - 1 == STEP


def flatten_spans(spans: np.ndarray) -> np.ndarray:
    """Return ``spans`` as disjoint, sorted rows (phase, begin, end) in ns. In an overlap, the later begin wins."""
    spans = spans[np.argsort(spans[:, 1], kind="stable")]
    spans = spans[spans[:, 2] > spans[:, 1]]
    if np.all(spans[1:, 1] >= spans[:-1, 2]):
        return spans
    edges = np.unique(spans[:, 1:])
    owner = np.full(len(edges) - 1, -1)
    first, last = np.searchsorted(edges, spans[:, 1]), np.searchsorted(edges, spans[:, 2])
    for index, (start, stop) in enumerate(zip(first, last, strict=True)):  # sorted by begin: later spans overwrite
        owner[start:stop] = index
    held = owner >= 0
    return np.stack([spans[owner[held], 0], edges[:-1][held], edges[1:][held]], axis=1)


class RankPhases:
    """Disjoint time spans of one rank, each with a phase. From ``since_ns`` to ``until_ns``, no span is missing."""

    def __init__(self) -> None:
        self.spans = np.empty((0, 3), np.int64)
        self._by_code: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        self.since_ns: int | None = None  # before, some spans are missing
        self.until_ns: int | None = None

    def add(self, spans: np.ndarray) -> None:
        """Add the ``spans`` that ended since the last call: rows of (phase index, begin, end) in monotonic ns."""
        if not len(spans):
            return
        if len(spans) >= CAPACITY or self.since_ns is None:
            self.since_ns = int(spans[:, 1].min())
        self.until_ns = max(int(spans[:, 2].max()), self.until_ns or 0)
        self._replace(flatten_spans(np.concatenate([self.spans, spans])))

    def forget(self, before_ns: int) -> None:
        """Drop the time spans that ended before the time ``before_ns``."""
        self._replace(self.spans[self.spans[:, 2] > before_ns])

    def _replace(self, spans: np.ndarray) -> None:
        self.spans, self._by_code = spans, []
        for code in np.unique(spans[:, 0]):
            begins, ends = spans[spans[:, 0] == code, 1:].T
            self._by_code.append((int(code), begins.copy(), ends.copy(), np.append(0, np.cumsum(ends - begins))))

    def seconds(self, moments_ns: np.ndarray) -> np.ndarray:
        """Return an array (times, phases) of the seconds in each phase from a fixed origin until ``moments_ns``."""
        seconds = np.zeros((len(moments_ns), STEP))
        for code, begins, ends, sums in self._by_code:
            # Spans begun before the moment in full, minus the part of the last span after the moment.
            at = np.searchsorted(begins, moments_ns, side="right")
            inside = np.maximum(0, ends[np.maximum(at - 1, 0)] - moments_ns) * (at > 0)
            seconds[:, code] = (sums[at] - inside) / 1e9
        return seconds


class PhaseGrid:
    """Table of the seconds that each rank has spent in each phase at many times from ``begin_ns`` to ``end_ns``."""

    def __init__(self, ranks: Sequence[RankPhases], begin_ns: int, end_ns: int) -> None:
        self._pitch_ns = max(GRID_NS, (end_ns - begin_ns) // MAX_GRID_POINTS)
        self._begin_ns = begin_ns
        moments = np.arange(begin_ns, end_ns + 2 * self._pitch_ns, self._pitch_ns)
        self._tables = [rank.seconds(moments) for rank in ranks]

    def of(self, ranks: Sequence[int] | None) -> "PhaseShares":
        """Return the mean seconds in each phase. ``ranks``: indices of the ranks, or None for all ranks."""
        chosen = self._tables if ranks is None else [self._tables[rank] for rank in ranks]
        return PhaseShares(np.mean(chosen, axis=0), self._begin_ns, self._pitch_ns)


class PhaseShares:
    """Mean seconds that ranks spend in each phase, for any time interval."""

    def __init__(self, table: np.ndarray, begin_ns: int, pitch_ns: int) -> None:
        self._table, self._begin_ns, self._pitch_ns = table, begin_ns, pitch_ns

    def _before(self, moments_ns: np.ndarray) -> np.ndarray:
        at, rest = np.divmod(moments_ns - self._begin_ns, self._pitch_ns)
        at = np.clip(at, 0, len(self._table) - 2)
        low = self._table[at]
        return np.asarray(low + (rest / self._pitch_ns)[..., None] * (self._table[at + 1] - low))

    def between(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the seconds in each of `PHASE_NAMES` (last axis) between the times ``begins`` and ``ends`` in ns."""
        seconds = np.empty((*begins.shape, len(PHASE_NAMES)))
        seconds[..., :STEP] = self._before(ends) - self._before(begins)
        seconds[..., STEP] = np.maximum((ends - begins) / 1e9 - seconds[..., :STEP].sum(axis=-1), 0.0)
        return seconds


MEASURED_PHASES: Final = ("checkpoint", "validation")  # measured directly, by their windows
ACTIVITIES: Final = tuple(name for name in PHASE_NAMES if name not in MEASURED_PHASES)
NO_SPANS: Final = "the activity of the ranks was not recorded: set telemetry.trace to true"
NEGLIGIBLE_SHARE: Final = 0.02  # of all training: doubts about a start with less do not make the sums unknown
TOO_SHORT: Final = "the counters had fewer than two new values while the activity of the ranks was known"
MODEL_REASON: Final = "a model samples the utilisation of a device too rarely to see phases of milliseconds"


def job_activities(
    rows: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    training_j: float,
    reason: str | None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the energy of a job by activity: {"joules": {activity: value}, "error_j": ..., "seconds": ..., ...}.

    ``rows``: `Attribution.rows` of all nodes. ``kinds``: kinds of energy sources to include. ``training_j``: joules
    since the last start, or NaN because of ``reason``. ``earlier``: `activities_state` of earlier starts, or None.
    """
    activities = {name: phase for name, phase in _sum_sources(rows, kinds).items() if name in ACTIVITIES}
    total_j = math.fsum(phase["joules"] for phase in activities.values())
    scale = training_j / total_j if total_j > 0 else math.nan
    before_j = math.fsum(phase["joules"] or 0.0 for phase in (earlier or {}).values())
    little = before_j > 0 and training_j <= NEGLIGIBLE_SHARE * (training_j + before_j)
    # If this start has no activities, use the shares of the earlier starts.
    wider = 1 + training_j / before_j if little and not activities else 1.0
    if not activities and not little:
        reason = reason or (TOO_SHORT if rows else NO_SPANS)
    if earlier is not None and not earlier:
        reason = reason or EARLIER_START + NO_SPANS
    totals: dict[str, dict[str, Any]] = {"joules": {}, "error_j": {}, "seconds": {}, "reason": {}}
    for name in ACTIVITIES:
        if name in activities or name in (earlier or {}):
            current = activities.get(name, _ZERO)
            before = (earlier or {}).get(name, _ZERO)
            joules = current["joules"] * scale if current["joules"] else 0.0
            doubt = None if little else current["reason"]
            if before["joules"] is None:  # add the prefix of earlier starts only once
                doubt = doubt or EARLIER_START + (before["reason"] or "not known").removeprefix(EARLIER_START)
            why = reason or doubt
            error_j = joules if little else current["error_j"] * scale if current["error_j"] else 0.0
            totals["seconds"][name] = current["seconds"] + before["seconds"]
            totals["joules"][name] = math.nan if why else joules + before["joules"] * wider
            totals["error_j"][name] = math.nan if why else math.hypot(error_j, before["error_j"])
            if why:
                totals["reason"][name] = why
    return totals | {"unknown": reason}


_ZERO: Final[Mapping[str, Any]] = {"joules": 0.0, "error_j": 0.0, "seconds": 0.0, "reason": None}


def activities_state(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``totals``, a result of `job_activities`, as a JSON dict for a checkpoint. Unknown values are None."""
    return {
        name: {
            "joules": None if math.isnan(joules) else joules,
            "error_j": None if math.isnan(joules) else totals["error_j"][name],
            "seconds": totals["seconds"][name],
            "reason": totals["reason"].get(name),
        }
        for name, joules in totals["joules"].items()
    }


class ActivityState(msgspec.Struct):
    """Seconds and joules of one activity of the ranks, such as "compute" or "idle", as saved in a checkpoint."""

    seconds: Amount
    joules: Amount | None = None  # None: unknown, for the given reason
    error_j: Amount | None = None  # standard error of the joules
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.joules is not None and self.error_j is None:
            raise ValueError("joules are given without error_j; pass the uncertainty of joules as error_j")


class EnergyRecord(msgspec.Struct):
    """Energy record of a run since step ``since_step``, as saved in a checkpoint."""

    since_step: Count
    joules: EnergyState
    activities: dict[str, ActivityState] | None = None


def restored(decoded: Any) -> dict[str, Any]:
    """Check the `EnergyRecord` that was decoded from a checkpoint, and return it as a dict. Raises ValueError."""
    record: dict[str, Any] = msgspec.to_builtins(msgspec.convert(decoded, EnergyRecord))
    return record | {"activities": record["activities"] or {}}


def _sum_sources(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = {}
    counted = [row for row in rows if row["kind"] in kinds]
    for row in counted:
        for name, phase in row["activities"].items():
            total = sums.setdefault(name, dict(_ZERO))
            total["joules"] += phase["joules"]
            total["error_j"] = math.hypot(total["error_j"], phase["error_j"])
            if total["reason"] is None and phase["reason"] is not None:
                total["reason"] = f"{row['name']}: {phase['reason']}"
    # All seconds from one source: the longest of each phase, of different ranks, could exceed the total time.
    longest = max(
        counted, key=lambda row: sum(activity["seconds"] for activity in row["activities"].values()), default=None
    )
    for name, phase in longest["activities"].items() if longest is not None else ():
        sums[name]["seconds"] = phase["seconds"]
    return sums
