"""Sampled rows of a run in bounded memory: columns of one number per step in full, columns per rank sampled evenly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import spread_blocks
from hpcdist.telemetry.metrics import observations
from hpcdist.telemetry.metrics.observations import Observations
from hpcdist.telemetry.metrics.step_metrics import MetricsData, read_settled

WIDE_BYTES: Final = 24 << 20  # memory for one column of all ranks
SMALL_TABLES: Final = ("lives", "loss_scale", "recomputed", "noise_scale", "experts")
MAX_SMALL_ROWS: Final = 200_000  # number of first rows read from a table without a bound


@dataclass(frozen=True)
class SampledMetrics:
    """Metrics of a run. Columns with a value per rank are read only for a sample of the steps."""

    steps: dict[str, np.ndarray]  # columns with one value per step, for all steps
    chosen: np.ndarray  # (rows,) indices into the columns of ``steps``
    sample: MetricsData  # all columns, for the steps ``chosen``
    tables: dict[str, dict[str, np.ndarray]]  # columns of the other tables, by table name
    observed: Observations

    @property
    def complete(self) -> bool:
        return len(self.chosen) == len(self.steps["step"])


def read(path: str | Path, wide_bytes: int = WIDE_BYTES) -> SampledMetrics:
    """Read the metrics file ``path`` of a finished or running run. Raises StorageError if missing or invalid.

    Columns with one value per rank are read for a sample of steps, of about ``wide_bytes`` bytes per column.
    """
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
