"""HDF5 file with the results of the compression study. Each training is appended when it has ended.

/             provenance, and the keys of the study
/trainings    a row for each training
/points       evaluations of the trainings
/times        steps over slow links, by phase: a row for each step and rank
/links        raw TCP rates over the same links, between the steps
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
    """Result of a training; ``points`` (evaluations, 4) are the columns of POINTS after the training."""

    loss: float
    sent_bytes: float
    compressed_bytes: float
    wall_s: float
    points: np.ndarray


@dataclass(frozen=True)
class Times:
    """Steps over slow links: ``figures`` (rounds, steps, ranks, phases) by contender, and raw rates by round."""

    figures: Mapping[str, np.ndarray]
    bytes_per_s: np.ndarray


def ended(result: Mapping[str, Any]) -> Ended:
    """Convert the ``result`` printed by the ranks to a row of the file."""
    sent, losses = np.array(result["sent_bytes"]), np.array(result["losses"])
    rows, start = [], 0
    for step, loss in result["points"]:
        rows.append((step, loss, losses[start:step].mean() if step > start else np.nan, sent[:step].sum()))
        start = step
    last = sent[-max(1, len(sent) // 10) :]
    return Ended(
        result["points"][-1][1], float(sent.sum()), float(np.median(last)), result["wall_s"], np.array(rows, float)
    )


class Records:
    """Results in the file ``path``, created if missing. Raises UsageError if the file belongs to another study."""

    def __init__(self, path: Path, provenance: Mapping[str, Any], study: Mapping[str, Any]) -> None:
        self._path = path
        with files.edit(path, SCHEMA, VERSION) as file:
            if "trainings" not in file:
                file.attrs.update({**provenance, **study})
                for name, columns in (("trainings", TRAININGS), ("points", POINTS), ("times", TIMES), ("links", LINKS)):
                    datasets.create(file, name, columns)
            for name, value in study.items():
                if (stored := file.attrs.get(name)) != value:
                    raise UsageError(
                        f"{path}: its trainings have {name} = {stored}, these would have {value}; choose "
                        "another --output"
                    )
        self.known: dict[Training, Ended] = trainings(path)

    def add(self, training: Training, one: Ended) -> None:
        """Append a training. Raises StorageError and leaves the file unchanged."""
        number = len(self.known)
        row = {"training": number, **vars(training), **vars(one)}
        points = [dict(zip(_POINTS, (number, *point), strict=True)) for point in one.points.tolist()]
        with files.edit(self._path, SCHEMA, VERSION) as file:
            datasets.extend(file, "trainings", columns_of(TRAININGS, [row]))
            datasets.extend(file, "points", columns_of(POINTS, points))
        self.known[training] = one

    def put_times(self, names: Sequence[str], figures: np.ndarray, bytes_per_s: Sequence[float]) -> None:
        """Replace the timed steps by ``figures`` (ranks, contenders, rounds, steps, phases)."""
        ranks, _, rounds, turn, _ = figures.shape
        names_of = [column.name for column in TIMES]
        positions = [
            (contender, *index) for contender in range(len(names)) for index in np.ndindex(rounds, turn, ranks)
        ]
        rows = [
            dict(
                zip(
                    names_of,
                    (number, contender, round_number, rank, *figures[rank, contender, round_number, step]),
                    strict=True,
                )
            )
            for number, (contender, round_number, step, rank) in enumerate(positions)
        ]
        links = {"turn": np.arange(rounds, dtype="i2"), "bytes_per_s": np.array(bytes_per_s)}
        with files.edit(self._path, SCHEMA, VERSION) as file:
            for name in ("times", "links"):
                datasets.shorten(file, name, 0)
            datasets.extend(file, "times", columns_of(TIMES, rows))
            datasets.extend(file, "links", links)
            file["times"].attrs["names"] = list(names)

    def times(self) -> Times:
        with files.open_read(self._path, SCHEMA, VERSION) as file:
            rows, links = datasets.read(file, "times"), datasets.read(file, "links")
            names = [str(name) for name in file["times"].attrs.get("names", ())]
        results = {}
        for index, name in enumerate(names):
            is_contender = rows["contender"] == index
            shape = (int(rows["round"][is_contender].max()) + 1, -1, int(rows["rank"][is_contender].max()) + 1)
            columns = [rows[c.name][is_contender].reshape(shape) for c in TIMES[4:]]
            results[name] = np.stack(columns, axis=-1).astype(float)
        return Times(results, links["bytes_per_s"])


def trainings(path: Path) -> dict[Training, Ended]:
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            rows, points = datasets.read(file, "trainings"), datasets.read(file, "points")
        except files.FAILURES as error:
            raise StorageError(f"{path} is damaged: {error}") from error
    all_points = np.stack([points[c.name].astype(float) for c in POINTS[1:]], axis=1)
    results = {}
    for row in rows_of(rows):
        training = Training(row["contender"], bool(row["feedback"]), row["learning_rate"], row["seed"])
        evaluations = all_points[points["training_of"] == row["training"]]
        results[training] = Ended(row["loss"], row["sent_bytes"], row["compressed_bytes"], row["wall_s"], evaluations)
    return results
