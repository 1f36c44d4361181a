"""Metrics rows of every rank, gathered now and then and written by rank 0.

A killed run loses the rows of a few seconds (`FLUSH_EVERY_S`), more only where flushing would take more than
`FLUSH_SHARE` of the time. After a rank failure, rows that survivors had in memory are carried into the file.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.comm.communicator import Communicator, Message, Request
from hpcdist.comm.record.clock_offsets import HostClocks
from hpcdist.energy.monitor import tables
from hpcdist.hdf5.tables import MetricsTable
from hpcdist.telemetry.metrics import observations, side_tables
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.event_publisher import EventPublisher

FLUSH_EVERY_S: Final = 5.0  # a killed run loses the rows of so many seconds,
FLUSH_AT_LEAST_EVERY_S: Final = 60.0  # or of up to so many, where more than a
FLUSH_SHARE: Final = 0.004  # of the time would go into flushes,
FLUSH_AT_ROWS: Final = 4096  # and never more rows than these: memory does not grow with the steps of a minute
Append: TypeAlias = Callable[[Any, int], None]
StepColumns: TypeAlias = tuple[int, float, float, int]  # step, loss, learning rate, tokens


class RunMetrics:
    """Rows of one rank since the last flush. Construction and `flush` are collective; rank 0 writes the file."""

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
        self._flushed = time.monotonic()
        self._costs_s: deque[float] = deque(maxlen=5)  # of the last flushes, to this rank

    def add(
        self, step: int, loss: float, learning_rate: float, tokens: int, seconds: Mapping[str, float], sent_bytes: float
    ) -> None:
        """Add the row of a step; ``seconds`` by phase and ``sent_bytes`` are this rank's (local)."""
        self._common.append((step, loss, learning_rate, tokens))
        figures = {**seconds, "sent_bytes": sent_bytes}
        self._own.append([figures[name] for name in PER_RANK])

    def due(self) -> bool:
        """Whether rank 0 wants a flush; the other ranks never do (local)."""
        return self._writer is not None and self._overdue()

    def _overdue(self) -> bool:
        seldom_s = min(FLUSH_AT_LEAST_EVERY_S, statistics.median(self._costs_s) / FLUSH_SHARE) if self._costs_s else 0.0
        return time.monotonic() - self._flushed >= max(FLUSH_EVERY_S, seldom_s) or len(self._own) >= FLUSH_AT_ROWS

    def flush(self) -> None:
        """Gather the rows of all ranks, write and publish them. Raises StorageError on rank 0 when the disk is full."""
        begun = time.monotonic()
        self._gather()
        nodes = self._energy.collect()
        self._streaming.gather(self._energy.monitor, self._energy.note())
        if self._writer is not None:
            self._publish(self._writer, *([lambda file, session: tables.append(file, session, nodes)] if nodes else []))
        self._flushed = time.monotonic()
        self._costs_s.append(self._flushed - begun)

    def _publish(self, writer: MetricsWriter, *appends: Append) -> None:
        """Publish the events to the sinks, and write the rows (rank 0)."""
        events = self._streaming.publish()
        of_events = [lambda file, session: observations.append(file, session, events)] if events else []
        writer.flush(*of_events, *appends)

    def _gather(self) -> None:
        """Hand the rows of all ranks, which are of the same steps, to the writer. Collective."""
        self._gathered = [*zip(self._common, self._own, strict=True)]
        self._common, self._own = [], []
        ranks = self._comm.allgather_object(self._gathered)
        if self._writer is not None:
            for rows in zip(*ranks, strict=True):
                self._append(self._writer, rows[0][0], np.array([own for _, own in rows]))

    def _append(self, writer: MetricsWriter, common: StepColumns, ranks: np.ndarray, made_by: int = 0) -> None:
        """Append the row of a step; ``ranks`` has the figures of each rank, NaN where there are none."""
        step, loss, learning_rate, tokens = common
        wide = {name: ranks[:, column] for column, name in enumerate(PER_RANK)}
        writer.append(step=step, loss=loss, learning_rate=learning_rate, tokens=tokens, made_by=made_by, **wide)
        self._streaming.row(step, loss, learning_rate, tokens, wide)

    def evaluated(self, step: int, val_loss: float) -> None:
        """Take the validation loss that a script has computed after ``step``; NaN is none (rank 0 writes)."""
        if self._writer is not None and not math.isnan(val_loss):
            self._writer.evaluation(step, val_loss)

    def unsaved(self) -> list[tuple[StepColumns, list[float]]]:
        """Return this rank's rows that may not be in the file, after a rank failure (local)."""
        return [*self._gathered, *zip(self._common, self._own, strict=True)]

    def carry(self, rows: Sequence[tuple[StepColumns, list[float]]], last: int, world: int) -> None:
        """Write the rows up to step ``last`` that ranks kept and the file lacks, after a rank failure. Collective.

        They were made by ``world`` ranks; 0 where this rank was none of them. Figures of lost ranks are NaN.
        """
        self._gathered = list(rows)
        carried = self._comm.allgather_object((rows, world))
        ranks = [{common[0]: (common, own) for common, own in own_rows} for own_rows, _ in carried]
        made_by = max(known for _, known in carried)
        if self._writer is None:
            return
        missing = [math.nan] * len(PER_RANK)
        for step in sorted(step for step in set().union(*ranks) if self._writer.last < step <= last):
            common = next(own_rows[step][0] for own_rows in ranks if step in own_rows)
            figures = [own_rows[step][1] if step in own_rows else missing for own_rows in ranks]
            self._append(self._writer, common, np.array(figures), made_by)
        self._writer.flush()

    def note_clocks(self) -> None:
        """Write the offsets of the hosts' clocks. Collective."""
        readings = self.clocks.measure()
        if self._writer is not None:
            hosts, wall_ns = self.clocks.hosts, time.time_ns() - time.monotonic_ns()
            self._writer.include(
                lambda file, session: side_tables.append_clocks(file, session, hosts, readings, wall_ns)
            )

    def put(self, table: MetricsTable, **columns: Any) -> None:
        """Write rows of a side table, see `MetricsWriter.put` (rank 0 does, the others drop them)."""
        if self._writer is not None:
            self._writer.put(table, **columns)

    def finish(self, steps: int, val_loss: float, **figures: float | str) -> None:
        """Write the figures of the end of a start (rank 0 alone).

        ``val_loss`` is NaN where the start was stopped, or where there is no validation data: no evaluation then.
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
        """Free what belongs to the rows alone, after the last `flush`. Collective."""


# A message has 2.3 kB, which MPI libraries send eagerly, so that no sender waits for rank 0.
ROWS_PER_MESSAGE: Final = 32
MESSAGE_COLUMNS: Final = 4 + len(PER_RANK)  # `StepColumns`, and the figures of one rank
MOST_LEAD_STEPS: Final = 1 << 16  # steps ahead of the slowest worker of which rows wait: 20 MB a worker on rank 0


class AsyncRunMetrics(RunMetrics):
    """Rows of ranks that are not in lock-step. Construction and `flush` are collective, all else is local.

    `serve`, between two steps, sends the rows that are due to rank 0, which writes the row of a step once all workers
    have made it. Until then those of faster workers wait in the memory of rank 0: a run that is killed loses them, and
    the rows of about `FLUSH_EVERY_S` seconds, as every killed run does. Samples of energy are collected, and written,
    by `flush` alone: when a checkpoint is saved and at the end.

    The loss of a row is the mean over the workers' batches of that step, each under the parameters its worker had then.
    Times and bytes of a dedicated server, which has no steps, are NaN. Of steps that a worker had made beyond the
    checkpoint from which a run goes on, or more than `MOST_LEAD_STEPS` ahead of the slowest one, only the rows of the
    slower workers are there.
    """

    def __init__(self, comm: Communicator, *of_run: Any) -> None:
        super().__init__(comm, *of_run)
        self._channel = comm.dup("rows")
        self._under_way: list[Request] = []
        self._messages = 0  # that this rank has sent, since the start
        self._taken: Counter[int] = Counter()  # messages that rank 0 has taken, by sender
        self._last: dict[int, int] = {}  # worker -> the last step of which rank 0 knows
        self._waiting: dict[int, dict[int, np.ndarray]] = {}  # step -> worker -> its row; on rank 0

    def close(self) -> None:
        """Free the channel of the rows, after the last `flush`. Collective."""
        self._channel.free()

    def begin(self, clocks: Mapping[int, int]) -> None:
        """Record the step from which each worker goes on (local)."""
        self._last = dict(clocks)

    def serve(self) -> None:
        """Send rows that are due; on rank 0, receive and write those that have come. Never waits (local)."""
        self._under_way = [request for request in self._under_way if not request.test()]
        if self._writer is None:
            if self._common and (len(self._common) >= ROWS_PER_MESSAGE or self._overdue()):
                self._send()
                self._flushed = time.monotonic()
            return
        while (message := self._channel.poll()) is not None:
            self._take(message)
        if self._overdue():
            self._write(self._writer)
            self._publish(self._writer)
            self._flushed = time.monotonic()

    def _gather(self) -> None:
        """Bring all rows to rank 0. Collective."""
        # The counts say how many messages are still under way: MPI may have them anywhere between two ranks.
        self._send()
        counts = self._comm.allgather_object(self._messages)
        if self._writer is not None:
            for rank, count in enumerate(counts):
                while self._taken[rank] < count:
                    self._take(self._channel.probe(rank))
            self._write(self._writer)
        for request in self._under_way:
            request.wait()
        self._under_way.clear()

    def _send(self) -> None:
        """Begin to send all rows to rank 0, which keeps its own."""
        rows = np.array([[*common, *own] for common, own in zip(self._common, self._own, strict=True)], np.float64)
        self._common, self._own = [], []
        if self._writer is not None:
            self._keep(self._comm.rank, rows)
            return
        for start in range(0, len(rows), ROWS_PER_MESSAGE):
            self._under_way.append(self._channel.isend(rows[start : start + ROWS_PER_MESSAGE].reshape(-1), 0))
            self._messages += 1

    def _take(self, message: Message) -> None:
        rows = np.zeros(message.nbytes // np.dtype(np.float64).itemsize)
        message.recv(rows)
        self._taken[message.source] += 1
        self._keep(message.source, rows.reshape(-1, MESSAGE_COLUMNS))

    def _keep(self, worker: int, rows: np.ndarray) -> None:
        for row in rows:
            self._last[worker] = step = int(row[0])
            if step <= min(self._last.values()) + MOST_LEAD_STEPS:
                self._waiting.setdefault(step, {})[worker] = row

    def _write(self, writer: MetricsWriter) -> None:
        """Append the rows of the steps that all workers have made."""
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
