"""Rows of metrics from every rank, gathered now and then and written by rank 0."""

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
from hpcdist.energy.monitor import tables
from hpcdist.telemetry.metrics import observations, side_tables
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.energy import Energy
from hpcdist.training.streaming import Streaming

EVERY_S: Final = 5.0  # a killed run loses the rows of so many seconds,
LONGEST_S: Final = 60.0  # or of up to so many, where more than a
SHARE: Final = 0.004  # of the time would go into flushes,
MOST_ROWS: Final = 4096  # and never more rows than these: memory does not grow with the steps of a minute
Append: TypeAlias = Callable[[Any, int], None]
Common: TypeAlias = tuple[int, float, float, int]  # step, loss, learning rate, tokens


class Metrics:
    """One rank's rows since the last flush. Construction and `flush` are collective; the file belongs to rank 0."""

    def __init__(
        self,
        comm: Communicator,
        path: Path,
        resume_step: int | None,
        attributes: Mapping[str, float | str],
        energy: Energy,
        streaming: Streaming,
    ) -> None:
        self._comm, self._energy, self._streaming = comm, energy, streaming
        self._writer = MetricsWriter(path, comm.size, resume_step, attributes=attributes) if comm.rank == 0 else None
        self.clocks = HostClocks(comm)
        self._common: list[Common] = []
        self._own: list[list[float]] = []
        self._gathered: list[tuple[Common, list[float]]] = []  # of this rank, by the last flush
        self._flushed = time.monotonic()
        self._costs_s: deque[float] = deque(maxlen=5)  # of the last flushes, to this rank

    def add(
        self, step: int, loss: float, learning_rate: float, tokens: int, seconds: Mapping[str, float], sent_bytes: float
    ) -> None:
        """Take the row of a step; ``seconds`` by phase and ``sent_bytes`` are this rank's (local)."""
        self._common.append((step, loss, learning_rate, tokens))
        figures = {**seconds, "sent_bytes": sent_bytes}
        self._own.append([figures[name] for name in PER_RANK])

    def due(self) -> bool:
        """Whether rank 0 wants a flush; the other ranks never do (local)."""
        return self._writer is not None and self._overdue()

    def _overdue(self) -> bool:
        seldom_s = min(LONGEST_S, statistics.median(self._costs_s) / SHARE) if self._costs_s else 0.0
        return time.monotonic() - self._flushed >= max(EVERY_S, seldom_s) or len(self._own) >= MOST_ROWS

    def flush(self) -> None:
        """Gather what all ranks have, write it and tell sinks. Raises StorageError on rank 0 when the disk is full."""
        begun = time.monotonic()
        self._gather()
        nodes = self._energy.collect()
        self._streaming.gather(self._energy.monitor, self._energy.note())
        if self._writer is not None:
            self._publish(self._writer, *([lambda file, session: tables.append(file, session, nodes)] if nodes else []))
        self._flushed = time.monotonic()
        self._costs_s.append(self._flushed - begun)

    def _publish(self, writer: MetricsWriter, *appends: Append) -> None:
        """Tell the sinks what has come, and write it (rank 0)."""
        events = self._streaming.publish()
        kept = [lambda file, session: observations.append(file, session, events)] if events else []
        writer.flush(*kept, *appends)

    def _gather(self) -> None:
        """Hand the rows of all ranks, which are of the same steps, to the writer. Collective."""
        self._gathered = [*zip(self._common, self._own, strict=True)]
        self._common, self._own = [], []
        ranks = self._comm.allgather_object(self._gathered)
        if self._writer is not None:
            for rows in zip(*ranks, strict=True):
                self._append(self._writer, rows[0][0], np.array([own for _, own in rows]))

    def _append(self, writer: MetricsWriter, common: Common, ranks: np.ndarray, made_by: int = 0) -> None:
        """Append the row of a step; ``ranks`` has the figures of each rank, NaN where there are none."""
        step, loss, learning_rate, tokens = common
        wide = {name: ranks[:, column] for column, name in enumerate(PER_RANK)}
        writer.append(step=step, loss=loss, learning_rate=learning_rate, tokens=tokens, made_by=made_by, **wide)
        self._streaming.row(step, loss, learning_rate, tokens, wide)

    def unsaved(self) -> list[tuple[Common, list[float]]]:
        """Return this rank's rows of which nobody knows whether they are in the file, after a death (local)."""
        return [*self._gathered, *zip(self._common, self._own, strict=True)]

    def carry(self, rows: Sequence[tuple[Common, list[float]]], last: int, world: int) -> None:
        """Write the rows up to step ``last`` that ranks had in memory and the file lacks, after a death. Collective.

        They were made by ``world`` ranks; 0 where this rank was none of them. What others had measured is NaN.
        """
        self._gathered = list(rows)
        told = self._comm.allgather_object((rows, world))
        ranks = [{common[0]: (common, own) for common, own in found} for found, _ in told]
        made_by = max(known for _, known in told)
        if self._writer is None:
            return
        missing = [math.nan] * len(PER_RANK)
        for step in sorted(step for step in set().union(*ranks) if self._writer.last < step <= last):
            common = next(found[step][0] for found in ranks if step in found)
            figures = [found[step][1] if step in found else missing for found in ranks]
            self._append(self._writer, common, np.array(figures), made_by)
        self._writer.flush()

    def shared(self, first_step: int, samples: Sequence[int]) -> None:
        """Write how many samples each replica takes from ``first_step`` on (rank 0 does)."""
        if self._writer is not None:
            self._writer.include(lambda file, session: side_tables.append_shares(file, session, first_step, samples))

    def scaled(self, step: int, scale: float, skipped: bool) -> None:
        """Write the scale of the loss in ``step`` (rank 0 does, the others have nothing to do)."""
        if self._writer is not None:
            self._writer.include(
                lambda file, session: side_tables.append_loss_scale(file, session, step, scale, skipped)
            )

    def note_clocks(self) -> None:
        """Write how far the clocks of the hosts are apart. Collective."""
        readings = self.clocks.measure()
        if self._writer is not None:
            hosts, wall_ns = self.clocks.hosts, time.time_ns() - time.monotonic_ns()
            self._writer.include(
                lambda file, session: side_tables.append_clocks(file, session, hosts, readings, wall_ns)
            )

    def include(self, append: Callable[[Any, int], None]) -> None:
        """Let ``append(file, session)`` add a table of its own (rank 0 does, the others have nothing to do)."""
        if self._writer is not None:
            self._writer.include(append)

    def finish(self, steps: int, val_loss: float, **figures: float | str) -> None:
        """Write what is known at the end of a start (rank 0 does, the others have nothing to do).

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
