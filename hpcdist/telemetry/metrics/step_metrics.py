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
from hpcdist.errors import HpcdistError, StorageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column
from hpcdist.hdf5.tables import MetricsTable
from hpcdist.reporting import atomic, regular
from hpcdist.reporting.jsonable import json_number
from hpcdist.telemetry.metrics.quantities import most_over_ranks

Result = TypeVar("Result")
METRICS_FILE: Final = "metrics.h5"  # of a run directory
SCHEMA: Final = "hpcdist.metrics"
VERSION: Final = 1
MOVED_ATTRIBUTE: Final = "bytes_{}_per_step"  # of a run that has ended: bytes by each way of `BytesMoved`
FLUSH_S: Final = 5.0
FLUSH_ROWS: Final = 512
READ_ATTEMPTS: Final = 5
LAST_LOSSES: Final = 20  # steps over which a report takes the mean loss
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
    """Writer of the metrics file ``path``, on rank 0. A context manager; leaving it flushes.

    The file is opened only for a moment, at most every `FLUSH_S`: it is readable at any time, and a killed run loses a
    few seconds. ``world`` is the number of ranks. ``resume_step`` None begins a file (a directory with another run's
    metrics is refused); a number continues one and drops the rows of later steps. ``attributes`` (numbers and strings)
    become root attributes, as provenance and the entropies of the data (``unigram_nats``, ...).

    Methods raise StorageError when the disk is full or fails; what was flushed before stays readable. A file that is
    damaged, or of another program, is set aside, with a line on stderr, and another one begun.
    """

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
            raise StorageError(f"{path} exists: it holds another run; choose another directory or resume it")
        self._session, self.last = 0, 0  # the number of this start; the step in the file, when it was opened
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
        """Call ``change`` with the open file. A damaged one is set aside and begun anew: it must not end a run."""
        try:
            self._edit(change)
        except regular.DamagedFileError as error:
            aside = atomic.set_aside(self.path)
            if aside is None:
                raise
            try:
                self._edit(change, anew=True)
            except BaseException:
                with suppress(OSError):
                    if not self.path.exists():
                        aside.rename(self.path)
                raise
            print(f"hpcdist: {error}; it is now {aside.name}, and a new one begins here", file=sys.stderr, flush=True)

    def _edit(self, change: Callable[[Any], None], anew: bool = False) -> None:
        """Call ``change`` once with the open file. Raises DamagedFileError where its tables are damaged."""
        try:
            with files.edit(self.path, SCHEMA, VERSION) as file:
                if anew and self._is_begun:
                    self._create(file)
                    self._enter(file)
                try:
                    change(file)
                except regular.BROKEN_LIBRARY_ERRORS as error:
                    if not isinstance(error, HpcdistError) and regular.is_damage(error):
                        _check_tables(file, self.path)  # or is it the change that is wrong?
                    raise
        except HpcdistError:
            raise
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be changed: {error}; what was there is kept") from error

    def _begin(self, file: Any, resume_step: int | None) -> None:
        """Begin this start in an open file, from which rows after ``resume_step`` are dropped."""
        is_new = "steps" not in file
        if is_new:
            self._create(file)
        for table in (STEPS, EVALUATIONS):
            strange = set(datasets.columns(file, table.name)) - {column.name for column in table.columns}
            if strange:  # a row would lack them
                raise ValueError(f"{table.name} has columns that are not known here: {sorted(strange)[:3]}")
            if resume_step is not None and not is_new:
                table.drop_from(file, resume_step + 1)  # they will be made again
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
        step_s: np.ndarray,  # (world,) as the following
        compute_s: np.ndarray,
        communication_s: np.ndarray,
        update_s: np.ndarray,
        sent_bytes: np.ndarray,
        made_by: int = 0,
    ) -> None:
        """Take the row of a step, NaN for what was not measured; it is written with the next flush.

        ``made_by`` not 0: a row of the session before, of so many ranks, which had not been written when some died.
        """
        session, world = (self._session - 1, made_by) if made_by else (self._session, self.world)
        row: dict[str, Any] = {"step": step, "session": session, "world": world, "loss": loss}
        row |= {"learning_rate": learning_rate, "tokens": tokens}
        wide = zip(PER_RANK, (step_s, compute_s, communication_s, update_s, sent_bytes), strict=True)
        row |= {name: np.broadcast_to(np.asarray(values, np.float64), self.world).copy() for name, values in wide}
        self._steps.append(row)
        self._flush_when_due()

    def evaluation(self, step: int, val_loss: float) -> None:
        """Take the validation loss after ``step``."""
        self._evaluations.append({"step": step, "val_loss": val_loss})
        self._flush_when_due()

    def _flush_when_due(self) -> None:
        if len(self._steps) >= FLUSH_ROWS or time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self, *appends: Callable[[Any, int], None]) -> None:
        """Write all rows. After a failure the rows not yet written are gone and the file is as before.

        Each of ``appends`` adds the groups of another service, as in `include`, while the file is open.
        """
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
        """Set further root attributes, which were not known when the run began."""
        self._change(lambda file: file.attrs.update(attributes))

    def include(self, append: Callable[[Any, int], None]) -> None:
        """Call ``append(file, session)``, which adds the groups of another service and touches no others."""
        self._change(lambda file: append(file, self._session))

    def put(self, table: MetricsTable, **columns: Any) -> None:
        """Append rows of this start to a side table, by column as `MetricsTable.append` takes them."""
        self.include(lambda file, session: table.append(file, session=session, **columns))

    def close(self) -> None:
        """Flush; the file is never held open."""
        self.flush()


def _link_to_root(file: Any) -> None:
    """Give the columns of the steps a second name at the root: `xarray.open_dataset` needs to know no group then."""
    for name, column in file["steps"].items():
        if name in file and file[name] == column:
            continue
        if name in file:  # of a table that was made anew
            del file[name]
        file[name] = column


def _check_tables(file: Any, path: Path) -> None:
    """Raise DamagedFileError where a table of the open file cannot be what was written."""

    def check(name: str, item: Any) -> None:
        if "columns" in item.attrs:
            datasets.columns(file, name)

    with regular.damage(path):
        file.visititems(check)


@dataclass(frozen=True)
class MetricsData:
    """A metrics file in memory: columns of ``steps`` (per rank: (steps, ranks)) and of ``evaluations``."""

    steps: dict[str, np.ndarray]
    evaluations: dict[str, np.ndarray]
    attributes: dict[str, Any]


def read(path: str | Path) -> MetricsData:
    """Read a metrics file; its run may be under way. Raises StorageError."""

    def take(file: Any) -> MetricsData:
        attributes = dict(files.attributes_of(file))
        return MetricsData(datasets.read(file, "steps"), datasets.read(file, "evaluations"), attributes)

    return read_settled(path, take)


def read_settled(path: str | Path, take: Callable[[Any], Result]) -> Result:
    """Return ``take`` of the metrics file ``path``, whose run may be under way. Raises StorageError."""
    for attempt in range(READ_ATTEMPTS):
        with files.open_read(path, SCHEMA, VERSION) as file:
            try:
                return take(file)
            except regular.BROKEN_LIBRARY_ERRORS as error:
                # Read in the moment in which it was changed? Then it is whole a moment later.
                if attempt == READ_ATTEMPTS - 1:
                    raise StorageError(f"{path}: is damaged: {error}") from error
        time.sleep(0.05)
    raise AssertionError("unreachable")


def summarise(metrics: MetricsData) -> dict[str, Any]:
    """Return the figures of a run: JSON values, None for what was not measured.

    ``train_loss`` is that of the last step, ``train_loss_mean`` the mean over the last `LAST_LOSSES`. Times leave out
    the first step of each session, which compiles and allocates; a step takes as long as its slowest rank.
    ``bytes_sent_per_step`` is the median step's maximum over the ranks. ``slowest_rank`` computes longest in the
    median, ``imbalance`` is its time over the median rank's.
    """
    steps = metrics.steps
    count = len(steps["step"])
    loss = steps["loss"][-LAST_LOSSES:]
    result: dict[str, Any] = {"steps": int(steps["step"][-1]) if count else 0}
    result["world"] = int(steps["world"][-1]) if count else 0
    result["train_loss"] = json_number(loss[-1]) if count else None
    result["train_loss_mean"] = json_number(np.mean(loss)) if count else None
    evaluated = metrics.evaluations["val_loss"]
    evaluated = evaluated[np.isfinite(evaluated)]  # earlier versions wrote NaN for each start that was stopped
    result["val_loss"] = float(evaluated[-1]) if len(evaluated) else None
    # The first step of a session is the one whose predecessor is of another.
    warm = np.flatnonzero(np.diff(steps["session"], prepend=-1) == 0)
    # A rank that only serves has no step of its own: what it waits for the others is no share of theirs.
    works = np.nansum(steps["compute_s"], axis=0) > 0
    times = {name: steps[f"{name}_s"][warm][:, works] for name in ("compute", "communication", "update")}
    phases = times["compute"] + times["communication"] + times["update"]  # (steps, ranks)
    # Files of the first version know the phases only, not what lay between them.
    of_rank = steps["step_s"][warm][:, works] if "step_s" in steps else phases
    step_s = most_over_ranks(of_rank)
    result["step_s_median"] = _median(step_s)
    result["step_s_p95"] = json_number(np.nanpercentile(step_s, 95)) if np.isfinite(step_s).any() else None
    known = np.isfinite(step_s)
    # Where no worker waits for another, the longest of their times is that of all.
    lock_step = metrics.attributes.get("lock_step", 1)
    spent_s = float(step_s[known].sum()) if lock_step else max((_sum(column) for column in of_rank.T), default=0.0)
    result["tokens_per_s"] = float(steps["tokens"][warm][known].sum()) / spent_s if spent_s else None
    total_s = _sum(of_rank)
    for name, values in times.items():
        short = "comm" if name == "communication" else name
        result[f"{short}_fraction"] = _sum(values) / total_s if total_s else None
    result["bytes_sent_per_step"] = _median(most_over_ranks(steps["sent_bytes"]))
    return result | _stragglers(times["compute"], np.flatnonzero(works))


def mean_step_s(metrics: MetricsData) -> float | None:
    """Return the mean seconds of a step of the last session, but its first, over the ranks that compute."""
    steps = metrics.steps
    last = np.flatnonzero(steps["session"] == steps["session"].max(initial=0))[1:]
    works = np.nansum(steps["compute_s"], axis=0) > 0
    known = steps["step_s"][last][:, works] if "step_s" in steps else np.empty(0)
    known = known[np.isfinite(known)]
    return float(known.mean()) if known.size else None


def moved_bytes(attributes: Mapping[str, Any]) -> BytesMoved | None:
    """Return the bytes that a rank moved a step, by the way they took; None where the run has not noted it."""
    known = {way: attributes.get(MOVED_ATTRIBUTE.format(way)) for way in BytesMoved._fields}
    by_way = {way: float(nbytes) for way, nbytes in known.items() if isinstance(nbytes, int | float)}
    return BytesMoved(**by_way) if len(by_way) == len(known) and all(map(math.isfinite, by_way.values())) else None


def _stragglers(compute_s: np.ndarray, ranks: np.ndarray) -> dict[str, Any]:
    medians = {int(rank): _median(compute_s[:, column]) for column, rank in enumerate(ranks)}
    known = {rank: value for rank, value in medians.items() if value}
    if not known:
        return {"slowest_rank": None, "imbalance": None}
    slowest = max(known, key=lambda rank: known[rank])
    return {"slowest_rank": slowest, "imbalance": known[slowest] / float(np.median(list(known.values())))}


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else None


def _sum(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)].sum())
