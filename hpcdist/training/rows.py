"""Rows of metrics from workers that are not at the same step: they come to rank 0 in messages of their own."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.communicator import Communicator, Message, Request
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.energy import Energy
from hpcdist.training.metrics import Metrics
from hpcdist.training.streaming import Streaming

# Of a message: 2.3 kB, which MPI libraries take over at once, so that no sender has to wait for rank 0.
ROWS: Final = 32
COLUMNS: Final = 4 + len(PER_RANK)  # a `Common`, and the figures of one rank
LEAD: Final = 1 << 16  # steps ahead of the slowest worker of which rows wait: 20 MB a worker on rank 0


class UnevenMetrics(Metrics):
    """Rows of ranks that do not meet to write them. Construction and `flush` are collective, all else is local.

    `attend`, between two steps, sends to rank 0 what is due; rank 0 takes what has come and writes the row of a step
    once all workers have made it. Until then those of faster workers wait in the memory of rank 0: a run that is killed
    loses them, and the rows of about `EVERY_S` seconds, as every killed run does. Samples of energy are collected, and
    written, by `flush` alone: when a checkpoint is saved and at the end.

    The loss of a row is the mean over the workers' batches of that step, each under the parameters its worker had then.
    Times and bytes of a dedicated server, which has no steps, are NaN. Of steps that a worker had made beyond the
    checkpoint from which a run goes on, or more than `LEAD` steps ahead of the slowest one, there are the rows of the
    slower workers only.
    """

    def __init__(
        self,
        comm: Communicator,
        path: Path,
        resume_step: int | None,
        attributes: Mapping[str, float | str],
        energy: Energy,
        streaming: Streaming,
    ) -> None:
        super().__init__(comm, path, resume_step, attributes, energy, streaming)
        self._channel = comm.dup("rows")
        self._under_way: list[Request] = []
        self._messages = 0  # that this rank has sent, since the start
        self._taken: Counter[int] = Counter()  # messages that rank 0 has taken, by sender
        self._last: dict[int, int] = {}  # worker -> the last step of which rank 0 knows
        self._waiting: dict[int, dict[int, np.ndarray]] = {}  # step -> worker -> its row; on rank 0

    def begin(self, clocks: Mapping[int, int]) -> None:
        """Take note of the step from which each worker goes on (local)."""
        self._last = dict(clocks)

    def attend(self) -> None:
        """Send rows that are due; on rank 0, take and write those that have come. Waits for nobody (local)."""
        self._under_way = [request for request in self._under_way if not request.test()]
        if self._writer is None:
            if self._common and (len(self._common) >= ROWS or self._overdue()):
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
        """Bring all rows that there are to rank 0. Collective."""
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
        """Begin to send all rows to rank 0, which has no way to go with its own."""
        rows = np.array([[*common, *own] for common, own in zip(self._common, self._own, strict=True)], np.float64)
        self._common, self._own = [], []
        if self._writer is not None:
            self._keep(self._comm.rank, rows)
            return
        for start in range(0, len(rows), ROWS):
            self._under_way.append(self._channel.isend(rows[start : start + ROWS].reshape(-1), 0))
            self._messages += 1

    def _take(self, message: Message) -> None:
        rows = np.zeros(message.nbytes // np.dtype(np.float64).itemsize)
        message.recv(rows)
        self._taken[message.source] += 1
        self._keep(message.source, rows.reshape(-1, COLUMNS))

    def _keep(self, worker: int, rows: np.ndarray) -> None:
        for row in rows:
            self._last[worker] = step = int(row[0])
            if step <= min(self._last.values()) + LEAD:
                self._waiting.setdefault(step, {})[worker] = row

    def _write(self, writer: MetricsWriter) -> None:
        """Append the rows of the steps that all workers have made."""
        self._send()
        complete = min(self._last.values(), default=0)
        for step in sorted(step for step in self._waiting if step <= complete):
            found = self._waiting.pop(step)
            _, losses, rates, targets, *_ = np.array(list(found.values())).T
            figures = np.full((self._comm.size, len(PER_RANK)), np.nan)
            for worker, row in found.items():
                figures[worker] = row[-len(PER_RANK) :]
            loss = float((losses * targets).sum() / targets.sum())
            self._append(writer, (step, loss, float(rates.mean()), int(targets.sum())), figures)
