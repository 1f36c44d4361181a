"""The table ``lives`` of a metrics file: when ranks died or came, and how long it took to go on."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

TABLE: Final = "lives"
COLUMNS: Final = (
    Column("step", "i8", "1", "completed optimizer steps from which it went on"),
    Column("session", "i8", "1", "which start of the run, or life of a job, went on there, from 0"),
    Column("died", "i8", "1", "ranks that died before it"),
    Column("added", "i8", "1", "processes that were started before it"),
    Column("world", "i8", "1", "number of ranks from there on"),
    Column("seconds", "f8", "s", "from the first error on any rank until it went on"),
    Column("pss_bytes", "f8", "By", "memory of the rank that holds most then, shared pages in proportion"),
)


def append(file: Any, session: int, row: Mapping[str, float]) -> None:
    """Put the begin of a life into an open file; ``row`` has the other columns (local)."""
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS)
    tables.extend(file, TABLE, {name: np.array([value]) for name, value in {**row, "session": session}.items()})
