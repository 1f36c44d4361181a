"""The training loop where no worker waits for another, and the meetings at which all decide together."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.parameter_server.asynchronous import AsynchronousExchange
from hpcdist.strategies.schedule.executor import MicroBatch
from hpcdist.telemetry.metrics import PER_RANK, MetricsWriter
from hpcdist.training.data import Prefetcher, microbatches
from hpcdist.training.energy import Energy
from hpcdist.training.loop import Loop, Outcome
from hpcdist.training.metrics import Metrics, Row
from hpcdist.training.survival import Wish, agreed
from hpcdist.training.trainer import Trainer


def loop_of(trainer: Trainer) -> type[Loop]:
    """Return the loop for the architecture of ``trainer`` (local)."""
    return AsynchronousLoop if isinstance(trainer.exchange, AsynchronousExchange) else Loop


class UnevenMetrics(Metrics):
    """Rows of ranks that are not at the same step: that of a step is written once all workers have made it.

    Its loss is the mean over the workers' batches of that step, each under the parameters its worker had then. Times
    and bytes of a dedicated server, which has no steps, are NaN. Of steps that a worker had made beyond the checkpoint
    from which a run goes on, there are the rows of the slower workers only. All workers have made step ``complete``.
    """

    def __init__(
        self,
        comm: Communicator,
        path: Path,
        resume_step: int | None,
        attributes: Mapping[str, float | str],
        energy: Energy,
    ) -> None:
        super().__init__(comm, path, resume_step, attributes, energy)
        self.complete = 0
        self._waiting: dict[int, dict[int, Row]] = {}  # step -> rank -> its row; on rank 0

    def _take(self, writer: MetricsWriter, ranks: list[list[Row]]) -> None:
        for rank, rows in enumerate(ranks):
            for row in rows:
                self._waiting.setdefault(row[0][0], {})[rank] = row
        for step in sorted(step for step in self._waiting if step <= self.complete):
            found = self._waiting.pop(step)
            columns = zip(*(common for common, _ in found.values()), strict=True)
            _, losses, rates, targets = (np.array(column) for column in columns)
            figures = np.full((len(ranks), len(PER_RANK)), np.nan)
            for rank, (_, own) in found.items():
                figures[rank] = own
            loss = float((losses * targets).sum() / targets.sum())
            self._append(writer, (step, loss, float(rates.mean()), int(targets.sum())), figures)


class AsynchronousLoop(Loop):
    """The run of one rank under asp. `run` is collective over the world.

    Workers make their steps, each as fast as it can. What needs everybody happens in meetings: rows of metrics are
    due, somebody wishes to stop, the slowest worker has come to a multiple of ``checkpoint.every_steps``, a worker's
    loss is not finite, or all have done their steps. "Steps" of the run are those of the slowest worker; the others'
    clocks are part of a checkpoint too.
    """

    kind_of_metrics = UnevenMetrics
    metrics: UnevenMetrics

    def run(self) -> Outcome:
        """Train until every worker has made the steps of the recipe, or until somebody wishes to stop."""
        exchange = self.trainer.exchange
        assert isinstance(exchange, AsynchronousExchange)
        self.exchange = exchange
        self._operations = exchange.attended(self.trainer.operations)
        self._failure = ""
        self._last = (0.0, 0)  # loss and targets of the last step
        self._saved_at = self.outcome.first
        self._began = self._boundary = time.perf_counter()
        self._counted = self._sent_before = self.traffic.sent_bytes
        exchange.meetings.wants = lambda: bool(self.wishes.current().any()) or self.metrics.due()
        self._plan_checkpoint()
        exchange.part()
        over = exchange.works and self._work()
        while not over:
            over = self._meet()
        self._align()
        self.wishes.answered()
        return self.outcome

    def _work(self) -> bool:
        """Make this worker's steps; whether the run is over, or was stopped, before it had made them all."""
        trainer, parts = self.trainer, self.trainer.recipe.parallel.microbatches
        first, steps = self.exchange.clock, trainer.recipe.run.steps
        with Prefetcher(trainer.source, trainer.recipe, trainer.data_axis, first, steps) as batches:
            for step, batch in enumerate(batches, start=first + 1):
                self._step(step, microbatches(trainer.place(batch), parts))
                if step == first + 1 and self.session.watchdog is not None:
                    self.session.watchdog.tighten()
                if (self.exchange.meetings.called or self._failure) and self._meet():
                    return True
        return False

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer, outcome = self.trainer, self.outcome
        samples = sum(len(inputs) for inputs, _ in batches)
        shard = self.exchange.shard
        busy_s = shard.busy_s if shard is not None else 0.0
        try:
            found = trainer.executor.run(self._operations, batches, samples, step, np.zeros(0))
        except NonFiniteError as error:
            where = trainer.executor.inspect(self._operations, batches)
            self._failure = f"worker {trainer.comm.rank}: {error} ({where})"
            self.exchange.meetings.call()
            return
        if shard is not None:  # updates that it made for others, and its own, are no communication
            found.seconds["update_s"] += shard.busy_s - busy_s
            found.seconds["communication_s"] -= shard.busy_s - busy_s
        targets = samples * trainer.model.tokens_per_sample
        self._last = found.loss, targets
        outcome.sent_bytes.append(float(self.traffic.sent_bytes - self._counted))
        self._counted = self.traffic.sent_bytes
        rate = self.exchange.learning_rate
        self.metrics.add(step, found.loss, rate, targets, found.seconds, outcome.sent_bytes[-1])
        outcome.communication_s.append(found.seconds["communication_s"])
        now = time.perf_counter()
        outcome.step_s.append(now - self._boundary)
        self._boundary = now
        everybody = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
        self.progress.step(step, found.loss, everybody, found.seconds["communication_s"] / outcome.step_s[-1])

    def _meet(self) -> bool:
        """Come together and do what is due; whether the run is over. Collective."""
        self.exchange.meet()
        if self.session.watchdog is not None:
            self.session.watchdog.tighten()
        sent = self.traffic.sent_bytes
        over = self._decide(*self._agree())
        self._counted += self.traffic.sent_bytes - sent  # what a meeting sends belongs to no step
        self._sent_before += self.traffic.sent_bytes - sent
        if not over:
            self.exchange.part()
        return over

    def _agree(self) -> tuple[Wish | None, bool]:
        """Bring together what the ranks know; return the wish and whether metrics are due. Collective.

        Raises NonFiniteError on every rank when a worker's loss or gradient was not finite.
        """
        exchange, comm = self.exchange, self.trainer.comm
        loss, targets = self._last
        updates = exchange.updates if comm.rank == exchange.roles.servers[0] else 0
        own = [self.metrics.due(), bool(self._failure), exchange.meetings.calls, updates, loss * targets, targets]
        clocks = np.zeros(len(exchange.roles.workers))
        if exchange.works:
            clocks[exchange.roles.workers.index(comm.rank)] = exchange.clock
        values = exchange.agree(np.concatenate([self.wishes.current(), own, clocks]))
        wishes, found = values[: len(Wish)], values[len(Wish) :].tolist()
        exchange.adjourn([int(clock) for clock in found[len(own) :]], updates=int(found[3]), calls=int(found[2]))
        self.outcome.done = self.metrics.complete = min(exchange.clocks)
        if found[1]:
            failures = [failure for failure in comm.allgather_object(self._failure) if failure]
            self.metrics.flush()
            raise NonFiniteError(
                f"{'; '.join(failures)}. That gradient was not applied: lower optimizer.learning_rate, set "
                "optimizer.clip_norm, or look at the samples of this step"
            )
        if found[5]:
            self.outcome.loss = found[4] / found[5]
        return agreed(wishes), bool(found[0])

    def _decide(self, wish: Wish | None, due: bool) -> bool:
        """Save, write rows, stop: what all ranks agreed on. Collective."""
        outcome, recipe = self.outcome, self.trainer.recipe
        finished = outcome.done == recipe.run.steps
        every = recipe.checkpoint.every_steps
        if finished or wish is not None:
            self.exchange.refresh()
            self._save(outcome.done)
            outcome.wish = None if finished else wish
            return True
        if every and outcome.done // every > self._saved_at // every:
            self._save(outcome.done)
            self._saved_at = outcome.done
            self._plan_checkpoint()
        elif due:
            self.metrics.flush()
        return False

    def _plan_checkpoint(self) -> None:
        every = self.trainer.recipe.checkpoint.every_steps
        self.exchange.meet_at = (self._saved_at // every + 1) * every if every else 0

    def _align(self) -> None:
        """Give all ranks figures of equally many steps. Collective.

        Those of a dedicated server are means, and so are the bytes of any rank that serves: it does so also while it
        waits for a meeting, in none of its own steps.
        """
        outcome, shard = self.outcome, self.exchange.shard
        elapsed_s, sent_bytes = time.perf_counter() - self._began, self.traffic.sent_bytes - self._sent_before
        made = self.trainer.comm.allgather_object(len(outcome.step_s) if self.exchange.works else None)
        steps = min(count for count in made if count is not None)
        if self.exchange.works:
            for figures in (outcome.step_s, outcome.communication_s, outcome.sent_bytes):
                del figures[steps:]
        elif steps:
            assert shard is not None
            outcome.step_s = [elapsed_s / steps] * steps
            outcome.communication_s = [(elapsed_s - shard.busy_s) / steps] * steps
        if steps and shard is not None:
            outcome.sent_bytes = [sent_bytes / steps] * steps
