"""The table ``noise_scale`` of a metrics file: what was measured of the noise of gradients, and the means so far."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import files, tables
from hpcdist.hdf5.tables import Column
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import SCHEMA, VERSION

TABLE: Final = "noise_scale"
MEASURED: Final = (
    Column("samples_small", "f8", "1", "samples of the small batches (harmonic mean)"),
    Column("samples_big", "i8", "1", "samples of the global batch"),
    Column("squared_small", "f8", "1", "mean squared norm of the gradients of the small batches"),
    Column("squared_big", "f8", "1", "squared norm of the gradient of the global batch"),
    Column("gradient_squared", "f8", "1", "squared norm of the true gradient, mean over the measurements so far"),
    Column("trace", "f8", "1", "trace of the covariance of one sample's gradient, mean over the measurements so far"),
    Column("noise_scale", "f8", "1", "their quotient: the critical batch in samples; NaN where it is not known"),
)
COLUMNS: Final = (
    Column("step", "i8", "1", "a step in which the noise was measured"),
    Column("session", "i8", "1", "which start of the run made this step, from 0"),
    *MEASURED,
)


def append(file: Any, session: int, rows: Sequence[tuple[float, ...]]) -> None:
    """Put ``rows``, each a step and `MEASURED`, into an open file; those of the same steps and later are dropped."""
    if not rows:
        return
    if TABLE not in file:
        tables.create(file, TABLE, COLUMNS)
    known = tables.read(file, TABLE)["step"]
    later = np.flatnonzero(known >= rows[0][0])
    tables.shorten(file, TABLE, int(later[0]) if later.size else len(known))
    step, *measured = zip(*rows, strict=True)
    found = {column.name: np.array(values, column.dtype) for column, values in zip(MEASURED, measured, strict=True)}
    tables.extend(file, TABLE, {"step": np.array(step), "session": np.full(len(rows), session), **found})


def last(path: str | Path) -> float | None:
    """Return the last noise scale in a metrics file, None where there is none, or it is not known."""
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its noise scales are damaged"):
        if TABLE not in file or not len(file[TABLE]["step"]):
            return None
        found = float(file[TABLE]["noise_scale"][-1])
    return found if np.isfinite(found) else None
