"""Training loop: batch, step, checks, save, and the decision to stop at a step boundary.

What ranks wish for (stop, flush, save, grow) travels with the numbers that every step sums anyway, so all decide
alike after the same step and no further message is sent.

`RunOutcome` and `StepStatistics` hold the results in memory that does not grow with the steps: the first step, sums
over the others, and a uniform random sample of them (algorithm R of Vitter, 1985).
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from hpcdist.checkpoint.directory import VAL_LOSS
from hpcdist.collectives.algorithms.fixed_tree import shards_of
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.start import Session
from hpcdist.errors import NonFiniteError, StorageError
from hpcdist.strategies.core.replica_check import check_replicas, check_tensor_axis, explain_nonfinite
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.chaos import injection
from hpcdist.training.observe import figures, noise_scale
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.event_publisher import EventPublisher
from hpcdist.training.observe.instrumentation import ConsoleProgress, Instrumentation, StepLog
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.run import saving
from hpcdist.training.run.saving import build_saver
from hpcdist.training.run.start_record import StartRecord
from hpcdist.training.run.stop_requests import STOP_FILE, CheckpointTimer, StopReason, StopRequests, agreed_reason


def mean_validation_loss(trainer: Trainer) -> float:
    """Return the mean loss in nats over the validation windows; NaN where there are none. Collective.

    The windows are fixed by the data and the recipe and shared among the ranks, so the figure does not depend on the
    number of ranks; with logical shards, which are then shared out, not in a bit.
    """
    trainer.flush()
    computes, source = trainer.seat.computes, trainer.source
    parts = trainer.recipe.run.logical_shards or trainer.grid.data
    own = shards_of(parts, trainer.data_axis.size)[trainer.data_axis.rank] if computes else None
    speaks = trainer.last_stage and trainer.seat.tensor.rank == 0
    mine = [None] if own is None else list(range(own.start, own.stop))
    rounds = -(-parts // trainer.data_axis.size)  # the parts of a rank, or one more
    batches = [source.validation_batches(trainer.recipe, parts, part) for part in mine]
    total, count = 0.0, 0.0
    for together in zip(*batches, strict=True):
        placed = [trainer.place(batch) for batch in together] if computes else []
        losses = [trainer.executor.evaluate(*batch) for batch in placed]
        for inputs, targets in placed[: rounds - len(placed)]:  # layers may be gathered: all ranks come equally often
            trainer.executor.evaluate(inputs[:0], targets[:0])
        samples = sum(len(targets) for _, targets in placed)
        seen = samples * trainer.model.tokens_per_sample if speaks else 0
        # Batch by batch, since the deadline of a communication runs for servers that wait for the others.
        loss, found = trainer.exchange.agree_losses(losses, np.array([float(seen)]))
        total, count = total + loss, count + float(found[0])
    return total / count if count else float("nan")


SAMPLED_STEPS: Final = 2048  # steps of which the figures stay, for medians; of all others the sums


class StepStatistics:
    """The figures of the steps of one rank: of the first step, sums over the others, and a sample of these.

    The first step, which compiles kernels and opens connections, stands by itself. Up to `SAMPLED` steps, the sample
    holds all of the others. Beyond, it is a uniform random sample of them (algorithm R of Vitter, 1985). The generator
    has a fixed seed: ranks that made equally many steps hold the same ones, in the same order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: dict[str, float] = {}
        self.sums: defaultdict[str, float] = defaultdict(float)  # of all but the first
        self.sample: list[tuple[float, float]] = []  # seconds and bytes sent
        self._random = random.Random(0)

    def add(self, step_s: float, sent_bytes: float, **figures: float) -> None:
        """Take a step; ``sent_bytes`` is NaN where the MPI library chose the algorithm."""
        self.count += 1
        figures |= {"step_s": step_s, "sent_bytes": sent_bytes}
        if self.count == 1:
            self.first = figures
            return
        for name, value in figures.items():
            self.sums[name] += value
        if len(self.sample) < SAMPLED_STEPS:
            self.sample.append((step_s, sent_bytes))
        elif (place := self._random.randrange(self.count - 1)) < SAMPLED_STEPS:
            self.sample[place] = step_s, sent_bytes

    def measured(self) -> dict[str, Any]:
        """Return what the ranks tell each other of their steps."""
        return {"count": self.count, "first": self.first, "sums": dict(self.sums), "sample": self.sample}


@dataclass
class RunOutcome:
    """Outcome of a run in this process: steps from ``first`` to ``done``, and why it ended early, if it did."""

    first: int
    done: int
    stop_request: StopReason | None = None
    loss: float = math.nan
    steps: StepStatistics = field(default_factory=StepStatistics)
    served_bytes: float = math.nan  # sent for each step, by a rank that serves workers that do not meet
    stalest: int = 0  # updates that this rank's gradients missed, at most
    dropped: int = 0  # gradients of this rank, that came too late
    checkpoint: Path | None = None


class StateKeeper(Protocol):
    """Protection of the state from the death of a rank: `hpcdist.training.elastic.protection.StateProtection`."""

    def keep(self, step: int, *, now: bool = False) -> None:
        """Take note that ``step`` is done. Collective."""
        ...


class GrowthRequested(Exception):  # noqa: N818 - no error: the loop is left, to be entered by more ranks
    """So many further ranks shall train from here on: raised on all ranks, after the same step."""

    def __init__(self, ranks: int) -> None:
        super().__init__(f"{ranks} more ranks")
        self.ranks = ranks


class TrainingLoop:
    """The run of one rank. Every method is collective over the world."""

    kind_of_metrics: ClassVar[type[RunMetrics]] = RunMetrics

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        directory: Path,
        progress: ConsoleProgress,
        attributes: Mapping[str, float | str],
        stop_requests: StopRequests,
        energy: EnergyRecorder,
    ) -> None:
        self.session, self.trainer, self.directory, self.progress = session, trainer, directory, progress
        self.energy = energy
        rank0 = session.comm.rank == 0
        self.stop_requests = stop_requests
        self.stop_requests.stop_file = directory / STOP_FILE if rank0 else None
        self.traffic = OperationTiming(session.comm.events)
        session.comm.events = self.traffic
        self.saver = build_saver(trainer, directory / "checkpoints")
        injection.arm_faults(trainer, self.saver, directory)
        self.onlookers = Instrumentation(
            trainer, session.spans, energy
        )  # what it lacks is told before there are any files
        resumed = _resumed_step(directory, trainer.first_step)
        self.streaming = EventPublisher(session, trainer, self.traffic, directory, progress.say, resumed)
        self.metrics = self.kind_of_metrics(
            session.comm, directory / METRICS_FILE, resumed, attributes, energy, self.streaming
        )
        config, state_bytes = trainer.recipe.checkpoint, trainer.state_bytes()
        saving.stripe_checkpoints(session.comm, self.saver.directory, config, state_bytes, progress.say)
        self.starts = StartRecord(directory) if rank0 else None
        self.pace = CheckpointTimer(config, state_bytes, stop_requests.ends, progress.say, starts=self.starts)
        if rank0:
            self.stop_requests.time_up = self.pace.time_up
            self.stop_requests.let_go(partial(self.pace.ended, stopped=True))
        self._held_s, self._save_s = 0.0, 0.0  # by saves since the last row, and by the last one
        self._began = math.nan  # when the last save began
        self.outcome = RunOutcome(trainer.first_step, trainer.first_step)
        self._boundary = time.perf_counter()
        self.notes = StepLog(trainer, self.metrics, progress)
        self.protection: StateKeeper | None = None  # where the job outlives its ranks

    def run(self) -> RunOutcome:
        """Train to the last step of the recipe, or until somebody wishes to stop."""
        trainer = self.trainer
        self.begin()
        with trainer.batches(trainer.recipe.run.steps) as batches:
            for step, batch in enumerate(self.onlookers.awaited(batches), start=trainer.first_step + 1):
                self.step(step, batch)
                if self.outcome.stop_request is not None:
                    break
        return self.end()

    def begin(self) -> None:
        """Begin with the steps."""
        self.metrics.note_clocks()
        self._boundary = time.perf_counter()
        self.notes.shares(self.outcome.done, 0)

    def step(self, step: int, batch: MicroBatch) -> None:
        """Make ``step``, counted from 1, on this rank's share of its batch."""
        trainer = self.trainer
        self._step(step, trainer.cut(trainer.place(batch)))
        if step == trainer.first_step + 1 and self.session.watchdog is not None:
            self.session.watchdog.tighten()  # kernels are compiled and connections open: no grace any more

    def end(self) -> RunOutcome:
        """Save what is not saved yet, and bring the rows of all ranks to the file."""
        self.stop_requests.begun()
        outcome = self.outcome
        self.metrics.flush()
        self.metrics.note_clocks()
        if outcome.checkpoint is None:
            self._look(outcome.done, save=True)
        self._finish_save()
        if outcome.done == self.trainer.recipe.run.steps:
            outcome.stop_request = None  # the run is complete: nobody needs to start it again
        self.stop_requests.answered()
        self.pace.ended(outcome.stop_request is not None)
        return outcome

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer = self.trainer
        before, unknown = self.traffic.moved(), self.traffic.unknown_calls
        rate = trainer.learning_rate(step - trainer.executor.loss_scale.skipped)  # of the update that is due
        found = self._train(step, batches)
        moved = self.traffic.moved().since(before)
        bytes_sent = float(moved.messages) if self.traffic.unknown_calls == unknown else math.nan
        targets = trainer.samples(step) * trainer.model.tokens_per_sample
        # From row to row: waiting for data is part of a step, and what came after the one before it (metrics, sentinel,
        # checkpoint) too, so that the steps of a run add up to its time.
        now = time.perf_counter()
        begun, self._boundary = self._boundary, now
        step_s = now - begun
        seconds = {**found.seconds, "step_s": step_s}
        self.metrics.add(step, found.loss, rate, targets, seconds, bytes_sent)
        self.notes.stepped(step, found)
        self.onlookers.stepped(step, begun, now)
        self.streaming.stepped(step, found, self.onlookers.waited_s)
        if trainer.noise is not None:
            trainer.noise.after(step, found)
        self.stop_requests.begun()
        outcome = self.outcome
        outcome.done, outcome.loss, outcome.stop_request = step, found.loss, agreed_reason(found.stop_requests)
        figures = {"communication_s": found.seconds["communication_s"], **moved._asdict()}
        if trainer.exchange.overlap is not None:
            exposed_s, total_s = trainer.exchange.overlap.taken()
            fetched = trainer.exchange.overlap.fetched()
            figures |= {"reductions_s": total_s, "reductions_exposed_s": exposed_s}
            figures |= {"hits": fetched.hits, "misses": fetched.misses, "fetches_exposed_s": fetched.exposed_s}
            self.streaming.overlapped(exposed_s, total_s, fetched.hits, fetched.misses)
        outcome.steps.add(step_s, bytes_sent, **figures)
        outcome.checkpoint = None
        if found.stop_requests[len(StopReason)] > 0:
            self.metrics.flush()
            self._note_measured()
        if found.stop_requests[len(StopReason)] > 1:
            self.metrics.note_clocks()
        self.pace.stepped(step_s - self._held_s)
        self._held_s = 0.0
        self._settle(found.stop_requests[len(StopReason) + 3 :])
        self._look(step, save=found.stop_requests[len(StopReason) + 1] > 0)
        self._protect(step, found.stop_requests[len(StopReason) + 2])
        self.progress.step(step, found.loss, targets, found.seconds["communication_s"] / step_s)
        if trainer.balance is not None and trainer.balance.after(step, found.seconds["compute_s"]):
            self.notes.shares(step, -1)

    def _train(self, step: int, batches: list[MicroBatch]) -> StepResult:
        trainer = self.trainer
        # Further numbers decide with the others when all ranks bring their rows to the file (2: and compare their
        # clocks), and when they save.
        flushes = float(self.metrics.due()) * (2.0 if self.metrics.clocks.due() else 1.0)
        due = [flushes, float(trainer.comm.rank == 0 and self.pace.due()), self.stop_requests.ranks()]
        stop_requests = np.concatenate([self.stop_requests.current(), due, self.saver.numbers()])
        try:
            with self.onlookers.ranges("step", "step"):
                return trainer.step(step, batches, stop_requests)
        except NonFiniteError as error:
            explained = explain_nonfinite(trainer.comm, trainer.executor, trainer.operations, batches, error)
            self.metrics.flush()
            try:
                self._finish_save()
            except StorageError as failure:
                self.progress.say(str(failure))
            raise explained from None

    def _look(self, step: int, save: bool) -> None:
        """Do what is due after ``step``: compare the replicas, save where all agreed on it or the recipe says so.

        What is saved has been compared: each replica brings a part, and a resume would make one model of what differs.
        """
        trainer, run = self.trainer, self.trainer.recipe.run
        every = trainer.recipe.checkpoint.every_steps
        saves = save or (every and step % every == 0)
        if run.sentinel_every_steps and (saves or step % run.sentinel_every_steps == 0):
            for store in (trainer.exchange.parameters, trainer.executor.copies.parameters):
                if store.size and trainer.exchange.replicas_identical:
                    check_replicas(trainer.data_axis, store, step, trainer.seat.agree_algorithm)
                if store.size and trainer.seat.tensor.size > 1:
                    check_tensor_axis(trainer.seat.tensor, store, step, trainer.seat.agree_algorithm)
        if saves:
            self._save(step)

    def _protect(self, step: int, ranks: float) -> None:
        """Keep what outlives a rank, where the job does; let ``ranks`` more come in, where somebody wished it.

        Raises Growth then, on all ranks.
        """
        if self.protection is None:
            return
        steps = self.trainer.recipe.run.steps
        grows = ranks > 0 and step < steps and self.outcome.stop_request is None
        self.protection.keep(step, now=grows)
        if grows:
            self._finish_save()
            self.metrics.flush()  # all are there: what was used since the last one is not lost as by a death
            raise GrowthRequested(int(ranks))

    def _save(self, step: int) -> None:
        if step == self.trainer.recipe.run.steps:
            self.trainer.finish()
        kept = self._validated()
        used = self.energy.state()
        self._began = time.perf_counter()
        with self.onlookers.phase("checkpoint", "save"):
            if self.saver.waits or self.saver.is_busy:  # then the one before becomes complete here
                self.metrics.flush()
            self.outcome.checkpoint = self.saver.save(step, energy=used, **kept)
            self._note_measured()
        held_s = time.perf_counter() - self._began
        self._held_s += held_s
        self._save_s = held_s
        self.pace.saved(held_s)
        self._note_complete()

    def _note_measured(self) -> None:
        """Write what was measured in some steps alone, which waits in memory until then."""
        figures.write_consensus(self.metrics, self.trainer)
        noise_scale.write_noise_scales(self.metrics.include, self.trainer.noise)

    def _validated(self) -> dict[str, float | None]:
        """Return what a checkpoint keeps of how good it is, where the best of them stay."""
        if not self.trainer.recipe.checkpoint.keep_best:
            return {}
        with self.onlookers.phase("validation", "validation"):
            loss = mean_validation_loss(self.trainer)
        self.streaming.evaluated(self.outcome.done, loss)
        return {VAL_LOSS: None if math.isnan(loss) else loss}

    def _note_complete(self) -> None:
        """Take note of how long the last save took until it was complete, if it is (local)."""
        if not self.saver.is_busy and not math.isnan(self._began):
            self.pace.completed(time.perf_counter() - self._began)
            self._began = math.nan
            self.streaming.saved(self.outcome.done, self._save_s)

    def _settle(self, sums: np.ndarray) -> None:
        """Go on with the checkpoint that is written beside the steps, where all ranks have come so far."""
        if self.saver.goes_on(sums):
            self.metrics.flush()  # a run that goes on from it has the rows up to it
            with self.onlookers.phase("checkpoint", "settle"):
                self.saver.settle(sums)
            self._note_complete()

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is written beside the steps."""
        if self.saver.is_busy:
            self.metrics.flush()
            with self.onlookers.phase("checkpoint", "finish"):
                self.saver.finish()
            self._note_complete()


def _resumed_step(directory: Path, first_step: int) -> int | None:
    """Return the step after which rows of an earlier start are dropped; None where there was none.

    A run that was killed before its first checkpoint starts again at step 0, over the rows it has left.
    """
    return first_step if (directory / METRICS_FILE).exists() else None
