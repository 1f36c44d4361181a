"""Side tables of a metrics file, for what happens beside the steps: one table and one ``append_...`` for each.

clocks       which rank is on which host, and how far the hosts' clocks were apart
consensus    how far replicas that differ were apart after a step
lives        when ranks died or came, and how long it took to go on
loss_scale   the scale of the loss from a step on, and the steps that were skipped
noise_scale  what was measured of the noise of gradients, and the means so far
recomputed   the steps that were computed again before their update, and why
shares       how many samples of a batch each replica took, and from which step on
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.record.clock_offsets import ClockReading, HostTable
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION

CLOCKS_GROUP: Final = "clocks"
_CLOCK_SESSION: Final = Column("session", "i8", "1", "which start of the run, from 0")
CLOCK_RANK_COLUMNS: Final = (
    Column("rank", "i8", "1", "rank of the job"),
    _CLOCK_SESSION,
    Column("host", "i8", "1", "index of its host"),
    Column("name", "S64", "1", "name of the host"),
    Column("boot", "S64", "1", "boot of the host: its processes share one monotonic clock"),
)
CLOCK_READING_COLUMNS: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of rank 0"),
    _CLOCK_SESSION,
    Column("host", "i8", "1", "index of the host"),
    Column("offset_ns", "i8", "ns", "how far the monotonic clock of the host was ahead of that of rank 0"),
    Column("rtt_ns", "i8", "ns", "round trip behind it: the offset is wrong by half of that at most"),
    Column("wall_ns", "i8", "ns", "wall clock of rank 0 at t_mono_ns"),
)


@dataclass(frozen=True)
class ClockSession:
    """Clock readings of one start of a run. ``wall_ns`` is rank 0's wall clock minus its monotonic one, at the last."""

    number: int
    hosts: HostTable
    readings: tuple[ClockReading, ...]
    wall_ns: int


def append_clocks(file: Any, session: int, hosts: HostTable, readings: Sequence[ClockReading], wall_ns: int) -> None:
    """Append ``readings`` to an open file; the ``hosts`` of a session are written once (local).

    ``wall_ns`` is rank 0's wall clock minus its monotonic one.
    """
    if CLOCKS_GROUP not in file:
        datasets.create(file, f"{CLOCKS_GROUP}/ranks", CLOCK_RANK_COLUMNS)
        datasets.create(file, f"{CLOCKS_GROUP}/readings", CLOCK_READING_COLUMNS)
    if session not in datasets.read(file, f"{CLOCKS_GROUP}/ranks")["session"]:
        of_rank = np.array(hosts.of_rank, np.int64)
        rows = {
            "rank": np.arange(len(of_rank)),
            "session": np.full(len(of_rank), session),
            "host": of_rank,
            "name": np.array([hosts.names[host].encode() for host in hosts.of_rank], "S64"),
            "boot": np.array([hosts.boots[host].encode() for host in hosts.of_rank], "S64"),
        }
        datasets.extend(file, f"{CLOCKS_GROUP}/ranks", rows)
    values = np.array(
        [(reading.t_ns, session, reading.host, reading.offset_ns, reading.rtt_ns) for reading in readings], np.int64
    )
    columns = dict(zip(("t_mono_ns", "session", "host", "offset_ns", "rtt_ns"), values.reshape(-1, 5).T, strict=True))
    datasets.extend(file, f"{CLOCKS_GROUP}/readings", columns | {"wall_ns": columns["t_mono_ns"] + wall_ns})


def read_clocks(path: Path) -> tuple[ClockSession, ...]:
    """Return what the metrics file ``path`` has, by session; nothing without such a table. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its table of clocks is damaged"):
        if CLOCKS_GROUP not in file:
            return ()
        ranks, readings = (datasets.read(file, f"{CLOCKS_GROUP}/{name}") for name in ("ranks", "readings"))
        return tuple(_clock_session(number, ranks, readings) for number in np.unique(ranks["session"]).tolist())


def _clock_session(number: int, ranks: dict[str, np.ndarray], readings: dict[str, np.ndarray]) -> ClockSession:
    own = np.flatnonzero(ranks["session"] == number)
    own = own[np.argsort(ranks["rank"][own], kind="stable")]
    of_rank = ranks["host"][own].tolist()
    count = max(of_rank, default=-1) + 1
    firsts = [own[of_rank.index(host)] if host in of_rank else own[0] for host in range(count)]
    names, boots = (tuple(ranks[name][row].decode(errors="replace") for row in firsts) for name in ("name", "boot"))
    rows = np.flatnonzero(readings["session"] == number)
    columns = (readings[name][rows].tolist() for name in ("host", "t_mono_ns", "offset_ns", "rtt_ns"))
    session_readings = tuple(ClockReading(*values) for values in zip(*columns, strict=True))
    wall_ns = int(readings["wall_ns"][rows[-1]] - readings["t_mono_ns"][rows[-1]]) if len(rows) else 0
    return ClockSession(number, HostTable(tuple(of_rank), names, boots), session_readings, wall_ns)


CONSENSUS_TABLE: Final = "consensus"
CONSENSUS_COLUMNS: Final = (
    Column("step", "i8", "1", "completed optimizer steps"),
    Column("session", "i8", "1", "which start of the run measured it, from 0"),
    Column("distance", "f8", "1", "root mean square distance of the replicas from their mean, over its norm"),
)


def append_consensus(file: Any, session: int, distances: Mapping[int, float]) -> None:
    """Put ``distances`` by ascending step into an open file; those of the same and later steps are dropped (local)."""
    if not distances:
        return
    if CONSENSUS_TABLE not in file:
        datasets.create(file, CONSENSUS_TABLE, CONSENSUS_COLUMNS)
    steps = np.array(list(distances))
    known = file[CONSENSUS_TABLE]["step"]
    if len(known) and known[-1] >= steps[0]:
        datasets.shorten(file, CONSENSUS_TABLE, int(np.flatnonzero(known[...] >= steps[0])[0]))
    rows = {"step": steps, "session": np.full(len(steps), session), "distance": np.array(list(distances.values()))}
    datasets.extend(file, CONSENSUS_TABLE, rows)


LIVES_TABLE: Final = "lives"
LIVES_COLUMNS: Final = (
    Column("step", "i8", "1", "completed optimizer steps from which it went on"),
    Column("session", "i8", "1", "which start of the run, or life of a job, went on there, from 0"),
    Column("died", "i8", "1", "ranks that died before it"),
    Column("added", "i8", "1", "processes that were started before it"),
    Column("world", "i8", "1", "number of ranks from there on"),
    Column("seconds", "f8", "s", "from the first error on any rank until it went on"),
    Column("pss_bytes", "f8", "By", "memory of the rank that holds most then, shared pages in proportion"),
)


def append_life(file: Any, session: int, row: Mapping[str, float]) -> None:
    """Put the begin of a life into an open file; ``row`` has the other columns (local)."""
    if LIVES_TABLE not in file:
        datasets.create(file, LIVES_TABLE, LIVES_COLUMNS)
    datasets.extend(file, LIVES_TABLE, {name: np.array([value]) for name, value in {**row, "session": session}.items()})


LOSS_SCALE_TABLE: Final = "loss_scale"
LOSS_SCALE_COLUMNS: Final = (
    Column("step", "i8", "1", "a step with another scale than the one before, or one that was skipped"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    Column("scale", "f8", "1", "the loss, and so each gradient, was computed times this"),
    Column("skipped", "i8", "1", "1: the gradient overflowed, and nothing was updated"),
)


def append_loss_scale(file: Any, session: int, step: int, scale: float, skipped: bool) -> None:
    """Put what happened in ``step`` into an open file; rows of the same step and later ones are dropped (local)."""
    if LOSS_SCALE_TABLE not in file:
        datasets.create(file, LOSS_SCALE_TABLE, LOSS_SCALE_COLUMNS)
    known = datasets.read(file, LOSS_SCALE_TABLE)["step"]
    later = np.flatnonzero(known >= step)
    datasets.shorten(file, LOSS_SCALE_TABLE, int(later[0]) if later.size else len(known))
    row = {"step": step, "session": session, "scale": scale, "skipped": int(skipped)}
    datasets.extend(file, LOSS_SCALE_TABLE, {name: np.array([value]) for name, value in row.items()})


NOISE_SCALE_TABLE: Final = "noise_scale"
NOISE_MEASUREMENTS: Final = (
    Column("samples_small", "f8", "1", "samples of the small batches (harmonic mean)"),
    Column("samples_big", "i8", "1", "samples of the global batch"),
    Column("squared_small", "f8", "1", "mean squared norm of the gradients of the small batches"),
    Column("squared_big", "f8", "1", "squared norm of the gradient of the global batch"),
    Column("gradient_squared", "f8", "1", "squared norm of the true gradient, mean over the measurements so far"),
    Column("trace", "f8", "1", "trace of the covariance of one sample's gradient, mean over the measurements so far"),
    Column("noise_scale", "f8", "1", "their quotient: the critical batch in samples; NaN where it is not known"),
)
NOISE_SCALE_COLUMNS: Final = (
    Column("step", "i8", "1", "a step in which the noise was measured"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    *NOISE_MEASUREMENTS,
)


def append_noise_scales(file: Any, session: int, rows: Sequence[tuple[float, ...]]) -> None:
    """Append ``rows`` to an open file (local); those of the same steps and later are dropped.

    A row is a step and its `NOISE_MEASUREMENTS`.
    """
    if not rows:
        return
    if NOISE_SCALE_TABLE not in file:
        datasets.create(file, NOISE_SCALE_TABLE, NOISE_SCALE_COLUMNS)
    known = datasets.read(file, NOISE_SCALE_TABLE)["step"]
    later = np.flatnonzero(known >= rows[0][0])
    datasets.shorten(file, NOISE_SCALE_TABLE, int(later[0]) if later.size else len(known))
    step, *measured = zip(*rows, strict=True)
    columns = {
        column.name: np.array(values, column.dtype) for column, values in zip(NOISE_MEASUREMENTS, measured, strict=True)
    }
    datasets.extend(
        file, NOISE_SCALE_TABLE, {"step": np.array(step), "session": np.full(len(rows), session), **columns}
    )


def last_noise_scale(path: str | Path) -> float | None:
    """Return the last noise scale in a metrics file, None where there is none, or it is not known."""
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its noise scales are damaged"):
        if NOISE_SCALE_TABLE not in file or not len(file[NOISE_SCALE_TABLE]["step"]):
            return None
        scale = float(file[NOISE_SCALE_TABLE]["noise_scale"][-1])
    return scale if np.isfinite(scale) else None


RECOMPUTED_TABLE: Final = "recomputed"
RECOMPUTED_COLUMNS: Final = (
    Column("step", "i8", "1", "a step that was computed again"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    Column("suspicious", "i8", "1", "1: its loss or gradient norm was unusual; 0: its turn had come"),
    Column("same", "i8", "1", "1: the same bits both times; 0: a silent fault, and a third computation decided"),
    Column("rank", "i8", "1", "the first rank at fault, -1 where there is none"),
)


def append_recomputed(file: Any, session: int, step: int, suspicious: bool, same: bool, rank: int) -> None:
    """Put what was found in ``step`` into an open file; rows of the same step and later ones are dropped (local)."""
    if RECOMPUTED_TABLE not in file:
        datasets.create(file, RECOMPUTED_TABLE, RECOMPUTED_COLUMNS)
    known = datasets.read(file, RECOMPUTED_TABLE)["step"]
    later = np.flatnonzero(known >= step)
    datasets.shorten(file, RECOMPUTED_TABLE, int(later[0]) if later.size else len(known))
    row = {"step": step, "session": session, "suspicious": int(suspicious), "same": int(same), "rank": rank}
    datasets.extend(file, RECOMPUTED_TABLE, {name: np.array([value]) for name, value in row.items()})


SHARES_TABLE: Final = "shares"
SHARES_COLUMNS: Final = (
    Column("first_step", "i8", "1", "the first step with these shares"),
    Column("session", "i8", "1", "which start of the run decided it, from 0"),
    Column("samples", "f8", "1", "samples of the batch that each replica takes", wide=True),
)


def append_shares(file: Any, session: int, first_step: int, samples: Sequence[int]) -> None:
    """Put the shares from ``first_step`` on into an open file; those of later steps are dropped (local)."""
    if SHARES_TABLE not in file:
        datasets.create(file, SHARES_TABLE, SHARES_COLUMNS, second="replica", width=len(samples))
    known = datasets.read(file, SHARES_TABLE)["first_step"]
    later = np.flatnonzero(known >= first_step)
    datasets.shorten(file, SHARES_TABLE, int(later[0]) if later.size else len(known))
    row = {"first_step": np.array([first_step]), "session": np.array([session])}
    datasets.extend(file, SHARES_TABLE, {**row, "samples": np.array([samples], np.float64)})
