"""The table ``recomputed`` of a metrics file: the steps that were computed again before their update, and why."""

from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

TABLE: Final = "recomputed"
COLUMNS: Final = (
    Column("step", "i8", "1", "a step that was computed again"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    Column("suspicious", "i8", "1", "1: its loss or gradient norm was unusual; 0: its turn had come"),
    Column("same", "i8", "1", "1: the same bits both times; 0: a silent fault, and a third computation decided"),
    Column("rank", "i8", "1", "the first rank at fault, -1 where there is none"),
)


def append(file: Any, session: int, step: int, suspicious: bool, same: bool, rank: int) -> None:
    """Put what was found in ``step`` into an open file; rows of the same step and later ones are dropped (local)."""
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS)
    known = tables.read(file, TABLE)["step"]
    later = np.flatnonzero(known >= step)
    tables.shorten(file, TABLE, int(later[0]) if later.size else len(known))
    row = {"step": step, "session": session, "suspicious": int(suspicious), "same": int(same), "rank": rank}
    tables.extend(file, TABLE, {name: np.array([value]) for name, value in row.items()})
