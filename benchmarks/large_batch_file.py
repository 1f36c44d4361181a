"""The results of `large_batch.py`: one HDF5 file, to which each training is added when it has ended.

/                 provenance
/tasks/<name>     what is the same in all trainings of a task
/trials           a row for each training
/curves           its evaluations: samples, validation loss, noise scale
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from large_batch_search import Ended, Wanted

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
    """The trainings in the file at ``path``, which is made when the first is added."""

    def __init__(self, path: Path, provenance: Mapping[str, Any]) -> None:
        self._path, self._provenance = path, provenance
        self.known: dict[Wanted, Ended] = _read(path) if path.exists() else {}

    def begin(self, task: str, settings: Mapping[str, Any]) -> None:
        """Keep the ``settings`` of a task. Raises UsageError where the file has trainings with others."""
        known = _settings(self._path, task) if self._path.exists() else {}
        for name, value in settings.items():
            if (found := known.get(name, value)) != value:
                raise UsageError(
                    f"{self._path}: its trainings of {task} have {name} = {found}, these would have {value}; "
                    "choose another --output"
                )
        if known:
            return  # a file that is only read stays as it is
        with files.edit(self._path, SCHEMA, VERSION) as file:
            if TRIALS[0].name not in file.get("trials", ()):
                file.attrs.update(self._provenance)
                datasets.create(file, "trials", TRIALS)
                datasets.create(file, "curves", CURVES)
            file.require_group(f"tasks/{task}").attrs.update(settings)

    def add(self, wanted: Wanted, ended: Ended) -> None:
        """Write a training. Raises StorageError; the file is then as it was before."""
        number = len(self.known)
        said = {"trial": number, **{name: getattr(wanted, name) for name in _NAMES}}
        said |= {name: getattr(ended, name) for name in ("status", "samples", "loss", "wall_s")}
        row = {column.name: np.array([said[column.name]], column.dtype) for column in TRIALS}
        samples, loss, noise = ended.curve.T
        curve = {"trial_of": np.full(len(samples), number), "samples": samples, "loss": loss, "noise_scale": noise}
        with files.edit(self._path, SCHEMA, VERSION) as file:
            datasets.extend(file, "trials", row)
            datasets.extend(file, "curves", curve)
        self.known[wanted] = ended


_NAMES: Final = ("task", "optimizer", "batch", "seed", "role", "learning_rate")


def _settings(path: Path, task: str) -> dict[str, Any]:
    with files.open_read(path, SCHEMA, VERSION) as file:
        name = f"tasks/{task}"
        return dict(file[name].attrs) if name in file else {}


def _read(path: Path) -> dict[Wanted, Ended]:
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            rows, curves = datasets.read(file, "trials"), datasets.read(file, "curves")
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    points = np.stack([curves[name].astype(float) for name in ("samples", "loss", "noise_scale")], axis=1)
    found = {}
    for number in range(len(rows["trial"])):
        row = {name: _plain(column[number]) for name, column in rows.items()}
        wanted = Wanted(**{name: row[name] for name in _NAMES}, limit_samples=0)
        curve = points[curves["trial_of"] == row["trial"]]
        found[wanted] = Ended(row["status"], row["samples"], row["loss"], row["wall_s"], curve)
    return found


def _plain(value: Any) -> Any:
    plain = value.item()
    return plain.decode() if isinstance(plain, bytes) else plain
