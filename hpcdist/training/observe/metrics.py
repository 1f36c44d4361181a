"""Metrics rows of every rank, gathered at intervals and written by rank 0.

A killed run loses the rows of the last seconds.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.clock_offsets import HostClocks
from hpcdist.energy.node_rows import append_rows
from hpcdist.hdf5.datasets import MetricsTable
from hpcdist.telemetry.metrics import observations, side_tables
from hpcdist.telemetry.metrics.row_channel import RowChannel
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.event_publisher import EventPublisher

FLUSH_EVERY_S: Final = 5.0  # shortest interval between flushes
FLUSH_AT_LEAST_EVERY_S: Final = 60.0  # longest interval
FLUSH_SHARE: Final = 0.004  # largest fraction of the time spent in flushes, between these intervals
FLUSH_AT_ROWS: Final = 4096  # number of rows that triggers a flush, to bound the memory
Append: TypeAlias = Callable[[Any, int], None]
LoggedValues: TypeAlias = tuple[int, float, Mapping[str, float]]  # step, weight, {name: value}
StepColumns: TypeAlias = tuple[int, float, float, int]  # step, loss, learning rate, tokens


class RunMetrics:
    """Buffer of metrics rows, one per step. Rank 0 writes all rows. Construction and `flush` are collective."""

    def __init__(
        self,
        comm: Communicator,
        path: Path,
        resume_step: int | None,
        attributes: Mapping[str, float | str],
        energy: EnergyRecorder,
        streaming: EventPublisher,
    ) -> None:
        self._comm, self._energy, self._streaming = comm, energy, streaming
        self._writer = MetricsWriter(path, comm.size, resume_step, attributes=attributes) if comm.rank == 0 else None
        self.clocks = HostClocks(comm)
        self._common: list[StepColumns] = []
        self._own: list[list[float]] = []
        self._gathered: list[tuple[StepColumns, list[float]]] = []  # rows of this rank in the last flush
        self._logged: list[LoggedValues] = []
        self._flushed = time.monotonic()
        self._costs_s: deque[float] = deque(maxlen=5)  # durations of the last flushes on this rank

    def add(
        self, step: int, loss: float, learning_rate: float, tokens: int, seconds: Mapping[str, float], sent_bytes: float
    ) -> None:
        """Add this rank's metrics row for ``step``. ``seconds``: {phase of the step: seconds}. Local.

        ``tokens``: number of targets in the loss over all replicas. ``sent_bytes``: bytes that this rank has sent.
        """
        self._common.append((step, loss, learning_rate, tokens))
        figures = {**seconds, "sent_bytes": sent_bytes}
        self._own.append([figures[name] for name in PER_RANK])

    def log(self, step: int, weight: float, values: Mapping[str, float]) -> None:
        """Add ``values`` {name: value} of a user's script after ``step``, with ``weight`` in the mean. Local."""
        self._logged.append((step, weight, values))

    def due(self) -> bool:
        """Return True on rank 0 if it is time for a flush; always False on other ranks. Local."""
        return self._writer is not None and self._overdue()

    def _overdue(self) -> bool:
        seldom_s = min(FLUSH_AT_LEAST_EVERY_S, statistics.median(self._costs_s) / FLUSH_SHARE) if self._costs_s else 0.0
        return time.monotonic() - self._flushed >= max(FLUSH_EVERY_S, seldom_s) or len(self._own) >= FLUSH_AT_ROWS

    def flush(self) -> None:
        """Gather the new metrics rows of all ranks. Rank 0 writes the rows, and may raise StorageError. Collective."""
        start = time.monotonic()
        self._gather()
        nodes = self._energy.collect()
        self._streaming.gather(self._energy.monitor, self._energy.note())
        if self._writer is not None:
            self._publish(self._writer, *([lambda file, session: append_rows(file, session, nodes)] if nodes else []))
        self._flushed = time.monotonic()
        self._costs_s.append(self._flushed - start)

    def _publish(self, writer: MetricsWriter, *appends: Append) -> None:
        events = self._streaming.publish()
        of_events = [lambda file, session: observations.append(file, session, events)] if events else []
        writer.flush(*of_events, *appends)

    def _gather(self) -> None:
        self._gathered = [*zip(self._common, self._own, strict=True)]
        self._common, self._own = [], []
        logged, self._logged = self._logged, []
        ranks, logged_by_ranks = zip(*self._comm.allgather_object((self._gathered, logged)), strict=True)
        if self._writer is not None:
            for rows in zip(*ranks, strict=True):
                self._append(self._writer, rows[0][0], np.array([figures for _, figures in rows]))
            self._streaming.logged([row for rows in logged_by_ranks for row in rows])

    def _append(self, writer: MetricsWriter, common: StepColumns, ranks: np.ndarray, made_by: int = 0) -> None:
        step, loss, learning_rate, tokens = common
        wide = {name: ranks[:, column] for column, name in enumerate(PER_RANK)}
        writer.append(step=step, loss=loss, learning_rate=learning_rate, tokens=tokens, made_by=made_by, **wide)
        self._streaming.row(step, loss, learning_rate, tokens, wide)

    def evaluated(self, step: int, val_loss: float) -> None:
        """Write ``val_loss``, the validation loss of a user's script after ``step``, unless NaN. Only rank 0 writes."""
        if self._writer is not None and not math.isnan(val_loss):
            self._writer.evaluation(step, val_loss)

    def unsaved(self) -> list[tuple[StepColumns, list[float]]]:
        """Return a list of this rank's metrics rows that the metrics file may lack, for `carry`. Local."""
        return [*self._gathered, *zip(self._common, self._own, strict=True)]

    def carry(self, rows: Sequence[tuple[StepColumns, list[float]]], last: int, old_world: int) -> None:
        """After a rank failure, append the ``rows`` up to step ``last`` that the metrics file lacks. Collective.

        ``rows``: this rank's result of `unsaved`. ``old_world``: number of ranks before the failure; 0 on a new rank.
        """
        # Dead ranks get NaN.
        self._gathered = list(rows)
        carried = self._comm.allgather_object((rows, old_world))
        ranks = [{common[0]: (common, values) for common, values in own_rows} for own_rows, _ in carried]
        made_by = max(size for _, size in carried)
        if self._writer is None:
            return
        missing = [math.nan] * len(PER_RANK)
        for step in sorted(step for step in set().union(*ranks) if self._writer.last < step <= last):
            common = next(own_rows[step][0] for own_rows in ranks if step in own_rows)
            figures = [own_rows[step][1] if step in own_rows else missing for own_rows in ranks]
            self._append(self._writer, common, np.array(figures), made_by)
        self._writer.flush()

    def note_clocks(self) -> None:
        """Measure the clock offsets between hosts, and write the offsets to the metrics file. Collective."""
        append = side_tables.note_clocks(self.clocks)
        if self._writer is not None:
            self._writer.include(append)

    def put(self, table: MetricsTable, **columns: Any) -> None:
        """Append rows to ``table`` of the metrics file. ``**columns``: {column name: values}. Only rank 0 writes."""
        if self._writer is not None:
            self._writer.put(table, **columns)

    def finish(self, steps: int, val_loss: float, **figures: float | str) -> None:
        """On rank 0, write the final results to the metrics file, and close the event sinks.

        ``val_loss``: validation loss after ``steps`` steps. ``**figures``: other results, by name.
        """
        if self._writer is not None:
            if not math.isnan(val_loss):
                self._writer.evaluation(steps, val_loss)
            self._writer.describe(val_loss=val_loss, **figures)
            self._streaming.evaluated(steps, val_loss)
            self._streaming.end()
            self._publish(self._writer)
            self._streaming.close(normal=True)

    def close(self) -> None:
        """Free the communicators of these metrics. Do not call `flush` afterwards. Collective."""


# A message of 2.3 kB is sent eagerly by MPI libraries, so that no sender waits for rank 0.
ROWS_PER_MESSAGE: Final = 32
MOST_LEAD_STEPS: Final = 1 << 16  # largest lead over the slowest worker whose rows are kept: 20 MB a worker on rank 0


class AsyncRunMetrics(RunMetrics):
    """Metrics of a run whose ranks are at different steps. Construction and `flush` are collective."""

    # Rank 0 writes the row of a step, with the mean loss, after all workers have completed the step.
    # `serve` sends rows to rank 0. Rank 0 drops rows more than `MOST_LEAD_STEPS` steps ahead of the slowest worker.
    # Only `flush` writes energy samples.
    def __init__(self, comm: Communicator, *of_file: Any) -> None:
        super().__init__(comm, *of_file)
        self._channel = RowChannel(comm)
        self._last: dict[int, int] = {}  # worker -> last step received by rank 0
        self._waiting: dict[int, dict[int, np.ndarray]] = {}  # step -> worker -> row; on rank 0

    def close(self) -> None:
        self._channel.free()

    def begin(self, clocks: Mapping[int, int]) -> None:
        """Set each worker's number of completed steps at the start. ``clocks``: {rank: number}. Local."""
        self._last = dict(clocks)

    def serve(self) -> None:
        """Send new metrics rows to rank 0. On rank 0, write the rows that have arrived. Does not wait. Local."""
        self._channel.test()
        if self._writer is None:
            if self._common and (len(self._common) >= ROWS_PER_MESSAGE or self._overdue()):
                self._send()
                self._flushed = time.monotonic()
            return
        self._keep(self._channel.arrived())
        if self._overdue():
            self._write(self._writer)
            self._publish(self._writer)
            self._flushed = time.monotonic()

    def _gather(self) -> None:
        self._send()
        self._keep(self._channel.drain())
        if self._writer is not None:
            self._write(self._writer)

    def _send(self) -> None:
        # One row per step: `StepColumns`, and the figures of this rank.
        rows = np.array([[*common, *row] for common, row in zip(self._common, self._own, strict=True)], np.float64)
        self._common, self._own = [], []
        if self._writer is not None:
            self._keep([(self._comm.rank, rows)])
            return
        for start in range(0, len(rows), ROWS_PER_MESSAGE):
            self._channel.send(rows[start : start + ROWS_PER_MESSAGE])

    def _keep(self, messages: Sequence[tuple[int, np.ndarray]]) -> None:
        for worker, row in ((worker, row) for worker, rows in messages for row in rows):
            self._last[worker] = step = int(row[0])
            if step <= min(self._last.values()) + MOST_LEAD_STEPS:
                self._waiting.setdefault(step, {})[worker] = row

    def _write(self, writer: MetricsWriter) -> None:
        self._send()
        complete = min(self._last.values(), default=0)
        for step in sorted(step for step in self._waiting if step <= complete):
            by_worker = self._waiting.pop(step)
            _, losses, rates, targets, *_ = np.array(list(by_worker.values())).T
            figures = np.full((self._comm.size, len(PER_RANK)), np.nan)
            for worker, row in by_worker.items():
                figures[worker] = row[-len(PER_RANK) :]
            loss = float((losses * targets).sum() / targets.sum())
            self._append(writer, (step, loss, float(rates.mean()), int(targets.sum())), figures)
