"""Step metrics of a run: one row per step, with the times and bytes of every rank, in ``metrics.h5``."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from hpcdist.comm.record.timing import BytesMoved
from hpcdist.constants import SCRIPT
from hpcdist.errors import HpcdistError, StorageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column, MetricsTable
from hpcdist.reporting import atomic, regular
from hpcdist.reporting.jsonable import json_number
from hpcdist.telemetry.metrics.quantities import max_over_ranks

Result = TypeVar("Result")
SCHEMA: Final = "hpcdist.metrics"
VERSION: Final = 1
MOVED_ATTRIBUTE: Final = "bytes_{}_per_step"  # set at the end of a run: bytes by each way of `BytesMoved`
FLUSH_S: Final = 5.0
FLUSH_ROWS: Final = 512
READ_ATTEMPTS: Final = 5
LAST_LOSSES: Final = 20  # number of steps in the mean loss of a report
STEPS: Final = MetricsTable(
    "steps",
    (
        Column("step", "i8", "1", "completed optimizer steps"),
        Column("session", "i8", "1", "which start of the run made this step, from 0"),
        Column("world", "i8", "1", "number of ranks"),
        Column("loss", "f8", "1", "mean training loss of the step, in the unit of the attribute loss_unit"),
        Column("learning_rate", "f8", "1", "learning rate of the step"),
        Column("tokens", "i8", "1", "tokens (samples, for a classifier) of the global batch"),
        Column("step_s", "f8", "s", "time from the row before to this one, everything included", wide=True),
        Column("compute_s", "f8", "s", "time in forward and backward", wide=True),
        Column("communication_s", "f8", "s", "time in communication that nothing hid", wide=True),
        Column("update_s", "f8", "s", "time in the optimizer", wide=True),
        Column("sent_bytes", "f8", "By", "bytes sent in messages; NaN where the library does not tell", wide=True),
    ),
    second="rank",
)
EVALUATIONS: Final = MetricsTable(
    "evaluations",
    (
        Column("step", "i8", "1", "completed optimizer steps"),
        Column("val_loss", "f8", "1", "mean validation loss, in the unit of the attribute loss_unit"),
    ),
)
PER_RANK: Final = tuple(column.name for column in STEPS.columns if column.wide)


class MetricsWriter:
    """Writer of a run's metrics file on rank 0, as a context manager. Methods raise StorageError if the disk fails."""

    # The file is open only during writes, so it is always readable. A damaged file is renamed, and a new file is
    # created. ``attributes``: root attributes.
    def __init__(
        self,
        path: str | Path,
        world: int,
        resume_step: int | None = None,
        *,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.world = Path(path), world
        self._steps: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._flushed = time.monotonic()
        if resume_step is None and self.path.exists():
            raise StorageError(f"{path} belongs to another run; choose another directory, or resume the other run")
        self._session, self.last = 0, 0  # number of this start; last step in the file when it was opened
        self._attributes, self._is_begun = dict(attributes or {}), False

        def begin(file: Any) -> None:
            with regular.damage(self.path):
                self._begin(file, resume_step)
            self._enter(file)

        self._change(begin)
        self._is_begun = True

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _change(self, change: Callable[[Any], None]) -> None:
        try:
            self._edit(change)
        except regular.DamagedFileError as error:
            aside = atomic.set_aside(self.path)
            if aside is None:
                raise
            try:
                self._edit(change, is_new=True)
            except BaseException:
                with suppress(OSError):
                    if not self.path.exists():
                        aside.rename(self.path)
                raise
            print(f"hpcdist: {error}; it is now {aside.name}, and a new one begins here", file=sys.stderr, flush=True)

    def _edit(self, change: Callable[[Any], None], is_new: bool = False) -> None:
        try:
            with files.edit(self.path, SCHEMA, VERSION) as file:
                if is_new and self._is_begun:
                    self._create(file)
                    self._enter(file)
                try:
                    change(file)
                except regular.BROKEN_LIBRARY_ERRORS as error:
                    if not isinstance(error, HpcdistError) and regular.is_damage(error):
                        _check_tables(file, self.path)  # distinguish a damaged file from a faulty change
                    raise
        except HpcdistError:
            raise
        except OSError as error:
            raise StorageError(
                f"the metrics file {self.path} cannot be written ({error}); the file keeps its earlier content; check "
                "the disk"
            ) from error

    def _begin(self, file: Any, resume_step: int | None) -> None:
        is_new = "steps" not in file
        if is_new:
            self._create(file)
        for table in (STEPS, EVALUATIONS):
            unexpected = set(datasets.columns(file, table.name)) - {column.name for column in table.columns}
            if unexpected:  # new rows would lack these columns
                raise ValueError(
                    f"table {table.name} of the metrics file has columns that this version of hpcdist does not write: "
                    f"{sorted(unexpected)[:3]}"
                )
            if resume_step is not None and not is_new:
                table.drop_from(file, resume_step + 1)  # these steps will be repeated
        _link_to_root(file)
        self._session = int(file.attrs.get("sessions", 0))
        steps = file["steps"]["step"]
        self.last = int(steps[-1]) if len(steps) else 0

    def _enter(self, file: Any) -> None:
        file.attrs["sessions"] = self._session + 1
        file.attrs.update(self._attributes)

    def _create(self, file: Any) -> None:
        plot = {"NX_class": "NXdata", "signal": "loss", "axes": ["step"]}
        STEPS.create(file, self.world, plot)
        EVALUATIONS.create(file, attributes=plot | {"signal": "val_loss"})
        file.attrs.update({"NX_class": "NXroot", "default": "steps"})

    def append(
        self,
        *,
        step: int,
        loss: float,
        learning_rate: float,
        tokens: int,
        step_s: np.ndarray,  # (world,), as the following arrays
        compute_s: np.ndarray,
        communication_s: np.ndarray,
        update_s: np.ndarray,
        sent_bytes: np.ndarray,
        made_by: int = 0,
    ) -> None:
        """Add a row with the values of one training step. NaN means that a value was not measured."""
        session, world = (self._session - 1, made_by) if made_by else (self._session, self.world)
        row: dict[str, Any] = {"step": step, "session": session, "world": world, "loss": loss}
        row |= {"learning_rate": learning_rate, "tokens": tokens}
        wide = zip(PER_RANK, (step_s, compute_s, communication_s, update_s, sent_bytes), strict=True)
        row |= {name: self._of_ranks(values) for name, values in wide}
        self._steps.append(row)
        self._flush_when_due()

    def _of_ranks(self, values: np.ndarray) -> np.ndarray:
        copied = np.array(values, np.float64)
        return copied if copied.shape == (self.world,) else np.broadcast_to(copied, self.world).copy()

    def evaluation(self, step: int, val_loss: float) -> None:
        self._evaluations.append({"step": step, "val_loss": val_loss})
        self._flush_when_due()

    def _flush_when_due(self) -> None:
        if len(self._steps) >= FLUSH_ROWS or time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self, *appends: Callable[[Any, int], None]) -> None:
        """Write buffered rows, then call each function in ``*appends`` with (open file, number of the run's start)."""
        steps, self._steps = self._steps, []
        evaluations, self._evaluations = self._evaluations, []
        self._flushed = time.monotonic()
        if steps or evaluations or appends:

            def add(file: Any) -> None:
                for table, rows in ((STEPS, steps), (EVALUATIONS, evaluations)):
                    if rows:
                        columns = {column.name: [row[column.name] for row in rows] for column in table.columns}
                        with regular.damage(self.path):
                            table.append(file, **columns)
                for append in appends:
                    append(file, self._session)

            self._change(add)

    def describe(self, **attributes: Any) -> None:
        """Write the keyword arguments as root attributes of the metrics file."""
        self._change(lambda file: file.attrs.update(attributes))

    def include(self, append: Callable[[Any, int], None]) -> None:
        """Open the metrics file, and call ``append(file, session)``. ``session``: number of this start of the run."""
        self._change(lambda file: append(file, self._session))

    def put(self, table: MetricsTable, **columns: Any) -> None:
        """Append rows to ``table`` of the metrics file: ``columns``, and the number of this start of the run."""
        self.include(lambda file, session: table.append(file, session=session, **columns))

    def close(self) -> None:
        self.flush()


def _link_to_root(file: Any) -> None:
    # With links at the root, `xarray.open_dataset` needs no group name.
    for name, column in file["steps"].items():
        if name in file and file[name] == column:
            continue
        if name in file:  # link to a replaced table
            del file[name]
        file[name] = column


def _check_tables(file: Any, path: Path) -> None:
    def check(name: str, item: Any) -> None:
        if "columns" in item.attrs:
            datasets.columns(file, name)

    with regular.damage(path):
        file.visititems(check)


@dataclass(frozen=True)
class MetricsData:
    """Content of a metrics file: columns of the tables ``steps`` and ``evaluations``, and the root attributes."""

    steps: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    attributes: dict[str, Any]


def read(path: str | Path) -> MetricsData:
    """Return the content of the metrics file ``path`` of a finished or running run. Raises StorageError."""

    def take(file: Any) -> MetricsData:
        attributes = dict(files.attributes_of(file))
        return MetricsData(datasets.read(file, "steps"), datasets.read(file, "evaluations"), attributes)

    return read_settled(path, take)


def read_settled(path: str | Path, read_file: Callable[[Any], Result]) -> Result:
    """Open the metrics file ``path``, which a run may still write. Return ``read_file(file)``. Raises StorageError."""
    for attempt in range(READ_ATTEMPTS):
        with files.open_read(path, SCHEMA, VERSION) as file:
            try:
                return read_file(file)
            except regular.BROKEN_LIBRARY_ERRORS as error:
                if attempt == READ_ATTEMPTS - 1:
                    raise StorageError(f"the metrics file {path} is damaged: {error}") from error
        time.sleep(0.05)
    raise AssertionError(f"read_settled() must return or raise in attempt {READ_ATTEMPTS} at the latest")


def summarise(metrics: MetricsData) -> dict[str, Any]:
    """Return a dict {metric name, such as "train_loss": JSON value} that summarises a run. Unknown values are None."""
    # Times are from the slowest rank, without the first step of each session. train_loss_mean: over the last
    # `LAST_LOSSES` steps. bytes_sent_per_step: median over steps of the maximum over ranks. slowest_rank: largest
    # median compute time. imbalance: this time over the median rank's.
    steps = metrics.steps
    count = len(steps["step"])
    loss = steps["loss"][-LAST_LOSSES:]
    result: dict[str, Any] = {"steps": int(steps["step"][-1]) if count else 0}
    result["world"] = int(steps["world"][-1]) if count else 0
    result["train_loss"] = json_number(loss[-1]) if count else None
    result["train_loss_mean"] = json_number(np.mean(loss)) if count else None
    evaluated = metrics.evaluations["val_loss"]
    evaluated = evaluated[np.isfinite(evaluated)]  # earlier versions wrote NaN for stopped starts
    result["val_loss"] = float(evaluated[-1]) if len(evaluated) else None
    # The first step of a session follows a step of another session.
    warm = np.flatnonzero(np.diff(steps["session"], prepend=-1) == 0)
    # Ranks that only serve have no steps, and do not count.
    works = np.nansum(steps["compute_s"], axis=0) > 0
    times = {name: steps[f"{name}_s"][warm][:, works] for name in ("compute", "communication", "update")}
    phases = times["compute"] + times["communication"] + times["update"]  # (steps, ranks)
    # Files of the first version have the phases, but not the time between them.
    of_rank = steps["step_s"][warm][:, works] if "step_s" in steps else phases
    step_s = max_over_ranks(of_rank)
    result["step_s_median"] = _median(step_s)
    result["step_s_p95"] = json_number(np.nanpercentile(step_s, 95)) if np.isfinite(step_s).any() else None
    is_known = np.isfinite(step_s)
    # Without lock-step, the total time is the maximum over the ranks.
    lock_step = metrics.attributes.get("lock_step", 1)
    spent_s = float(step_s[is_known].sum()) if lock_step else max((_sum(column) for column in of_rank.T), default=0.0)
    tokens = float(steps["tokens"][warm][is_known].sum())  # 0: a script logs no samples
    result["tokens_per_s"] = tokens / spent_s if tokens and spent_s else None
    total_s = _sum(of_rank)
    for name, values in times.items():
        short = "comm" if name == "communication" else name
        result[f"{short}_fraction"] = _sum(values) / total_s if total_s else None
    result["bytes_sent_per_step"] = _median(max_over_ranks(steps["sent_bytes"]))
    return result | _stragglers(times["compute"], np.flatnonzero(works))


def mean_step_s(metrics: MetricsData) -> float | None:
    """Return the mean step time in seconds since the run's last start, without the first step, or None if unknown."""
    steps = metrics.steps
    last = np.flatnonzero(steps["session"] == steps["session"].max(initial=0))[1:]
    works = np.nansum(steps["compute_s"], axis=0) > 0
    seconds = steps["step_s"][last][:, works] if "step_s" in steps else np.empty(0)
    seconds = seconds[np.isfinite(seconds)]
    return float(seconds.mean()) if seconds.size else None


def steps_of_rows(steps: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> np.ndarray:
    """Return the number of steps for which each row of the table ``steps`` stands. ``attributes``: of the file."""
    # A row of a script has the means of the steps since the row before.
    is_script = attributes.get("strategy") == SCRIPT
    return np.diff(steps["step"], prepend=0).clip(1) if is_script else np.ones(len(steps["step"]), np.int64)


def items_per_step(steps: Mapping[str, np.ndarray], attributes: Mapping[str, Any], since: int = 0) -> float:
    """Return the mean number of tokens, or samples, of the steps after step ``since``, or NaN if there is no step."""
    after = steps["step"] > since
    counts = steps_of_rows(steps, attributes)[after]
    return float(np.average(steps["tokens"][after], weights=counts)) if len(counts) else math.nan


def moved_bytes(attributes: Mapping[str, Any]) -> BytesMoved | None:
    """Return the sent bytes per rank and step, by transport, from a file's ``attributes``, or None if incomplete."""
    noted = {way: attributes.get(MOVED_ATTRIBUTE.format(way)) for way in BytesMoved._fields}
    by_way = {way: float(nbytes) for way, nbytes in noted.items() if isinstance(nbytes, int | float)}
    return BytesMoved(**by_way) if len(by_way) == len(noted) and all(map(math.isfinite, by_way.values())) else None


def _stragglers(compute_s: np.ndarray, ranks: np.ndarray) -> dict[str, Any]:
    medians = {int(rank): _median(compute_s[:, column]) for column, rank in enumerate(ranks)}
    nonzero = {rank: value for rank, value in medians.items() if value}
    if not nonzero:
        return {"slowest_rank": None, "imbalance": None}
    slowest = max(nonzero, key=lambda rank: nonzero[rank])
    return {"slowest_rank": slowest, "imbalance": nonzero[slowest] / float(np.median(list(nonzero.values())))}


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


def _sum(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)].sum())
