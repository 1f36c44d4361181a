"""Training loop of workers that are not in lock-step (asp, ssp, backup workers), and their rendezvous.

A rendezvous costs a fast worker at most one step of the slowest worker.
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from hpcdist.errors import NonFiniteError
from hpcdist.strategies.parameter_server.backup_workers import BackupExchange
from hpcdist.strategies.parameter_server.bounded_staleness import AsynchronousExchange
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.telemetry.metrics.step_metrics import PER_RANK
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import Prefetcher, microbatches
from hpcdist.training.observe.metrics import AsyncRunMetrics
from hpcdist.training.run.loop import RunOutcome, TrainingLoop
from hpcdist.training.run.stop_requests import StopReason, agreed_reason


def loop_class(trainer: Trainer) -> type[TrainingLoop]:
    """Return the class of the training loop for the strategy of ``trainer``. Local."""
    return TrainingLoop if trainer.exchange.traits.lock_step else AsyncTrainingLoop


class AsyncTrainingLoop(TrainingLoop):
    """Training loop of a rank in asynchronous training, or with backup workers. `run` is collective over the world."""

    # Ranks synchronize at a stop request or non-finite loss, every checkpoint.every_steps steps of the slowest worker,
    # and at the end. The run counts the steps of the slowest worker. With backup workers, gradients that
    # arrive too late are dropped.
    kind_of_metrics = AsyncRunMetrics
    metrics: AsyncRunMetrics

    def run(self) -> RunOutcome:
        exchange = self.exchange = cast(AsynchronousExchange | BackupExchange, self.trainer.exchange)
        self.metrics.begin(dict(zip(exchange.roles.workers, exchange.clocks, strict=True)))
        self._begins = list(exchange.clocks)
        self._operations = exchange.attended(self.trainer.operations)
        self._failure = ""
        self._last = (0.0, 0)  # loss and number of targets of the last step
        self._seen = exchange.updates
        self._saved_at = self.outcome.first
        self._boundary = time.perf_counter()
        self._counted = self._sent_before = float(self.traffic.sent_bytes)
        self._shared = self.traffic.moved().shared
        # A waiting rank polls these callbacks to call a rendezvous and to move metrics rows: no step has a message
        # that all ranks wait for.
        exchange.meetings.ask(self._wants, self._attend)
        self._plan_checkpoint()
        self.metrics.note_clocks()
        exchange.resume()
        over = exchange.works and self._work()
        while not over:
            over = self._meet()
        self.metrics.note_clocks()
        self._count_what_was_served()
        self.stop_requests.answered()
        self.checkpoint_timer.ended(self.outcome.stop_request is not None)
        return self.outcome

    def _wants(self) -> bool:
        self._tighten()
        return bool(self.stop_requests.current().any())

    def _tighten(self) -> None:
        # On a server, shorten the watchdog's deadline as soon as all workers have made a step. Local.
        if self.exchange.shard is None or self.exchange.works or not self._begins:
            return
        steps = self.trainer.recipe.run.steps
        seen = list(self.exchange.seen.values())
        if any(now > first for now, first in zip(seen, self._begins, strict=True)):
            self.stop_requests.begun()  # there is an update to save
        if all(now > first or first == steps for now, first in zip(seen, self._begins, strict=True)):
            self.stop_requests.begun()
            if self.session.watchdog is not None:
                self.session.watchdog.tighten()
            self._begins = []

    def _attend(self) -> None:
        with self._apart():
            self.metrics.serve()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        # Messages in the ``with`` body do not count as messages of training steps. Local.
        sent, shared = self.traffic.sent_bytes, self.traffic.moved().shared
        yield
        self._counted += self.traffic.sent_bytes - sent
        self._shared += self.traffic.moved().shared - shared
        self._sent_before += self.traffic.sent_bytes - sent

    def _work(self) -> bool:
        trainer, parts = self.trainer, self.trainer.recipe.parallel.microbatches
        first, steps = self.exchange.clock, trainer.recipe.run.steps
        of = trainer.source, trainer.recipe, trainer.data_axis
        # `called` arrives with the reply to a push, so it is checked between steps. The inner loop handles two
        # rendezvous in a row.
        with Prefetcher(*of, first, steps, rule=trainer.sample_order) as batches:
            for step, batch in enumerate(self.instrumentation.awaited(batches), start=first + 1):
                while self.exchange.meetings.called or self._failure:
                    if self._meet():
                        return True
                if step <= self.exchange.clock:
                    continue  # the other workers made this step already
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
            with self.instrumentation.ranges("step", "step"):
                result = trainer.executor.run(self._operations, batches, divisor, step, np.zeros(0), first)
        except NonFiniteError as error:
            # The pushed part of the step must not be applied; the gradients are kept for the inspection.
            with exchange.unpushed():
                where = trainer.executor.inspect(self._operations, batches)
            self._failure = f"worker {trainer.comm.rank}: {error} ({where or 'computed again, it is finite'})"
            exchange.meetings.call()
            return
        if exchange.clock < step:
            return  # all others left for a rendezvous: this step does not count
        if exchange.shard is not None:  # its updates, for others too, are not communication
            result.seconds["update_s"] += exchange.shard.busy_s - busy_s
            result.seconds["communication_s"] -= exchange.shard.busy_s - busy_s
        self.stop_requests.begun()
        self._note(step, result, result.loss * divisor / max(1, samples), samples)

    def _note(self, step: int, result: StepResult, loss: float, samples: int) -> None:
        exchange, outcome = self.exchange, self.outcome
        targets = round(samples * self.trainer.model.tokens_per_sample) if exchange.taken else 0
        self._last = loss, targets
        moved = self.traffic.moved()
        sent, shared = moved.messages - self._counted, moved.shared - self._shared
        self._counted, self._shared = moved.messages, moved.shared
        now = time.perf_counter()
        start, self._boundary = self._boundary, now
        step_s, communication_s = now - start, result.seconds["communication_s"]
        figures = {"communication_s": communication_s, "messages": sent, "shared": shared, "unknown": 0.0}
        outcome.steps.add(step_s, sent, targets=targets, staleness=exchange.staleness, **figures)
        outcome.dropped += not exchange.taken
        outcome.stalest = max(outcome.stalest, exchange.staleness)
        self.checkpoint_timer.stepped(step_s)
        self.instrumentation.stepped(step, start, now)
        self.streaming.stepped(step, result, self.instrumentation.waited_s)
        seconds = {**result.seconds, "step_s": step_s}
        self.metrics.add(step, loss, exchange.learning_rate, targets, seconds, sent)
        if exchange.clock > step:
            self._note_missed()
        self.progress.step(exchange.clock, loss, self._targets_of_all(), communication_s, step_s)

    def _note_missed(self) -> None:
        nothing = dict.fromkeys(PER_RANK, math.nan)
        self.metrics.add(self.exchange.clock, 0.0, self.exchange.learning_rate, 0, nothing, math.nan)

    def _targets_of_all(self) -> int:
        recipe, exchange = self.trainer.recipe, self.exchange
        updates, self._seen = exchange.updates - self._seen, exchange.updates
        return round(updates * exchange.share * recipe.run.global_batch * self.trainer.model.tokens_per_sample)

    def _meet(self) -> bool:
        self.stop_requests.begun()
        self.exchange.meet()
        if self.session.watchdog is not None:
            self.session.watchdog.tighten()
        with self._apart():
            over = self._decide(self._agree())
        if not over:
            self.exchange.resume()
        return over

    def _agree(self) -> StopReason | None:
        exchange, comm = self.exchange, self.trainer.comm
        loss, targets = self._last
        updates = exchange.updates if comm.rank == exchange.roles.servers[0] else 0
        # One sum for all: stop requests; failed, calls sent, updates, loss, targets; and the clock of each worker.
        local = [bool(self._failure), exchange.meetings.calls, updates, loss * targets, targets]
        clocks = np.zeros(len(exchange.roles.workers))
        if exchange.works:
            clocks[exchange.roles.workers.index(comm.rank)] = before = exchange.clock
        values = exchange.agree(np.concatenate([self.stop_requests.current(), local, clocks]))
        stop_requests, sums = values[: len(StopReason)], values[len(StopReason) :].tolist()
        exchange.leave([int(clock) for clock in sums[len(local) :]], updates=int(sums[2]), pause_requests=int(sums[1]))
        if exchange.works and exchange.clock > before:
            self._note_missed()
        self.outcome.done = min(exchange.clocks)
        if sums[0]:
            failures = [failure for failure in comm.allgather_object(self._failure) if failure]
            self.metrics.flush()
            raise NonFiniteError(
                f"non-finite loss or gradient: {'; '.join(failures)}. The gradient was not applied: lower "
                "optimizer.learning_rate, set optimizer.clip_norm, or check the samples of this step"
            )
        if sums[4]:
            self.outcome.loss = sums[3] / sums[4]
        return agreed_reason(stop_requests)

    def _decide(self, stop_request: StopReason | None) -> bool:
        outcome, recipe = self.outcome, self.trainer.recipe
        self._finish_save()  # a background save can only be settled in a rendezvous
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
        self.exchange.plan_rendezvous((self._saved_at // every + 1) * every if every else 0)

    def _count_what_was_served(self) -> None:
        outcome, exchange = self.outcome, self.exchange
        made = self.trainer.comm.allgather_object(outcome.steps.count)
        steps = [count for count in made if count]
        if exchange.shard is not None and steps:
            outcome.served_bytes = (self.traffic.sent_bytes - self._sent_before) / statistics.mean(steps)
