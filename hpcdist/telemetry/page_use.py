"""How busy the nodes of a run were over time: from the samples in the metrics file, the mean over the nodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import SCHEMA, VERSION
from hpcdist.telemetry.sampled import spread

TABLE: Final = "energy/utilisation"
WHERE: Final = ("session", "node", "t_mono_ns")
NAMES: Final = {
    "cpu": "processors of the ranks",
    "node_cpu": "all processors",
    "gpu": "GPUs",
    "gpu_memory": "memory of the GPUs",
    "memory": "memory of the ranks",
    "node_memory": "all memory",
}
MOST_ROWS: Final = 500_000
BINS: Final = 300


@dataclass(frozen=True)
class Use:
    """``shares`` by what was used, each (points,) of `NAMES`, at ``hours`` of all starts; pauses are left out."""

    hours: np.ndarray
    shares: Mapping[str, np.ndarray]


def read(path: Path | None) -> Use | None:
    """Return what the metrics file ``path`` has; None where it has nothing. Raises StorageError."""
    if path is None:
        return None
    with files.open_read(path, SCHEMA, VERSION) as file, regular.damage(path, "its table of utilisation is damaged"):
        if TABLE not in file or not file[f"{TABLE}/t_mono_ns"].shape[0]:
            return None
        names = [*WHERE, *(name for name in NAMES if name in file[TABLE])]
        rows = min(file[f"{TABLE}/{name}"].shape[0] for name in names)
        blocks = spread(rows, file[f"{TABLE}/t_mono_ns"].chunks[0], MOST_ROWS)
        found = {
            name: np.concatenate([file[f"{TABLE}/{name}"][start:stop] for start, stop in blocks]) for name in names
        }
        return over_time(found)


def over_time(rows: Mapping[str, np.ndarray]) -> Use:
    """Return the mean over the nodes by time; ``rows`` has columns of `energy.store`, in any order."""
    seconds, at = np.zeros(len(rows["session"])), 0.0
    for session in np.unique(rows["session"]):
        own = rows["session"] == session
        for node in np.unique(rows["node"][own]):
            mine = own & (rows["node"] == node)
            seconds[mine] = at + (rows["t_mono_ns"][mine] - rows["t_mono_ns"][mine].min()) / 1e9
        at = float(seconds[own].max())
    # Two samples of a node to a part: none is empty because of where it begins.
    count = int(np.clip(np.unique(rows["node"], return_counts=True)[1].max() // 2, 1, BINS))
    width = max(at, 1e-9) / count
    part = np.minimum((seconds / width).astype(np.int64), count - 1)
    shares = {}
    for name in NAMES:
        if name in rows and np.isfinite(rows[name]).any():
            known = np.isfinite(rows[name])
            sums = np.bincount(part[known], rows[name][known], minlength=count)
            number = np.bincount(part[known], minlength=count)
            shares[name] = np.where(number > 0, sums / np.maximum(number, 1), np.nan)
    return Use((np.arange(count) + 0.5) * width / 3600, shares)
