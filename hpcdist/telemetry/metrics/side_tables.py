"""Side tables of a metrics file (see `MetricsWriter.put`), and the reading of the whole file in bounded memory.

Columns with one number per step are read in full. Columns with one number per rank are read for evenly spread steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.record.clock_offsets import ClockReading, HostClocks, HostTable
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column, MetricsTable, spread_blocks, texts
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import observations
from hpcdist.telemetry.metrics.observations import Observations
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION, MetricsData, read_settled

_SESSION: Final = Column("session", "i8", "1", "which start of the run made this row, from 0")


def _step_table(name: str, *columns: Column, step: str = "completed optimizer steps", second: str = "") -> MetricsTable:
    first = Column("step", "i8", "1", step)
    # remade: a resume drops the rows of later steps.
    return MetricsTable(name, (first, _SESSION, *columns), second=second, remade=True)


CONSENSUS: Final = _step_table(
    "consensus",
    Column("distance", "f8", "1", "root mean square distance of the replicas from their mean, over its norm"),
)
EXPERTS: Final = _step_table(
    "experts",
    Column("imbalance", "f8", "1", "load of the busiest expert over the mean load, mean over the layers"),
    Column("worst", "f8", "1", "the same of the worst layer"),
    Column("entropy", "f8", "1", "entropy of the scores of a token in nats, mean over tokens and layers"),
    Column("dropped", "f8", "1", "share of the choices of tokens that no expert took"),
    Column("balance_loss", "f8", "1", "load-balancing loss of a sample, mean over the layers, no coefficient"),
    Column("z_loss", "f8", "1", "squared log-sum-exp of the logits of a token, mean, no coefficient"),
)
EXPERT_LOADS: Final = _step_table(
    "expert_loads",
    Column("layer", "i8", "1", "the block, from 1"),
    Column("load", "f8", "1", "choices of each expert in the step, before drops", wide=True),
    second="expert",
)
LIVES: Final = MetricsTable(
    "lives",
    (
        Column("step", "i8", "1", "completed optimizer steps from which it went on"),
        Column("session", "i8", "1", "which start of the run, or life of a job, went on there, from 0"),
        Column("died", "i8", "1", "ranks that died before it"),
        Column("added", "i8", "1", "processes that were started before it"),
        Column("world", "i8", "1", "number of ranks from there on"),
        Column("seconds", "f8", "s", "from the first error on any rank until it went on"),
        Column("pss_bytes", "f8", "By", "memory of the rank that holds most then, shared pages in proportion"),
    ),
)
LOSS_SCALE: Final = _step_table(
    "loss_scale",
    Column("scale", "f8", "1", "the loss, and so each gradient, was computed times this"),
    Column("skipped", "i8", "1", "1: the gradient overflowed, and nothing was updated"),
    step="a step with another scale than the one before, or one that was skipped",
)
NOISE_SCALE: Final = _step_table(
    "noise_scale",
    Column("samples_small", "f8", "1", "samples of the small batches (harmonic mean)"),
    Column("samples_big", "i8", "1", "samples of the global batch"),
    Column("squared_small", "f8", "1", "mean squared norm of the gradients of the small batches"),
    Column("squared_big", "f8", "1", "squared norm of the gradient of the global batch"),
    Column("gradient_squared", "f8", "1", "squared norm of the true gradient, mean over the measurements so far"),
    Column("trace", "f8", "1", "trace of the covariance of one sample's gradient, mean over the measurements"),
    Column("noise_scale", "f8", "1", "their quotient: the critical batch in samples; NaN where it is not known"),
    step="a step in which the noise was measured",
)
RECOMPUTED: Final = _step_table(
    "recomputed",
    Column("suspicious", "i8", "1", "1: its loss or gradient norm was unusual; 0: its turn had come"),
    Column("same", "i8", "1", "1: the same bits both times; 0: a silent fault, and a third computation decided"),
    Column("rank", "i8", "1", "the first rank at fault, or -1"),
    step="a step that was computed again",
)
SHARES: Final = MetricsTable(
    "shares",
    (
        Column("first_step", "i8", "1", "the first step with these shares"),
        _SESSION,
        Column("samples", "f8", "1", "samples of the batch that each replica takes", wide=True),
    ),
    second="replica",
    remade=True,
)
CLOCK_RANKS: Final = MetricsTable(
    "clocks/ranks",
    (
        Column("rank", "i8", "1", "rank of the job"),
        _SESSION,
        Column("host", "i8", "1", "index of its host"),
        Column("name", "S64", "1", "name of the host"),
        Column("boot", "S64", "1", "boot of the host: its processes share one monotonic clock"),
    ),
)
CLOCK_READINGS: Final = MetricsTable(
    "clocks/readings",
    (
        Column("t_mono_ns", "i8", "ns", "monotonic clock of rank 0"),
        _SESSION,
        Column("host", "i8", "1", "index of the host"),
        Column("offset_ns", "i8", "ns", "how far the monotonic clock of the host was ahead of that of rank 0"),
        Column("rtt_ns", "i8", "ns", "round trip behind it: the offset is wrong by half of that at most"),
        Column("wall_ns", "i8", "ns", "wall clock of rank 0 at t_mono_ns"),
    ),
)


@dataclass(frozen=True)
class ClockSession:
    """Clock readings of one start of a run. ``wall_ns``: (wall clock - monotonic clock) of rank 0, in ns."""

    number: int
    hosts: HostTable
    readings: tuple[ClockReading, ...]
    wall_ns: int


def append_clocks(file: Any, session: int, hosts: HostTable, readings: Sequence[ClockReading], wall_ns: int) -> None:
    """Append clock ``readings`` and ``hosts`` to the open metrics ``file``. ``session``: number of the start. Local."""
    for table in (CLOCK_RANKS, CLOCK_READINGS):
        table.create(file)
    if session not in CLOCK_RANKS.read(file)["session"]:
        CLOCK_RANKS.append(
            file,
            rank=range(len(hosts.of_rank)),
            session=session,
            host=hosts.of_rank,
            name=[hosts.names[host] for host in hosts.of_rank],
            boot=[hosts.boots[host] for host in hosts.of_rank],
        )
    CLOCK_READINGS.append(
        file,
        t_mono_ns=[reading.t_ns for reading in readings],
        session=session,
        host=[reading.host for reading in readings],
        offset_ns=[reading.offset_ns for reading in readings],
        rtt_ns=[reading.rtt_ns for reading in readings],
        wall_ns=[reading.t_ns + wall_ns for reading in readings],
    )


def note_clocks(clocks: HostClocks) -> Callable[[Any, int], None]:
    """Compare the clocks of all hosts. Return a function that appends the result to a metrics file. Collective."""
    readings, wall_ns = clocks.measure(), time.time_ns() - time.monotonic_ns()
    return lambda file, session: append_clocks(file, session, clocks.hosts, readings, wall_ns)


def read_clocks(path: Path) -> tuple[ClockSession, ...]:
    """Return a tuple of one `ClockSession` per start of the run from the metrics file ``path``. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its table of clocks is damaged"):
        ranks, readings = CLOCK_RANKS.read(file), CLOCK_READINGS.read(file)
        return tuple(_clock_session(number, ranks, readings) for number in np.unique(ranks.get("session", ())).tolist())


def _clock_session(number: int, ranks: dict[str, np.ndarray], readings: dict[str, np.ndarray]) -> ClockSession:
    rows_of_ranks = np.flatnonzero(ranks["session"] == number)
    rows_of_ranks = rows_of_ranks[np.argsort(ranks["rank"][rows_of_ranks], kind="stable")]
    of_rank = ranks["host"][rows_of_ranks].tolist()
    count = max(of_rank, default=-1) + 1
    firsts = [rows_of_ranks[of_rank.index(host)] if host in of_rank else rows_of_ranks[0] for host in range(count)]
    names, boots = (tuple(texts(ranks[name][firsts])) for name in ("name", "boot"))
    rows = np.flatnonzero(readings["session"] == number)
    columns = (readings[name][rows].tolist() for name in ("host", "t_mono_ns", "offset_ns", "rtt_ns"))
    session_readings = tuple(ClockReading(*values) for values in zip(*columns, strict=True))
    wall_ns = int(readings["wall_ns"][rows[-1]] - readings["t_mono_ns"][rows[-1]]) if len(rows) else 0
    return ClockSession(number, HostTable(tuple(of_rank), names, boots), session_readings, wall_ns)


WIDE_BYTES: Final = 24 << 20  # memory for one column of all ranks
SMALL_TABLES: Final = ("lives", "loss_scale", "recomputed", "noise_scale", "experts")
MAX_SMALL_ROWS: Final = 200_000  # number of first rows read from a table without a bound


@dataclass(frozen=True)
class SampledMetrics:
    """Metrics of a run. Columns with one value per rank contain only the steps ``chosen``, not all steps."""

    steps: dict[str, np.ndarray]  # columns with one value per step, for all steps
    chosen: np.ndarray  # (rows,) indices into the columns of ``steps``
    sample: MetricsData  # all columns, for the steps ``chosen``
    tables: dict[str, dict[str, np.ndarray]]  # columns of the other tables, by table name
    observed: Observations

    @property
    def complete(self) -> bool:
        return len(self.chosen) == len(self.steps["step"])


def read(path: str | Path, wide_bytes: int = WIDE_BYTES) -> SampledMetrics:
    """Read the metrics file ``path``. Limit each column per rank to ``wide_bytes`` bytes. Raises StorageError."""
    return read_settled(path, lambda file: _read(file, wide_bytes))


def _read(file: Any, wide_bytes: int) -> SampledMetrics:
    group = datasets.columns(file, "steps")
    columns = list(group)
    rows = min(group[name].shape[0] for name in columns)
    ranks = max((group[name].shape[1] for name in columns if group[name].ndim > 1), default=1)
    narrow = {name: group[name][:rows] for name in columns if group[name].ndim == 1}
    chunk = max((group[name].chunks[0] for name in columns if group[name].ndim > 1), default=1)
    blocks = spread_blocks(rows, chunk, max(1, wide_bytes // (8 * max(1, ranks))))
    chosen = np.concatenate([np.arange(start, stop) for start, stop in blocks] or [np.zeros(0, np.int64)])
    wide = {
        name: np.concatenate([group[name][:0], *(group[name][start:stop] for start, stop in blocks)])
        for name in columns
        if group[name].ndim > 1
    }
    sample = {name: narrow[name][chosen] if name in narrow else wide[name] for name in columns}
    attributes = files.attributes_of(file)
    evaluations = datasets.read(file, "evaluations")
    small = {name: datasets.read(file, name, MAX_SMALL_ROWS) for name in SMALL_TABLES if name in file}
    return SampledMetrics(narrow, chosen, MetricsData(sample, evaluations, attributes), small, observations.read(file))
