"""HDF5 file with the results of the large-batch study. Each training is appended when it has ended.

/                 provenance
/tasks/<name>     settings common to all trainings of a task
/trials           a row for each training
/curves           evaluations of the trainings: samples, validation loss, noise scale
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import columns_of, rows_of
from benchmarks.large_batch.search import Ended, Wanted
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column

SCHEMA, VERSION = "hpcdist.benchmark.large_batch", 1
TRIALS: Final = (
    Column("trial", "i4", "1", "number of the training"),
    Column("task", "S16", "1", "model and data"),
    Column("optimizer", "S8", "1", "its name in a recipe"),
    Column("batch", "i4", "1", "samples of a step"),
    Column("seed", "i4", "1", "of the initial parameters and the order of the samples"),
    Column("role", "S8", "1", "search: of the rate; check: best rate, other seed; noise: noise scale measured"),
    Column("learning_rate", "f8", "1", "peak of the schedule"),
    Column("status", "S8", "1", "reached; missed: not within its limit, or before a better rate; diverged"),
    Column("samples", "f8", "1", "to the target, interpolated between evaluations"),
    Column("loss", "f8", "nat", "lowest validation loss"),
    Column("wall_s", "f4", "s", "time of the training, evaluations included"),
)
CURVES: Final = (
    Column("trial_of", "u2", "1", "number of the training"),
    Column("samples", "i4", "1", "taken so far"),
    Column("loss", "f4", "nat", "mean validation loss"),
    Column("noise_scale", "f2", "1", "smoothed gradient noise scale in samples"),
)


class Records:
    """Trainings in the file ``path``. The first training creates the file."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        self._path, self._provenance = path, provenance
        self.known: dict[Wanted, Ended] = trainings(path) if path.exists() else {}

    def begin(self, task: str, settings: Mapping[str, Any]) -> None:
        """Store the ``settings`` of a task. Raises UsageError if the file's trainings have other settings."""
        stored_settings = _settings(self._path, task) if self._path.exists() else {}
        for name, value in settings.items():
            if (stored := stored_settings.get(name, value)) != value:
                raise UsageError(
                    f"{self._path}: its trainings of {task} have {name} = {stored}, these would have {value}; "
                    "choose another --output"
                )
        if stored_settings:
            return  # do not modify the file when it is only read
        with files.edit(self._path, SCHEMA, VERSION) as file:
            if TRIALS[0].name not in file.get("trials", ()):
                file.attrs.update(self._provenance)
                datasets.create(file, "trials", TRIALS)
                datasets.create(file, "curves", CURVES)
            file.require_group(f"tasks/{task}").attrs.update(settings)

    def add(self, trial: Wanted, ended: Ended) -> None:
        """Append the training ``trial`` and its result to the file. Raises StorageError."""
        number = len(self.known)
        row = {"trial": number, **vars(trial), **{name: getattr(ended, name) for name in _ENDED}}
        curve = [dict(zip(_CURVES, (number, *point), strict=True)) for point in ended.curve.tolist()]
        with files.edit(self._path, SCHEMA, VERSION) as file:
            datasets.extend(file, "trials", columns_of(TRIALS, [row]))
            datasets.extend(file, "curves", columns_of(CURVES, curve))
        self.known[trial] = ended


_NAMES: Final = ("task", "optimizer", "batch", "seed", "role", "learning_rate")
_ENDED: Final = ("status", "samples", "loss", "wall_s")
_CURVES: Final = tuple(column.name for column in CURVES)


def _settings(path: Path, task: str) -> dict[str, Any]:
    with files.open_read(path, SCHEMA, VERSION) as file:
        name = f"tasks/{task}"
        return dict(file[name].attrs) if name in file else {}


def trainings(path: Path) -> dict[Wanted, Ended]:
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            rows, curves = datasets.read(file, "trials"), datasets.read(file, "curves")
        except files.FAILURES as error:
            raise StorageError(f"{path} is damaged: {error}") from error
    points = np.stack([curves[name].astype(float) for name in _CURVES[1:]], axis=1)
    ended = {}
    for row in rows_of(rows):
        trial = Wanted(**{name: row[name] for name in _NAMES}, limit_samples=0)
        ended[trial] = Ended(*(row[name] for name in _ENDED), points[curves["trial_of"] == row["trial"]])
    return ended
