"""Results of the study of compression: one HDF5 file, to which each training is added when it has ended.

/             provenance, the keys of the study
/trainings    a row for each training
/points       its evaluations
/times        steps over slow links, by phase: a row for each step and rank
/links        what raw TCP carried over the same links between them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.compression.plan import Training
from benchmarks.harness import columns_of, rows_of
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column

SCHEMA, VERSION = "hpcdist.benchmark.compression", 1
TRAININGS: Final = (
    Column("training", "i4", "1", "number of the training"),
    Column("contender", "S24", "1", "compressor and its settings"),
    Column("feedback", "i1", "1", "1: with error feedback (or dense); 0: without"),
    Column("learning_rate", "f8", "1", "peak of the schedule"),
    Column("seed", "i4", "1", "of the initial parameters and the order of the samples"),
    Column("loss", "f8", "nat", "validation loss at the end; NaN: diverged"),
    Column("sent_bytes", "f8", "By", "sent by the rank that sends most, over the whole run"),
    Column(
        "compressed_bytes", "f8", "By", "the same of one step, median of the last tenth: what comes after any warm-up"
    ),
    Column("wall_s", "f4", "s", "time of the training, evaluations included, beside whatever else the machine did"),
)
POINTS: Final = (
    Column("training_of", "i4", "1", "number of the training"),
    Column("step", "i4", "1", "updates so far"),
    Column("loss", "f4", "nat", "validation loss"),
    Column("train_loss", "f4", "nat", "mean training loss since the point before"),
    Column("sent_bytes", "f8", "By", "sent so far by the rank that sends most"),
)
TIMES: Final = (
    Column("number", "i4", "1", "of the step among all that were timed"),
    Column("contender", "i2", "1", "place of its name in the attribute names"),
    Column("round", "i2", "1", "in which all contenders had their turn"),
    Column("rank", "i2", "1", "one on each host"),
    Column("step_s", "f4", "s", "wall time of the step"),
    Column("compute_s", "f4", "s", "forward and backward"),
    Column("update_s", "f4", "s", "norm and optimizer"),
    Column("codec_s", "f4", "s", "encoding and decoding"),
    Column("sent_bytes", "f8", "By", "sent in messages"),
)
LINKS: Final = (
    Column("turn", "i2", "1", "round"),
    Column("bytes_per_s", "f8", "By/s", "raw TCP, each way at once, payload"),
)

_POINTS: Final = tuple(column.name for column in POINTS)


@dataclass(frozen=True)
class Ended:
    """What came of a training; ``points`` (evaluations, 4) are those of POINTS without the training."""

    loss: float
    sent_bytes: float
    compressed_bytes: float
    wall_s: float
    points: np.ndarray


@dataclass(frozen=True)
class Times:
    """Steps over slow links: ``figures`` by contender (rounds, steps, ranks, phases), and the raw links by round."""

    figures: Mapping[str, np.ndarray]
    bytes_per_s: np.ndarray


def ended(found: Mapping[str, Any]) -> Ended:
    """Return what the ranks say of a training as a row of the file."""
    sent, losses = np.array(found["sent_bytes"]), np.array(found["losses"])
    rows, before = [], 0
    for step, loss in found["points"]:
        rows.append((step, loss, losses[before:step].mean() if step > before else np.nan, sent[:step].sum()))
        before = step
    last = sent[-max(1, len(sent) // 10) :]
    return Ended(
        found["points"][-1][1], float(sent.sum()), float(np.median(last)), found["wall_s"], np.array(rows, float)
    )


class Records:
    """The results in the file at ``path``, which is made if need be. Raises UsageError where it is of another study."""

    def __init__(self, path: Path, provenance: Mapping[str, Any], study: Mapping[str, Any]) -> None:
        self._path = path
        with files.edit(path, SCHEMA, VERSION) as file:
            if "trainings" not in file:
                file.attrs.update({**provenance, **study})
                for name, columns in (("trainings", TRAININGS), ("points", POINTS), ("times", TIMES), ("links", LINKS)):
                    datasets.create(file, name, columns)
            for name, value in study.items():
                if (found := file.attrs.get(name)) != value:
                    raise UsageError(
                        f"{path}: its trainings have {name} = {found}, these would have {value}; choose "
                        "another --output"
                    )
        self.known: dict[Training, Ended] = trainings(path)

    def add(self, training: Training, one: Ended) -> None:
        """Write a training. Raises StorageError; the file is then as it was before."""
        number = len(self.known)
        row = {"training": number, **vars(training), **vars(one)}
        points = [dict(zip(_POINTS, (number, *point), strict=True)) for point in one.points.tolist()]
        with files.edit(self._path, SCHEMA, VERSION) as file:
            datasets.extend(file, "trainings", columns_of(TRAININGS, [row]))
            datasets.extend(file, "points", columns_of(POINTS, points))
        self.known[training] = one

    def put_times(self, names: Sequence[str], figures: np.ndarray, bytes_per_s: Sequence[float]) -> None:
        """Write the steps that were timed, (ranks, contenders, rounds, steps, phases), in place of earlier ones."""
        ranks, _, rounds, turn, _ = figures.shape
        names_of = [column.name for column in TIMES]
        places = [(place, *index) for place in range(len(names)) for index in np.ndindex(rounds, turn, ranks)]
        rows = [
            dict(zip(names_of, (number, place, at, rank, *figures[rank, place, at, step]), strict=True))
            for number, (place, at, step, rank) in enumerate(places)
        ]
        links = {"turn": np.arange(rounds, dtype="i2"), "bytes_per_s": np.array(bytes_per_s)}
        with files.edit(self._path, SCHEMA, VERSION) as file:
            for name in ("times", "links"):
                datasets.shorten(file, name, 0)
            datasets.extend(file, "times", columns_of(TIMES, rows))
            datasets.extend(file, "links", links)
            file["times"].attrs["names"] = list(names)

    def times(self) -> Times:
        """Return the steps that were timed; none by name where there are none."""
        with files.open_read(self._path, SCHEMA, VERSION) as file:
            rows, links = datasets.read(file, "times"), datasets.read(file, "links")
            names = [str(name) for name in file["times"].attrs.get("names", ())]
        found = {}
        for place, name in enumerate(names):
            own = rows["contender"] == place
            shape = (int(rows["round"][own].max()) + 1, -1, int(rows["rank"][own].max()) + 1)
            columns = [rows[c.name][own].reshape(shape) for c in TIMES[4:]]
            found[name] = np.stack(columns, axis=-1).astype(float)
        return Times(found, links["bytes_per_s"])


def trainings(path: Path) -> dict[Training, Ended]:
    """Return the trainings of a file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            rows, points = datasets.read(file, "trainings"), datasets.read(file, "points")
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error
    values = np.stack([points[c.name].astype(float) for c in POINTS[1:]], axis=1)
    known = {}
    for row in rows_of(rows):
        training = Training(row["contender"], bool(row["feedback"]), row["learning_rate"], row["seed"])
        own = values[points["training_of"] == row["training"]]
        known[training] = Ended(row["loss"], row["sent_bytes"], row["compressed_bytes"], row["wall_s"], own)
    return known
