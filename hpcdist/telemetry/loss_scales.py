"""The table ``loss_scale`` of a metrics file: the scale of the loss from a step on, and the steps that were skipped."""

from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

TABLE: Final = "loss_scale"
COLUMNS: Final = (
    Column("step", "i8", "1", "a step with another scale than the one before, or one that was skipped"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    Column("scale", "f8", "1", "the loss, and so each gradient, was computed times this"),
    Column("skipped", "i8", "1", "1: the gradient overflowed, and nothing was updated"),
)


def append(file: Any, session: int, step: int, scale: float, skipped: bool) -> None:
    """Put what happened in ``step`` into an open file; rows of the same step and later ones are dropped (local)."""
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS)
    known = tables.read(file, TABLE)["step"]
    later = np.flatnonzero(known >= step)
    tables.shorten(file, TABLE, int(later[0]) if later.size else len(known))
    row = {"step": step, "session": session, "scale": scale, "skipped": int(skipped)}
    tables.extend(file, TABLE, {name: np.array([value]) for name, value in row.items()})
