"""The table ``shares`` of a metrics file: how many samples of a batch each replica took, and from which step on."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

TABLE: Final = "shares"
COLUMNS: Final = (
    Column("first_step", "i8", "1", "the first step with these shares"),
    Column("session", "i8", "1", "which start of the run decided it, from 0"),
    Column("samples", "f8", "1", "samples of the batch that each replica takes", wide=True),
)


def append(file: Any, session: int, first_step: int, samples: Sequence[int]) -> None:
    """Put the shares from ``first_step`` on into an open file; those of later steps are dropped (local)."""
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS, second="replica", width=len(samples))
    known = tables.read(file, TABLE)["first_step"]
    later = np.flatnonzero(known >= first_step)
    tables.shorten(file, TABLE, int(later[0]) if later.size else len(known))
    row = {"first_step": np.array([first_step]), "session": np.array([session])}
    tables.extend(file, TABLE, {**row, "samples": np.array([samples], np.float64)})
