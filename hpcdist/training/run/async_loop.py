"""Training loop of workers that are not in lock-step (asp, ssp, backup workers), and their rendezvous.

Workers make their steps each as fast as it can. A rendezvous brings all together when somebody wishes to stop, a
checkpoint is due, a loss is not finite, or all steps are made; it costs a quick worker at most one step of the
slowest. Rows of metrics need none.
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from hpcdist.errors import NonFiniteError
from hpcdist.strategies.parameter_server.asynchronous.backup_workers import BackupExchange
from hpcdist.strategies.parameter_server.asynchronous.bounded_staleness import AsynchronousExchange
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.telemetry.metrics.step_metrics import PER_RANK
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import Prefetcher, microbatches
from hpcdist.training.observe.metrics import AsyncRunMetrics
from hpcdist.training.run.loop import RunOutcome, TrainingLoop
from hpcdist.training.run.stop_requests import StopReason, agreed_reason


def loop_class(trainer: Trainer) -> type[TrainingLoop]:
    """Return the loop for the architecture of ``trainer`` (local)."""
    return TrainingLoop if trainer.exchange.lock_step else AsyncTrainingLoop


class AsyncTrainingLoop(TrainingLoop):
    """The run of one rank under asp or ssp, or with backup workers. `run` is collective over the world.

    Workers make their steps, each as fast as it can. What needs everybody happens in meetings: somebody wishes to
    stop, the slowest worker has come to a multiple of ``checkpoint.every_steps``, a worker's loss is not finite, or all
    have done their steps. A meeting costs a quick worker at most one step of the slowest. Rows of metrics need none.
    "Steps" of the run are those of the slowest worker; the others' clocks are part of a checkpoint too.

    With backup workers a step is one of all workers. A row of metrics has the gradients that were taken; of one that
    came too late it has the times, and its worker leaves out the steps that were made meanwhile.
    """

    kind_of_metrics = AsyncRunMetrics
    metrics: AsyncRunMetrics

    def run(self) -> RunOutcome:
        """Train until every worker has made the steps of the recipe, or until somebody wishes to stop."""
        exchange = self.exchange = cast(AsynchronousExchange | BackupExchange, self.trainer.exchange)
        self.metrics.begin(dict(zip(exchange.roles.workers, exchange.clocks, strict=True)))
        self._begins = list(exchange.clocks)
        self._operations = exchange.attended(self.trainer.operations)
        self._failure = ""
        self._last = (0.0, 0)  # loss and targets of the last step
        self._seen = exchange.updates
        self._saved_at = self.outcome.first
        self._boundary = time.perf_counter()
        self._counted = self._sent_before = float(self.traffic.sent_bytes)
        self._shared = self.traffic.moved().shared
        exchange.meetings.wants, exchange.meetings.meanwhile = self._wants, self._attend
        self._plan_checkpoint()
        self.metrics.note_clocks()
        exchange.part()
        over = exchange.works and self._work()
        while not over:
            over = self._meet()
        self.metrics.note_clocks()
        self._count_what_was_served()
        self.stop_requests.answered()
        self.pace.ended(self.outcome.stop_request is not None)
        return self.outcome

    def _wants(self) -> bool:
        """Whether this rank wishes for a meeting (local). A server asks behind each of its updates."""
        self._tighten()
        return bool(self.stop_requests.current().any())

    def _tighten(self) -> None:
        """On a server, end the grace of the first step once every worker has made one (local)."""
        if self.exchange.shard is None or self.exchange.works or not self._begins:
            return
        steps = self.trainer.recipe.run.steps
        seen = list(self.exchange.seen.values())
        if any(now > first for now, first in zip(seen, self._begins, strict=True)):
            self.stop_requests.begun()  # an update is made, and may be saved
        if all(now > first or first == steps for now, first in zip(seen, self._begins, strict=True)):
            self.stop_requests.begun()
            if self.session.watchdog is not None:
                self.session.watchdog.tighten()
            self._begins = []

    def _attend(self) -> None:
        """Bring rows on their way (local)."""
        with self._apart():
            self.metrics.serve()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Count no message inside as part of a step (local)."""
        sent, shared = self.traffic.sent_bytes, self.traffic.moved().shared
        yield
        self._counted += self.traffic.sent_bytes - sent
        self._shared += self.traffic.moved().shared - shared
        self._sent_before += self.traffic.sent_bytes - sent

    def _work(self) -> bool:
        """Make this worker's steps; whether the run is over, or was stopped, before it had made them all.

        It may be called to a meeting before its first, by the values for which it had to ask anew.
        """
        trainer, parts = self.trainer, self.trainer.recipe.parallel.microbatches
        first, steps = self.exchange.clock, trainer.recipe.run.steps
        of = trainer.source, trainer.recipe, trainer.data_axis
        with Prefetcher(*of, first, steps, rule=trainer.sample_order) as batches:
            for step, batch in enumerate(self.onlookers.awaited(batches), start=first + 1):
                while self.exchange.meetings.called or self._failure:
                    if self._meet():
                        return True
                if step <= self.exchange.clock:
                    continue  # made without this worker
                self._step(step, microbatches(trainer.place(batch), parts))
                self._attend()
                if step == first + 1 and self.session.watchdog is not None:
                    self.session.watchdog.tighten()
        return False

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer, exchange = self.trainer, self.exchange
        samples = sum(len(inputs) for inputs, _ in batches)
        divisor = exchange.weigh(samples, trainer.recipe.run.global_batch)
        busy_s = exchange.shard.busy_s if exchange.shard is not None else 0.0
        try:
            first = trainer.first_sample(step)
            with self.onlookers.ranges("step", "step"):
                found = trainer.executor.run(self._operations, batches, divisor, step, np.zeros(0), first)
        except NonFiniteError as error:
            with exchange.unpushed():
                where = trainer.executor.inspect(self._operations, batches)
            self._failure = f"worker {trainer.comm.rank}: {error} ({where or 'computed again, it is finite'})"
            exchange.meetings.call()
            return
        if exchange.clock < step:
            return  # all others have left for a meeting: this step is not made
        if exchange.shard is not None:  # updates that it made for others, and its own, are no communication
            found.seconds["update_s"] += exchange.shard.busy_s - busy_s
            found.seconds["communication_s"] -= exchange.shard.busy_s - busy_s
        self.stop_requests.begun()
        self._note(step, found, found.loss * divisor / max(1, samples), samples)

    def _note(self, step: int, found: StepResult, loss: float, samples: int) -> None:
        """Take note of a step that was made, with the mean ``loss`` over this worker's ``samples`` (local)."""
        exchange, outcome = self.exchange, self.outcome
        targets = samples * self.trainer.model.tokens_per_sample if exchange.taken else 0
        self._last = loss, targets
        moved = self.traffic.moved()
        sent, shared = moved.messages - self._counted, moved.shared - self._shared
        self._counted, self._shared = moved.messages, moved.shared
        now = time.perf_counter()
        begun, self._boundary = self._boundary, now
        step_s, communication_s = now - begun, found.seconds["communication_s"]
        figures = {"communication_s": communication_s, "messages": sent, "shared": shared, "unknown": 0.0}
        outcome.steps.add(step_s, sent, targets=targets, staleness=exchange.staleness, **figures)
        outcome.dropped += not exchange.taken
        outcome.stalest = max(outcome.stalest, exchange.staleness)
        self.pace.stepped(step_s)
        self.onlookers.stepped(step, begun, now)
        self.streaming.stepped(step, found, self.onlookers.waited_s)
        seconds = {**found.seconds, "step_s": step_s}
        self.metrics.add(step, loss, exchange.learning_rate, targets, seconds, sent)
        if exchange.clock > step:
            self._note_missed()
        self.progress.step(exchange.clock, loss, self._targets_of_all(), communication_s / step_s)

    def _note_missed(self) -> None:
        """Others made the steps up to this worker's clock: the last of them has no times of this worker (local)."""
        nothing = dict.fromkeys(PER_RANK, math.nan)
        self.metrics.add(self.exchange.clock, 0.0, self.exchange.learning_rate, 0, nothing, math.nan)

    def _targets_of_all(self) -> int:
        """Return how many targets all workers have done since the last call, by the updates known here (local)."""
        recipe, exchange = self.trainer.recipe, self.exchange
        updates, self._seen = exchange.updates - self._seen, exchange.updates
        return round(updates * exchange.share * recipe.run.global_batch * self.trainer.model.tokens_per_sample)

    def _meet(self) -> bool:
        """Come together and do what is due; whether the run is over. Collective."""
        self.stop_requests.begun()
        self.exchange.meet()
        if self.session.watchdog is not None:
            self.session.watchdog.tighten()
        with self._apart():
            over = self._decide(self._agree())
        if not over:
            self.exchange.part()
        return over

    def _agree(self) -> StopReason | None:
        """Bring together what the ranks know; return what they wish. Collective.

        Raises NonFiniteError on every rank when a worker's loss or gradient was not finite.
        """
        exchange, comm = self.exchange, self.trainer.comm
        loss, targets = self._last
        updates = exchange.updates if comm.rank == exchange.roles.servers[0] else 0
        own = [bool(self._failure), exchange.meetings.calls, updates, loss * targets, targets]
        clocks = np.zeros(len(exchange.roles.workers))
        if exchange.works:
            clocks[exchange.roles.workers.index(comm.rank)] = before = exchange.clock
        values = exchange.agree(np.concatenate([self.stop_requests.current(), own, clocks]))
        stop_requests, found = values[: len(StopReason)], values[len(StopReason) :].tolist()
        exchange.leave([int(clock) for clock in found[len(own) :]], updates=int(found[2]), calls=int(found[1]))
        if exchange.works and exchange.clock > before:
            self._note_missed()
        self.outcome.done = min(exchange.clocks)
        if found[0]:
            failures = [failure for failure in comm.allgather_object(self._failure) if failure]
            self.metrics.flush()
            raise NonFiniteError(
                f"{'; '.join(failures)}. That gradient was not applied: lower optimizer.learning_rate, set "
                "optimizer.clip_norm, or look at the samples of this step"
            )
        if found[4]:
            self.outcome.loss = found[3] / found[4]
        return agreed_reason(stop_requests)

    def _decide(self, stop_request: StopReason | None) -> bool:
        """Save, stop: what all ranks agreed on. Collective."""
        outcome, recipe = self.outcome, self.trainer.recipe
        self._finish_save()  # ranks that share no step agree on nothing between two meetings
        finished = outcome.done == recipe.run.steps
        every = recipe.checkpoint.every_steps
        if finished or stop_request is not None:
            self.exchange.refresh()
            self._save(outcome.done)
            self._finish_save()
            outcome.stop_request = None if finished else stop_request
            return True
        if every and outcome.done // every > self._saved_at // every:
            self._save(outcome.done)
            self._saved_at = outcome.done
            self._plan_checkpoint()
        return False

    def _plan_checkpoint(self) -> None:
        every = self.trainer.recipe.checkpoint.every_steps
        self.exchange.meet_at = (self._saved_at // every + 1) * every if every else 0

    def _count_what_was_served(self) -> None:
        """On a rank that serves, note a mean in the place of the bytes of its own steps, if it has any. Collective.

        It also sends while it waits for a meeting, in none of its own steps. The mean is over as many steps as were
        made in this start by a worker, in the mean of those that made any.
        """
        outcome, exchange = self.outcome, self.exchange
        made = self.trainer.comm.allgather_object(outcome.steps.count)
        steps = [count for count in made if count]
        if exchange.shard is not None and steps:
            outcome.served_bytes = (self.traffic.sent_bytes - self._sent_before) / statistics.mean(steps)
