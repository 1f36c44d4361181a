"""Metrics of a PyTorch script: `log` records steps in the run directory, as `hpcdist train` does.

Every rank sends its rows to rank 0 at intervals, without waiting for other ranks. Rank 0 writes ``metrics.h5`` and the
event log. A killed script loses the rows of the last seconds.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from hpcdist.comm.mpi.world import World
from hpcdist.comm.record.clock_offsets import HostClocks
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.record.timing import BytesMoved, OperationTiming
from hpcdist.constants import FINISHED, METRICS_FILE, SCRIPT, STOPPED
from hpcdist.energy import phases
from hpcdist.energy.node_rows import append_rows
from hpcdist.errors import StorageError, UsageError
from hpcdist.telemetry import provenance
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.telemetry.event_stream import run_info
from hpcdist.telemetry.metrics import observations, side_tables
from hpcdist.telemetry.metrics.quantities import StepRow
from hpcdist.telemetry.metrics.row_channel import RowChannel
from hpcdist.telemetry.metrics.step_metrics import MOVED_ATTRIBUTE, PER_RANK, MetricsWriter
from hpcdist.telemetry.step_events import StepEvents, logged_number
from hpcdist.torch import activity
from hpcdist.torch.activity import Activities
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.recipe.recipe import Recipe

FLUSH_S: Final = 5.0  # interval at which a rank sends its rows, and rank 0 writes
ROWS_PER_MESSAGE: Final = 256
WAIT_S: Final = 4 * FLUSH_S  # time in which rank 0 expects the first rows of all ranks that call `log`
LONG: Final = ("validation", "checkpoint")  # phases whose energy is measured
METRICS: Final = "write metrics"  # label of the span in which this module sends and writes rows
PHASES: Final = ("data", "update", *LONG)


class LoggedRow(NamedTuple):
    """Values of one call of `log` on one rank. ``seconds`` and ``sent_bytes`` are per step, since the previous step."""

    step: int
    time_ns: int
    loss: float | None  # None: this row is no step
    samples: float
    learning_rate: float
    validation_loss: float
    figures: Mapping[str, float]
    seconds: Mapping[str, float] = {}  # by phase: "compute", "communication", and the phases of the script
    sent_bytes: float = math.nan
    steps: int = 1  # number of steps that the row stands for


class ScriptMetrics:
    """Recorder of the steps of a script on this rank. Construction and `close` are collective."""

    def __init__(self, world: World, directory: Path, recipe: Recipe) -> None:
        self._comm = comm = world.comm
        self._channel, self._rank = RowChannel(comm), comm.rank
        self._clocks, spans = HostClocks(comm), world.session.spans
        if not _energy:  # one for all process groups of this process
            drain = _drain if isinstance(spans, Spans) else None
            _energy.append(EnergyRecorder(comm, recipe, None, directory, drain, monitor=phases.monitor()))
        self._energy = _energy[0]
        self._traffic = comm.events = OperationTiming(comm.events)
        self._rows: list[LoggedRow] = []
        self._sent_s = time.monotonic()
        self._step: int | None = None  # the last step with a row, or before this start
        self._warm: tuple[int, BytesMoved] | None = None  # the first step, and the bytes until its end
        self._moved = BytesMoved()  # until the last step
        self._writer = _RowWriter(world, directory, recipe.telemetry) if comm.rank == 0 else None
        self._thread = ThreadPoolExecutor(1, "hpcdist metrics")  # writes, so that steps need not wait for the disk
        self._written = self._thread.submit(lambda: None)  # the last task of the thread
        self.end = FINISHED
        self._note_clocks()
        self._activities = Activities(spans)
        activity.set_current(self._activities)

    def add(self, row: LoggedRow) -> None:
        """Add ``row``, and the seconds and bytes of this rank since the previous step. Local."""
        now = time.monotonic()
        if row.loss is not None:
            # A row that stands for several steps has their mean values.
            count = 1 if self._step is None else max(1, row.step - self._step)
            self.end_step(row.step)
            moved = self._traffic.moved()
            seconds = {name: value / count for name, value in self._activities.take_seconds().items()}
            sent_bytes = moved.since(self._moved).messages / count
            row = row._replace(samples=row.samples / count, seconds=seconds, sent_bytes=sent_bytes, steps=count)
            self._step, self._moved = row.step, moved
            self._warm = self._warm or (row.step, moved)  # the first step measures algorithms
        self._rows.append(row)
        if now - self._sent_s >= FLUSH_S or len(self._rows) >= ROWS_PER_MESSAGE:
            self._sent_s = now
            self._flush()

    def end_step(self, step: int) -> None:
        """Record that ``step`` has ended, unless it is the last step. Local."""
        if step != self._activities.step:
            self._activities.end_step(step)

    def _flush(self) -> None:
        with self._spanned("other", METRICS):
            rows, self._rows = _resolved(self._rows), []
            self._energy.attribute()
            if self._rank:
                if rows:
                    self._channel.send(rows)
                return
            messages = [(0, rows), *self._channel.arrived()]
            self._record(lambda writer: writer.write(messages))

    def _record(self, act: Callable[["_RowWriter"], None]) -> "Future[None]":
        if self._written.done():
            self._written.result()  # raises an unexpected error of an earlier task
        if self._rank == 0:
            self._written = self._thread.submit(self._act, self._written, act)
        return self._written

    def _act(self, previous: "Future[None]", act: Callable[["_RowWriter"], None]) -> None:
        previous.result()
        # The script goes on without metrics if rank 0 cannot write: other ranks would wait in their collectives.
        if self._writer is not None:
            try:
                act(self._writer)
            except StorageError as error:
                _say(f"hpcdist: {error}; the script goes on without metrics")
                self._writer = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time of the ``with`` body to phase ``name`` of the current step. Local."""
        with self._spanned(name) as is_outer, phases.window(name) if is_outer and name in LONG else nullcontext():
            yield

    @contextmanager
    def _spanned(self, phase: str, name: str = "") -> Iterator[bool]:
        # Yield False within another phase: the outer phase counts.
        is_outer = self._activities.enter(phase, name)
        try:
            yield is_outer
        finally:
            if is_outer:
                self._activities.leave()

    def start_at(self, step: int) -> None:
        """Record that ``step`` steps were made before this start, for the count of steps in the first row. Local."""
        self._step = self._activities.step = step

    def _note_clocks(self) -> None:
        self._append(side_tables.note_clocks(self._clocks))

    def _append(self, append: Callable[[Any, int], None]) -> None:
        self._record(lambda writer: writer.append(append))

    def settle(self, *, final: bool = False) -> None:
        """Write all rows and the energy of all ranks. Collective. ``final``: no rows follow."""
        with self._spanned("other", METRICS):
            self._flush()
            messages = self._channel.drain()
            self._record(lambda writer: writer.write(messages, everything=True))
            self._note_clocks()
            nodes = self._energy.collect()
            if nodes:
                self._append(lambda file, session: append_rows(file, session, nodes))
            try:
                self._energy.note(final=final)
            except StorageError as error:  # on rank 0
                _say(f"hpcdist: {error}; the script goes on")
            self._written.result()

    def close(self) -> None:
        """Write everything, and end the event log. Collective."""
        self.settle(final=True)
        activity.set_current(None)
        self._channel.free()
        self._comm.events = self._traffic.inner
        last = self._step or 0
        first, until = self._warm or (last, self._moved)
        moved = self._moved.since(until)._asdict() if last > first else {}
        per_step = {way: nbytes / (last - first) for way, nbytes in moved.items()}
        self._record(lambda writer: writer.close(self.end, per_step)).result()
        self._thread.shutdown()


_MEASURED: Final = "step_s", "compute_s", "communication_s", "update_s", "sent_bytes", "data_s"  # by rank


class _RowWriter:
    # Rank 0's writer of the rows of all ranks. It creates its files with the first row.
    def __init__(self, world: World, directory: Path, config: TelemetryConfig) -> None:
        self._world, self._directory, self._config = world, directory, config
        self._starts = StartRecord(directory)
        self._begun = time.monotonic()
        self._last: dict[int, int] = {}  # last logged step of each rank that has called `log`
        self._seen: dict[int, float] = {}  # time of this rank's last rows
        self._waiting: dict[int, dict[int, list[LoggedRow]]] = {}  # step -> rank -> rows
        self._written = -1  # last step in the metrics file
        self._waits = 0, 0.0  # number of steps since the first, and seconds in which they waited for data
        self._has_step = False
        self._file: MetricsWriter | None = None
        self._appends: list[Callable[[Any, int], None]] = []  # for the next flush of the file

    def append(self, append: Callable[[Any, int], None]) -> None:
        if self._file is not None or not self._appends:  # keep few while there is no file
            self._appends.append(append)

    def write(self, messages: Sequence[tuple[int, Sequence[LoggedRow]]], *, everything: bool = False) -> None:
        for rank, rows in messages:
            if rows:
                self._seen[rank] = time.monotonic()
            for row in rows:
                self._last[rank] = max(row.step, self._last.get(rank, 0))
                self._waiting.setdefault(row.step, {}).setdefault(rank, []).append(row)
        # A step is complete if all ranks that call `log` have logged a later step. Some ranks may call it only once.
        now = time.monotonic()
        if len(self._last) < self._world.size and now - self._begun < WAIT_S and not everything:
            return
        ahead = max(self._last.values(), default=0)
        active = [last for rank, last in self._last.items() if last >= ahead - 1 or now - self._seen[rank] < WAIT_S]
        complete = math.inf if everything else min(active, default=0) - 1
        for step in sorted(step for step in self._waiting if step <= complete):
            self._write_step(step, self._waiting.pop(step))
        self._starts.alive()
        if self._file is not None:
            self._flush(self._file)

    def _flush(self, file: MetricsWriter) -> None:
        steps, waited_s = self._waits
        if steps:
            self._events.add("collectives", self._written, {"data_seconds": waited_s / steps})
        if events := self._events.publish():
            self._appends.append(lambda opened, session: observations.append(opened, session, events))
        appends, self._appends = self._appends, []
        file.flush(*appends)

    def _write_step(self, step: int, ranks: Mapping[int, Sequence[LoggedRow]]) -> None:
        rows = [row for of_rank in ranks.values() for row in of_rank]
        # The first step of a start, and later ones, may be in the file of the start before.
        file = self._file or self._open(step - max((row.steps for row in rows if row.loss is not None), default=0))
        steps = {rank: row for rank, of_rank in ranks.items() for row in of_rank if row.loss is not None}
        if steps and step > self._written:
            self._written = step
            self._add_step(file, step, steps)
        losses = [row.validation_loss for row in rows if not math.isnan(row.validation_loss)]
        if losses:
            self._events.hold_up(step + 1)
            file.evaluation(step, _mean(losses))
            self._events.add("evaluation", step, {"validation_loss_nats": _mean(losses)})
        self._events.log(step, [(1.0, row.figures) for row in rows])

    def _add_step(self, file: MetricsWriter, step: int, ranks: Mapping[int, LoggedRow]) -> None:
        rows = [*ranks.values()]
        samples = sum(row.samples for row in rows)
        loss = _mean([row.loss or 0.0 for row in rows], [row.samples for row in rows] if samples > 0 else None)
        wide = np.full((len(_MEASURED), self._world.size), math.nan)
        for rank, row in ranks.items():
            if any(name in row.seconds for name in LONG):
                self._events.hold_up(step)
            compute_s, communication_s, update_s, data_s = (
                row.seconds.get(name, 0.0) for name in ("compute", "communication", "update", "data")
            )
            step_s = math.fsum(row.seconds.values())
            wide[:, rank] = step_s, compute_s, communication_s, update_s, row.sent_bytes, data_s
        measured = dict(zip(_MEASURED, wide, strict=True))
        columns: dict[str, Any] = {name: measured[name] for name in PER_RANK}
        waits = [row.seconds.get("data", 0.0) for row in rows]
        if self._has_step:
            self._waits = self._waits[0] + 1, self._waits[1] + _mean(waits)
        self._has_step = True
        rate = rows[0].learning_rate
        file.append(step=step, loss=loss, learning_rate=rate, tokens=round(samples), **columns)
        self._events.row(StepRow(step, rows[0].time_ns, loss, rate, round(samples), ranks=measured))

    def _open(self, done: int) -> MetricsWriter:
        # ``done``: the last step that the file keeps.
        world, path = self._world, self._directory / METRICS_FILE
        resumed = max(0, done) if path.exists() else None
        attributes = provenance.provenance(mpi_library=world.library)
        about = {"lock_step": 1, "speed_unit": "samples", "loss_unit": "", "strategy": SCRIPT, "nodes": world.nodes}
        self._file = MetricsWriter(path, world.size, resumed, attributes=attributes | about)
        run = run_info(self._directory, world.size, world.nodes, SCRIPT, resumed)
        self._events = StepEvents(run, self._config, _say, unit="samples", done=done)
        return self._file

    def close(self, end: str, moved: Mapping[str, float]) -> None:
        if self._file is not None:
            self._events.add("end", max(self._last.values()), {})
            self._flush(self._file)
            self._file.describe(**{MOVED_ATTRIBUTE.format(way): nbytes for way, nbytes in moved.items()})
            self._file.close()
            self._events.close(normal=True)
        self._starts.ended(end)


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    # Much faster than `statistics.mean` and `numpy.average` for few values.
    if weights is None:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_recorders: Final[list[ScriptMetrics]] = []  # of this process
_energy: Final[list[EnergyRecorder]] = []  # of this process
_last_step: Final[list[int]] = []  # the step that was last logged or saved in this process


def _drain() -> np.ndarray:
    activities = activity.current()
    return np.empty((0, 3), np.int64) if activities is None else activities.drain()


def begin(world: World, directory: Path, recipe: Recipe) -> None:
    """Record the rows of `log`, and the energy, in the run directory ``directory`` until `end`. Collective.

    ``recipe``: its sections [telemetry] and [energy] configure the record.
    """
    if world.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    _recorders.append(ScriptMetrics(world, directory, recipe))


def settle() -> None:
    """Write the rows of all ranks so far, and the energy of all starts. Collective."""
    for recorder in _recorders:
        recorder.settle()


def start_at(step: int) -> None:
    """Record that ``step`` steps were made before this start. Local."""
    for recorder in _recorders:
        recorder.start_at(step)


def end_step(step: int) -> None:
    """Record that ``step`` has ended, if `log` is not called after every step. Local."""
    for recorder in _recorders:
        recorder.end_step(step)


def end() -> None:
    """Write all rows and the energy, and end the record. Collective."""
    while _recorders:
        _recorders.pop().close()


def note_step(step: int) -> None:
    """Record that ``step`` was logged or saved. Local."""
    _last_step[:] = [step]


def last_step() -> int | None:
    """Return the step that this process has logged or saved last, or None without such a step. Local."""
    return next(iter(_last_step), None)


def note_stop() -> None:
    """Record that the script stops because of a stop request, so that the run is not complete. Local."""
    for recorder in _recorders:
        recorder.end = STOPPED


def log(
    step: int,
    *,
    loss: Any = None,
    samples: float = 0,
    learning_rate: float = math.nan,
    validation_loss: Any = math.nan,
    **figures: Any,
) -> None:
    """Record the metrics of optimizer step ``step`` (from 1) in the run directory. Local: never waits for other ranks.

    ``loss``: mean loss of this rank's ``samples`` samples since the previous call with a loss. ``**figures``: further
    values by name, such as ``accuracy=0.9``. Values are numbers or tensors with one element. Over the ranks that log a
    step, losses are averaged with the weights ``samples``, and other values without weights. It has no effect without a
    run directory (`hpcdist run --out`) or before `init_process_group`. Raises UsageError for other values.
    """
    if not _recorders:
        return
    row = LoggedRow(
        int(logged_number("step", step)),
        time.time_ns(),
        None if loss is None else _number("loss", loss),
        _number("samples", samples),
        _number("learning_rate", learning_rate),
        _number("validation_loss", validation_loss),
        {name: _number(name, value) for name, value in figures.items()},
    )
    note_step(row.step)
    _recorders[0].add(row)


def _number(name: str, value: Any) -> Any:
    # A tensor on a GPU is copied there, because a float would wait for the GPU. `_resolved` makes the float.
    if isinstance(value, torch.Tensor) and not value.is_cpu and value.numel() == 1:
        return value.detach().reshape(()).to(torch.float64, copy=True)
    return logged_number(name, value)


def _resolved(rows: Sequence[LoggedRow]) -> list[LoggedRow]:
    """Return ``rows`` with floats in place of tensors. Waits once for each GPU."""
    held: dict[torch.device, dict[int, torch.Tensor]] = {}
    for value in (value for row in rows for value in (*row, *row.figures.values())):
        if isinstance(value, torch.Tensor):
            held.setdefault(value.device, {})[id(value)] = value
    floats: dict[int, float] = {}
    for values in held.values():
        floats |= zip(values, torch.stack([*values.values()]).tolist(), strict=True)
    if not floats:
        return [*rows]

    def as_float(value: Any) -> Any:
        return floats.get(id(value), value)

    figures = [{name: as_float(value) for name, value in row.figures.items()} for row in rows]
    return [LoggedRow(*map(as_float, row))._replace(figures=named) for row, named in zip(rows, figures, strict=True)]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Attribute the time of the ``with`` body to a phase of the current step. Local.

    ``name``: "data", "update", "validation" or "checkpoint". The energy of the last two is measured too. The remaining
    time counts as computation, except the time in which this rank waits for collectives. Raises UsageError for other
    names.
    """
    if name not in PHASES:
        raise UsageError(f"phase {name!r} is unknown; use one of {', '.join(PHASES)}")
    with _recorders[0].phase(name) if _recorders else nullcontext():
        yield
