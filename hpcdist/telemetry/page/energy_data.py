"""Energy, utilisation and step spans of a run for its page: joules, power over time, load of nodes, one step."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.record import spans
from hpcdist.comm.record.spans import RankSpans, Span
from hpcdist.constants import ENERGY_COLUMNS, ENERGY_SAMPLES, ENERGY_SOURCES, USAGE_FILE
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import read_spread
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import side_tables
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION
from hpcdist.telemetry.trace.clock_correction import HostClock

MAX_RANKS: Final = 32  # largest number of ranks in a chart
MAX_SPANS: Final = 6000  # largest number of spans of all ranks; the longest are kept
LAST_STEPS: Final = 50  # number of last steps to choose from
NO_FILES: Final = "the run kept no spans (recorder/rank-*.spans): an earlier version, or telemetry.trace = false"
NO_STEP: Final = "no step is in the spans of all ranks: it did not end, or its spans were overwritten"


@dataclass(frozen=True)
class RankLane:
    """Operations (``spans``) of one rank in a step. Times are in seconds since the earliest rank began the step."""

    rank: int
    host: str
    begin_s: float
    end_s: float
    spans: Sequence[tuple[float, float, Span]]


@dataclass(frozen=True)
class StepSpans:
    """Recorded operations of one step, one `RankLane` per rank. ``reason``: why there are no operations, or ""."""

    step: int = 0
    lanes: Sequence[RankLane] = ()
    world: int = 0  # number of all ranks
    clocks: str = ""  # text on the accuracy of the clocks
    left_out: int = 0  # number of spans too short to draw
    reason: str = NO_FILES

    @property
    def seconds(self) -> float:
        """Seconds from the begin of the step on the earliest rank to the end of the step on the latest rank."""
        return max((lane.end_s for lane in self.lanes), default=0.0)

    def totals(self) -> dict[str, float]:
        """Return a dict {phase: seconds}. The seconds are averaged over the ranks."""
        totals: dict[str, float] = {}
        for lane in self.lanes:
            for begin, end, span in lane.spans:
                totals[span.phase] = totals.get(span.phase, 0.0) + (end - begin) / len(self.lanes)
        return totals


def read(run_dir: Path, metrics_path: Path | None = None, slowest_rank: int | None = None) -> StepSpans:
    """Return the operations of a step of median duration on up to `MAX_RANKS` ranks, including ``slowest_rank``."""
    # The median is over the last `LAST_STEPS` steps. The first and the last rank are always included.
    paths = {number: path for path in (run_dir / "recorder").glob("rank-*.spans") if (number := _number(path)) >= 0}
    if not paths:
        return StepSpans()
    ranks, damaged = [], []
    for number in select_evenly(sorted(paths), slowest_rank):
        try:
            ranks.append(spans.read(paths[number]))
        except StorageError as error:
            damaged.append(str(error))
    if not ranks:
        return StepSpans(reason=damaged[0])
    newest = max(ranks, key=lambda rank: rank.wall_ns)
    ranks = [rank for rank in ranks if rank.rank < newest.world]  # a larger, earlier start may have left other files
    step = _typical(ranks)
    if step is None:
        return StepSpans(world=newest.world, reason=NO_STEP)
    offsets, worth = _offsets(ranks, step, metrics_path)
    lanes = _lanes(ranks, step, offsets)
    shown, left_out = _longest(lanes)
    return StepSpans(step, shown, newest.world, worth, left_out, "")


def select_evenly(numbers: Sequence[int], included: int | None) -> list[int]:
    """Return a list of up to `MAX_RANKS` evenly spaced elements of ``numbers``, including the element ``included``."""
    if len(numbers) <= MAX_RANKS:
        return list(numbers)
    selected = [numbers[at] for at in np.linspace(0, len(numbers) - 1, MAX_RANKS).round().astype(int)]
    if included in numbers and included not in selected:
        assert included is not None
        nearest = min(selected[1:-1], key=lambda number: abs(number - included))
        selected[selected.index(nearest)] = included
    return sorted(selected)


def _number(path: Path) -> int:
    text = path.stem.removeprefix("rank-")
    return int(text) if text.isdecimal() else -1


def _steps(rank: RankSpans) -> Mapping[int, Span]:
    return {span.step: span for span in rank.spans if span.phase == "step" and span.end_ns > span.begin_ns}


def _typical(ranks: Sequence[RankSpans]) -> int | None:
    # Step of median duration among the last steps that all ranks recorded.
    steps = [_steps(rank) for rank in ranks]
    # A step whose first operations were overwritten in the ring buffer would look idle.
    oldest = [min((span.begin_ns for span in rank.spans if span.phase != "step"), default=math.inf) for rank in ranks]
    common = set.intersection(
        *(
            {number for number, span in row.items() if span.begin_ns >= first or len(row) == 1}
            for row, first in zip(steps, oldest, strict=True)
        )
    )
    last = sorted(common)[-LAST_STEPS:]
    if not last:
        return None
    lasts = {number: max(row[number].end_ns - row[number].begin_ns for row in steps) for number in last}
    middle = statistics.median_low(lasts.values())
    return max(number for number in last if lasts[number] == middle)


def _offsets(ranks: Sequence[RankSpans], step: int, metrics_path: Path | None) -> tuple[dict[int, int], str]:
    # Return the ns to add to each rank's clock at ``step``, and a text about their accuracy.
    boots = {rank.boot_id or rank.host for rank in ranks}
    if len(boots) == 1:  # one kernel, one clock
        return {rank.rank: 0 for rank in ranks}, ""
    sessions = side_tables.read_clocks(metrics_path) if metrics_path is not None else ()
    last = sessions[-1].hosts if sessions else None
    if last is not None and all(
        rank.rank < len(last.of_rank) and last.boots[last.of_rank[rank.rank]] == rank.boot_id for rank in ranks
    ):
        offsets, bounds = {}, [0]
        for rank in ranks:
            host = last.of_rank[rank.rank]
            clock = HostClock([reading for reading in sessions[-1].readings if reading.host == host])
            begin = _steps(rank)[step].begin_ns
            offsets[rank.rank] = clock.reference_ns(begin) - begin
            bounds.append(clock.bound_ns(begin) or 0)
        return offsets, f"clocks that were compared with messages, to within {max(bounds) / 1e6:.3g} ms"
    offsets = {rank.rank: rank.wall_ns - rank.monotonic_ns for rank in ranks}
    return offsets, "the nodes' wall clocks, which may differ by some milliseconds"


def _lanes(ranks: Sequence[RankSpans], step: int, offset: Mapping[int, int]) -> list[RankLane]:
    steps = {rank.rank: _steps(rank)[step] for rank in ranks}
    origin = min(steps[rank].begin_ns + offset[rank] for rank in steps)
    lanes = []
    for rank in ranks:
        lane, shift = steps[rank.rank], offset[rank.rank] - origin
        spans = [
            ((span.begin_ns + shift) / 1e9, (span.end_ns + shift) / 1e9, span)
            for span in rank.spans
            if span.phase != "step" and span.end_ns > lane.begin_ns and span.begin_ns < lane.end_ns
        ]
        lanes.append(RankLane(rank.rank, rank.host, (lane.begin_ns + shift) / 1e9, (lane.end_ns + shift) / 1e9, spans))
    return lanes


def _longest(lanes: Sequence[RankLane]) -> tuple[list[RankLane], int]:
    lengths = sorted((end - begin for lane in lanes for begin, end, _ in lane.spans), reverse=True)
    if len(lengths) <= MAX_SPANS:
        return list(lanes), 0
    least, shown, count = lengths[MAX_SPANS], [], 0
    for lane in lanes:
        long_spans = [row for row in lane.spans if row[1] - row[0] > least]
        shown.append(replace(lane, spans=long_spans))
        count += len(long_spans)
    return shown, len(lengths) - count


MAX_SAMPLES: Final = 1_000_000
CURVE_POINTS: Final = 400  # number of points of a curve
NOT_KEPT: Final = "the run kept no record of energy: an earlier version, or it has not come so far"


@dataclass(frozen=True)
class PhaseEnergy:
    """Energy and time of one phase over all starts of the run. ``joules`` is None if unknown."""

    name: str
    joules: float | None
    seconds: float


@dataclass(frozen=True)
class EnergyCurve:
    """Energy and power over time from one kind of energy counter, such as "gpu". ``hours``: time of each value."""

    hours: np.ndarray
    joules: np.ndarray
    watts: np.ndarray


@dataclass(frozen=True)
class RunEnergy:
    """Energy of a run over all its starts. If the total is unknown, ``joules`` is None and ``reason`` explains why."""

    joules: float | None = None
    reason: str = NOT_KEPT
    j_per_step: float | None = None
    by_kind: Mapping[str, float | None] = field(default_factory=dict)
    phases: Sequence[PhaseEnergy] = ()
    parts: Sequence[PhaseEnergy] = ()  # of training
    label: str = ""  # shown with each figure, for example for a declared model
    renewed: bool = False  # True if the record is newer than the attributes from the last end of the run

    @property
    def seconds(self) -> float:
        """Total seconds of all measured phases, summed over all starts of the run."""
        return math.fsum(phase.seconds for phase in self.phases)


def read_energy(run_dir: Path, attributes: Mapping[str, Any], last_step: int = 0) -> RunEnergy:
    """Return the energy of the run in ``run_dir``. ``attributes``: root attributes of the run's metrics file."""
    # If the totals of the two files differ, the one in `USAGE_FILE` is used.
    usage = regular.json_or_none(run_dir / USAGE_FILE)
    record = usage.get("joules") if isinstance(usage, dict) else None
    record = record if isinstance(record, dict) else {}
    by_kind = {str(kind): finite_number(joules) for kind, joules in _as_dict(record.get("by_kind")).items()}
    phases = _phases(record.get("phases"))
    parts = _phases(usage.get("activities")) if isinstance(usage, dict) else []
    label = record["label"] if isinstance(record.get("label"), str) else ""
    joules_total, step = finite_number(attributes.get("energy_j")), finite_number(attributes.get("j_per_step"))
    reason = str(record.get("reason") or attributes.get("energy_reason") or "")
    renewed = False
    if by_kind and not reason and None not in by_kind.values():
        noted = total_joules(by_kind)
        renewed = step is None or (joules_total is not None and not math.isclose(joules_total, noted, rel_tol=1e-6))
        joules_total = noted
    if renewed:
        training = next((phase.joules for phase in phases if phase.name == "training"), None)
        steps = last_step - int(finite_number(usage.get("since_step")) or 0)
        step = None if training is None or steps <= 0 else training / steps
    if joules_total is None and not reason:
        reason = NOT_KEPT
    return RunEnergy(joules_total, reason, step, by_kind, phases, parts, label, renewed)


def _phases(rows: Any) -> list[PhaseEnergy]:
    return [
        PhaseEnergy(str(name), finite_number(row.get("joules")), finite_number(row.get("seconds")) or 0.0)
        for name, row in _as_dict(rows).items()
        if isinstance(row, dict)
    ]


def total_joules(by_kind: Mapping[str, float | None]) -> float:
    """Return the total energy in joules: ``by_kind["node"]`` if known, else the sum of the known values."""
    if by_kind.get("node") is not None:
        return float(by_kind["node"] or 0.0)
    return math.fsum(value for value in by_kind.values() if value is not None)


def finite_number(value: Any) -> float | None:
    """Return ``value`` as a float, or None if it is not a finite number."""
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_finite else None


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class EnergyCurves:
    """Energy curves by kind of counter. ``thinned``: True if some samples were left out."""

    by_kind: Mapping[str, EnergyCurve] = field(default_factory=dict)
    thinned: bool = False


def read_curves(path: Path | None) -> EnergyCurves:
    """Return the energy curves in the metrics file ``path``. The result is empty if the run stored no samples."""
    if path is None:
        return EnergyCurves()
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its energy samples are damaged"):
        read, is_whole = read_spread(file, ENERGY_SAMPLES, ENERGY_COLUMNS, MAX_SAMPLES)
        return (
            EnergyCurves(energy_curves(read, datasets.read(file, ENERGY_SOURCES)), not is_whole)
            if read
            else EnergyCurves()
        )


def energy_curves(samples: Mapping[str, np.ndarray], sources: Mapping[str, np.ndarray]) -> dict[str, EnergyCurve]:
    """Return a dict {kind of counter: energy curve}. ``samples``, ``sources``: energy tables of a metrics file."""
    keys = ("session", "node", "source")
    kinds = {
        tuple(int(sources[name][row]) for name in keys): sources["kind"][row].decode(errors="replace")
        for row in range(len(sources["kind"]))
    }
    order = np.lexsort([samples["t_mono_ns"], *(samples[name] for name in reversed(keys))])
    ordered = {name: column[order] for name, column in samples.items()}
    changed = np.zeros(len(order), bool)
    for name in keys:
        changed[1:] |= np.diff(ordered[name]) != 0
    bounds = [0, *np.flatnonzero(changed).tolist(), len(order)]
    parts: dict[int, dict[str, list[tuple[np.ndarray, np.ndarray, int]]]] = {}
    begins: dict[tuple[int, int], int] = {}
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        if stop - start < 2:
            continue
        session, node, source = (int(ordered[name][start]) for name in keys)
        pair = (ordered["t_mono_ns"][start:stop], ordered["energy_mj"][start:stop])
        parts.setdefault(session, {}).setdefault(kinds.get((session, node, source), "?"), []).append((*pair, node))
        first = int(pair[0][0])
        begins[session, node] = min(begins.get((session, node), first), first)
    return _joined_sessions(parts, begins)


def _joined_sessions(
    parts: Mapping[int, Mapping[str, Sequence[Any]]], begins: Mapping[tuple[int, int], int]
) -> dict[str, EnergyCurve]:
    # parts[session][counter type]: list of (times, millijoules, node). begins[session, node]: begin time. A session is
    # one start of the run.
    lasted = {
        session: max((int(times[-1]) - begins[session, node]) / 1e9 for row in kinds.values() for times, _, node in row)
        for session, kinds in parts.items()
    }
    total_s = sum(lasted.values()) or 1.0
    curves: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    names = list(dict.fromkeys(kind for kinds in parts.values() for kind in kinds))
    base, at = dict.fromkeys(names, 0.0), 0.0
    for session in sorted(parts):
        points = max(3, round(CURVE_POINTS * lasted[session] / total_s))
        seconds = np.linspace(0.0, lasted[session], points)
        for kind in names:
            joules = np.zeros(points) if kind in parts[session] else np.full(points, np.nan)
            for times, mj, node in parts[session].get(kind, ()):
                joules += _on_grid(seconds, (times - begins[session, node]) / 1e9, (mj - mj[0]) / 1e3)
            watts = np.append(np.diff(joules) / max(seconds[1], 1e-9), np.nan)
            curves.setdefault(kind, []).append(((at + seconds) / 3600, base[kind] + joules, watts))
            last = joules[np.isfinite(joules)]
            base[kind] += float(last[-1]) if last.size else 0.0
        at += lasted[session]
    return {
        kind: EnergyCurve(*(np.concatenate(rows) for rows in zip(*row, strict=True))) for kind, row in curves.items()
    }


def _on_grid(seconds: np.ndarray, times: np.ndarray, joules: np.ndarray) -> np.ndarray:
    near = 2 * (seconds[1] - seconds[0])
    values = np.interp(seconds, times, joules)
    values[(seconds < times[0] - near) | (seconds > times[-1] + near)] = np.nan
    return values


UTILISATION_TABLE: Final = "energy/utilisation"
UTILISATION_KEYS: Final = ("session", "node", "t_mono_ns")
UTILISATION_NAMES: Final = {
    "cpu": "processors of the ranks",
    "node_cpu": "all processors",
    "gpu": "GPUs",
    "gpu_memory": "memory of the GPUs",
    "memory": "memory of the ranks",
    "node_memory": "all memory",
}
MAX_UTILISATION_ROWS: Final = 500_000
UTILISATION_BINS: Final = 300


@dataclass(frozen=True)
class UtilisationCurves:
    """Utilisation over time. ``shares``: dict {resource, such as "cpu": used fraction at each of the ``hours``}."""

    hours: np.ndarray
    shares: Mapping[str, np.ndarray]


def read_utilisation(path: Path | None) -> UtilisationCurves | None:
    """Return the utilisation curves in the metrics file ``path``, or None if it has no samples. Raises StorageError."""
    if path is None:
        return None
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its table of utilisation is damaged"):
        columns = file.get(UTILISATION_TABLE, ())
        names = [*UTILISATION_KEYS, *(name for name in UTILISATION_NAMES if name in columns)]
        rows, _ = read_spread(file, UTILISATION_TABLE, names, MAX_UTILISATION_ROWS)
        return mean_over_nodes(rows) if rows else None


def mean_over_nodes(rows: Mapping[str, np.ndarray]) -> UtilisationCurves:
    """Return utilisation curves averaged over nodes. ``rows``: dict {column of `UTILISATION_TABLE`: array}."""
    seconds, at = np.zeros(len(rows["session"])), 0.0
    for session in np.unique(rows["session"]):
        in_session = rows["session"] == session
        for node in np.unique(rows["node"][in_session]):
            of_node = in_session & (rows["node"] == node)
            seconds[of_node] = at + (rows["t_mono_ns"][of_node] - rows["t_mono_ns"][of_node].min()) / 1e9
        at = float(seconds[in_session].max())
    # At least two samples per node and bin, so that no bin is empty by its alignment.
    count = int(np.clip(np.unique(rows["node"], return_counts=True)[1].max() // 2, 1, UTILISATION_BINS))
    width = max(at, 1e-9) / count
    bin_of_row = np.minimum((seconds / width).astype(np.int64), count - 1)
    shares = {}
    for name in UTILISATION_NAMES:
        if name in rows and np.isfinite(rows[name]).any():
            is_known = np.isfinite(rows[name])
            sums = np.bincount(bin_of_row[is_known], rows[name][is_known], minlength=count)
            number = np.bincount(bin_of_row[is_known], minlength=count)
            shares[name] = np.where(number > 0, sums / np.maximum(number, 1), np.nan)
    return UtilisationCurves((np.arange(count) + 0.5) * width / 3600, shares)
