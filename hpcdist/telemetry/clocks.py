"""The table ``clocks`` of a metrics file: which rank is on which host, and how far the hosts' clocks were apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.clocks import Hosts, Reading
from hpcdist.hdf5 import files, tables
from hpcdist.hdf5.tables import Column
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import SCHEMA, VERSION

GROUP: Final = "clocks"
_SESSION: Final = Column("session", "i8", "1", "which start of the run, from 0")
RANKS: Final = (
    Column("rank", "i8", "1", "rank of the job"),
    _SESSION,
    Column("host", "i8", "1", "index of its host"),
    Column("name", "S64", "1", "name of the host"),
    Column("boot", "S64", "1", "boot of the host: its processes share one monotonic clock"),
)
READINGS: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of rank 0"),
    _SESSION,
    Column("host", "i8", "1", "index of the host"),
    Column("offset_ns", "i8", "ns", "how far the monotonic clock of the host was ahead of that of rank 0"),
    Column("rtt_ns", "i8", "ns", "round trip behind it: the offset is wrong by half of that at most"),
    Column("wall_ns", "i8", "ns", "wall clock of rank 0 at t_mono_ns"),
)


@dataclass(frozen=True)
class Session:
    """What one start of a run has measured. ``wall_ns`` is rank 0's wall clock minus its monotonic one, at the last."""

    number: int
    hosts: Hosts
    readings: tuple[Reading, ...]
    wall_ns: int


def append(file: Any, session: int, hosts: Hosts, readings: Sequence[Reading], wall_ns: int) -> None:
    """Append ``readings`` to an open file; the ``hosts`` of a session are written once (local).

    ``wall_ns`` is rank 0's wall clock minus its monotonic one.
    """
    if GROUP not in file:
        tables.create(file, f"{GROUP}/ranks", RANKS)
        tables.create(file, f"{GROUP}/readings", READINGS)
    if session not in tables.read(file, f"{GROUP}/ranks")["session"]:
        of_rank = np.array(hosts.of_rank, np.int64)
        rows = {
            "rank": np.arange(len(of_rank)),
            "session": np.full(len(of_rank), session),
            "host": of_rank,
            "name": np.array([hosts.names[host].encode() for host in hosts.of_rank], "S64"),
            "boot": np.array([hosts.boots[host].encode() for host in hosts.of_rank], "S64"),
        }
        tables.extend(file, f"{GROUP}/ranks", rows)
    values = np.array([(one.t_ns, session, one.host, one.offset_ns, one.rtt_ns) for one in readings], np.int64)
    columns = dict(zip(("t_mono_ns", "session", "host", "offset_ns", "rtt_ns"), values.reshape(-1, 5).T, strict=True))
    tables.extend(file, f"{GROUP}/readings", columns | {"wall_ns": columns["t_mono_ns"] + wall_ns})


def read(path: Path) -> tuple[Session, ...]:
    """Return what the metrics file ``path`` has, by session; nothing without such a table. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its table of clocks is damaged"):
        if GROUP not in file:
            return ()
        ranks, readings = (tables.read(file, f"{GROUP}/{name}") for name in ("ranks", "readings"))
        return tuple(_session(number, ranks, readings) for number in np.unique(ranks["session"]).tolist())


def _session(number: int, ranks: dict[str, np.ndarray], readings: dict[str, np.ndarray]) -> Session:
    own = np.flatnonzero(ranks["session"] == number)
    own = own[np.argsort(ranks["rank"][own], kind="stable")]
    of_rank = ranks["host"][own].tolist()
    count = max(of_rank, default=-1) + 1
    firsts = [own[of_rank.index(host)] if host in of_rank else own[0] for host in range(count)]
    names, boots = (tuple(ranks[name][row].decode(errors="replace") for row in firsts) for name in ("name", "boot"))
    rows = np.flatnonzero(readings["session"] == number)
    columns = (readings[name][rows].tolist() for name in ("host", "t_mono_ns", "offset_ns", "rtt_ns"))
    found = tuple(Reading(*values) for values in zip(*columns, strict=True))
    wall_ns = int(readings["wall_ns"][rows[-1]] - readings["t_mono_ns"][rows[-1]]) if len(rows) else 0
    return Session(number, Hosts(tuple(of_rank), names, boots), found, wall_ns)
