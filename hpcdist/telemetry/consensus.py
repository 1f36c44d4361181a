"""The table ``consensus`` of a metrics file: how far replicas that differ were apart after a step."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

TABLE: Final = "consensus"
COLUMNS: Final = (
    Column("step", "i8", "1", "completed optimizer steps"),
    Column("session", "i8", "1", "which start of the run measured it, from 0"),
    Column("distance", "f8", "1", "root mean square distance of the replicas from their mean, over its norm"),
)


def append(file: Any, session: int, distances: Mapping[int, float]) -> None:
    """Put ``distances`` by ascending step into an open file; those of the same and later steps are dropped (local)."""
    if not distances:
        return
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS)
    steps = np.array(list(distances))
    known = file[TABLE]["step"]
    if len(known) and known[-1] >= steps[0]:
        tables.shorten(file, TABLE, int(np.flatnonzero(known[...] >= steps[0])[0]))
    rows = {"step": steps, "session": np.full(len(steps), session), "distance": np.array(list(distances.values()))}
    tables.extend(file, TABLE, rows)
