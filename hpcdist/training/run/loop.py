"""Training loop: batch, step, checks, save, and the decision to stop at a step boundary.

Requests of ranks (stop, flush, save, grow) travel with the numbers that every step sums anyway, so all ranks decide
alike after the same step, and no further message is sent.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from hpcdist.checkpoint.directory import VAL_LOSS
from hpcdist.collectives.algorithms.fixed_tree import shards_of
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.start import Session
from hpcdist.errors import NonFiniteError, StorageError
from hpcdist.strategies.core.replica_check import check_parameters, explain_nonfinite
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.chaos import injection
from hpcdist.training.observe import figures
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

    The windows follow from the data and the recipe and are divided among the ranks, so the figure does not depend on
    the number of ranks; with logical shards, which are then the parts, not in a bit.
    """
    trainer.flush()
    computes, source = trainer.context.computes, trainer.source
    parts = trainer.recipe.run.logical_shards or trainer.grid.data
    own = shards_of(parts, trainer.data_axis.size)[trainer.data_axis.rank] if computes else None
    mine = [None] if own is None else list(range(own.start, own.stop))
    most = -(-parts // trainer.data_axis.size)  # parts of a rank: its own number of them, or one more
    batches = [source.validation_batches(trainer.recipe, parts, part) for part in mine]
    rounds = zip(*batches, strict=True)
    placed = ([trainer.place(batch) for batch in together] if computes else [] for together in rounds)
    return trainer.evaluate(placed, most)


ANNOUNCED_S: Final = 5.0  # a validation that takes so long is announced
FORWARD_SHARE: Final = 1 / 3  # of the time of a micro-batch: the backward has two products for each of the forward
SAMPLED_STEPS: Final = 2048  # steps whose figures are kept for medians; of all others only sums


class StepStatistics:
    """Statistics of the steps of one rank: the first step, sums over the others, and a sample of these.

    The first step, which compiles kernels and opens connections, stands by itself. Up to `SAMPLED_STEPS`, the sample
    holds all of the others. Beyond, it is a uniform random sample of them (algorithm R of Vitter, 1985). The generator
    has a fixed seed: ranks that made equally many steps hold the same ones, in the same order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: dict[str, float] = {}
        self.sums: defaultdict[str, float] = defaultdict(float)  # of all but the first
        self.sample: list[tuple[float, float, float]] = []  # seconds, bytes sent, seconds of communication
        self._random = random.Random(0)

    def add(self, step_s: float, sent_bytes: float, **figures: float) -> None:
        """Add a step; ``sent_bytes`` is NaN where the MPI library chose the algorithm."""
        self.count += 1
        figures |= {"step_s": step_s, "sent_bytes": sent_bytes}
        if self.count == 1:
            self.first = figures
            return
        for name, value in figures.items():
            self.sums[name] += value
        step = step_s, sent_bytes, figures.get("communication_s", math.nan)
        if len(self.sample) < SAMPLED_STEPS:
            self.sample.append(step)
        elif (place := self._random.randrange(self.count - 1)) < SAMPLED_STEPS:
            self.sample[place] = step

    def measured(self) -> dict[str, Any]:
        """Return the statistics in the form in which ranks exchange them."""
        return {"count": self.count, "first": self.first, "sums": dict(self.sums), "sample": self.sample}


@dataclass
class RunOutcome:
    """Outcome of a run in this process: steps from ``first`` to ``done``, and the reason of an early end."""

    first: int
    done: int
    stop_request: StopReason | None = None
    loss: float = math.nan
    steps: StepStatistics = field(default_factory=StepStatistics)
    served_bytes: float = math.nan  # sent for each step, by a rank that serves workers that do not meet
    stalest: int = 0  # updates that this rank's gradients missed, at most
    dropped: int = 0  # gradients of this rank, that came too late
    checkpoint: Path | None = None


Protect: TypeAlias = Callable[[int, bool], None]  # `hpcdist.training.elastic.protection.StateProtection.keep`


class GrowthRequested(Exception):  # noqa: N818 - no error: the loop is left, to be entered by more ranks
    """Request for ``ranks`` further ranks, granted: raised on all ranks after the same step."""

    def __init__(self, ranks: int) -> None:
        super().__init__(f"{ranks} more ranks")
        self.ranks = ranks


class TrainingLoop:
    """Training loop of one rank. Every method is collective over the world."""

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
        protect: Protect | None = None,
    ) -> None:
        """Open the files of the run in ``directory``; ``protect`` is that of an elastic job."""
        self.session, self.trainer, self.directory, self.progress = session, trainer, directory, progress
        self.energy = energy
        rank0 = session.comm.rank == 0
        self.protect, self.stop_requests = protect, stop_requests
        self.traffic = OperationTiming(session.comm.events)
        session.comm.events = self.traffic
        self.saver = build_saver(trainer, directory / "checkpoints")
        if trainer.faults is not None:
            chaos, writers = trainer.recipe.chaos, trainer.recipe.checkpoint.writers
            injection.refuse_impossible_faults(chaos, trainer.comm, writers, trainer.exchange)
        self.instrumentation = Instrumentation(trainer, session.spans, energy)
        # Rows of an earlier start after the step from which this one goes on are dropped: it may have been killed.
        resumed = trainer.first_step if (directory / METRICS_FILE).exists() else None
        self.streaming = EventPublisher(session, trainer, self.traffic, directory, progress.say, resumed)
        self.metrics = self.kind_of_metrics(
            session.comm, directory / METRICS_FILE, resumed, attributes, energy, self.streaming
        )
        config, state_bytes = trainer.recipe.checkpoint, trainer.state_bytes()
        saving.stripe_checkpoints(session.comm, self.saver.directory, config, state_bytes, progress.say)
        self.starts = StartRecord(directory) if rank0 else None
        self.checkpoint_timer = CheckpointTimer(
            config, state_bytes, stop_requests.ends, progress.say, starts=self.starts
        )
        if rank0:
            stop_requests.consult(directory / STOP_FILE, self.checkpoint_timer.time_up)
            stop_requests.let_go(partial(self.checkpoint_timer.ended, stopped=True))
        self._held_s, self._save_s = 0.0, 0.0  # seconds that saves held up steps: since the last row, and the last one
        self._began = math.nan  # when the last save began
        self.outcome = RunOutcome(trainer.first_step, trainer.first_step)
        self._boundary = time.perf_counter()
        self.step_log = StepLog(trainer, self.metrics, progress)

    def run(self) -> RunOutcome:
        """Train to the last step of the recipe, or until a rank requests to stop."""
        trainer = self.trainer
        self.begin()
        with trainer.batches(trainer.recipe.run.steps) as batches:
            for step, batch in enumerate(self.instrumentation.awaited(batches), start=trainer.first_step + 1):
                self.step(step, batch)
                if self.outcome.stop_request is not None:
                    break
        return self.end()

    def begin(self) -> None:
        """Start the clock of the first step."""
        self.metrics.note_clocks()
        self._boundary = time.perf_counter()
        self.step_log.shares(self.outcome.done, 0)

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
            outcome.stop_request = None  # the run is complete: the scheduler need not start it again
        self.stop_requests.answered()
        self.checkpoint_timer.ended(outcome.stop_request is not None)
        return outcome

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer = self.trainer
        before, unknown = self.traffic.moved(), self.traffic.unknown_calls
        rate = trainer.learning_rate(step - trainer.executor.loss_scale.skipped)  # of the update that is due
        result = self._train(step, batches)
        moved = self.traffic.moved().since(before)
        bytes_sent = float(moved.messages) if self.traffic.unknown_calls == unknown else math.nan
        self.stop_requests.begun()
        if step == trainer.first_step + 1:
            trainer.comm.barrier()  # a step that is shown is saved by whoever ends the job from then on
        targets = trainer.targets(step)
        # From the end of one step to the end of the next: waiting for data, and what came after the last step (metrics,
        # comparison of replicas, checkpoint), are part of a step, so that the steps of a run add up to its time.
        now = time.perf_counter()
        begun, self._boundary = self._boundary, now
        step_s = now - begun
        seconds = {**result.seconds, "step_s": step_s}
        self.metrics.add(step, result.loss, rate, targets, seconds, bytes_sent)
        self.step_log.stepped(step, result)
        self.instrumentation.stepped(step, begun, now)
        self.streaming.stepped(step, result, self.instrumentation.waited_s)
        outcome = self.outcome
        outcome.done, outcome.loss, outcome.stop_request = step, result.loss, agreed_reason(result.stop_requests)
        own = {"communication_s": result.seconds["communication_s"], **moved._asdict()}
        if trainer.exchange.background is not None:
            exposed_s, total_s = trainer.exchange.background.taken()
            fetched = trainer.exchange.background.fetched()
            own |= {"reductions_s": total_s, "reductions_exposed_s": exposed_s}
            own |= {"hits": fetched.hits, "misses": fetched.misses, "fetches_exposed_s": fetched.exposed_s}
            self.streaming.overlapped(exposed_s, total_s, fetched.hits, fetched.misses)
        outcome.steps.add(step_s, bytes_sent, **own)
        outcome.checkpoint = None
        # Behind the counts of `StopReason` come the numbers of `_train`, in its order: flush (1; 2 with clocks), save,
        # further ranks, and those of the saver. All are sums over the ranks, so every rank takes the same branches,
        # which is what makes the collectives inside of them safe.
        if result.stop_requests[len(StopReason)] > 0:
            self.metrics.flush()
            figures.write_side_tables(self.metrics, trainer)
        if result.stop_requests[len(StopReason)] > 1:
            self.metrics.note_clocks()
        self.checkpoint_timer.stepped(step_s - self._held_s)
        self._held_s = 0.0
        self._settle(result.stop_requests[len(StopReason) + 3 :])
        self._look(step, save=result.stop_requests[len(StopReason) + 1] > 0)
        self._protect(step, result.stop_requests[len(StopReason) + 2])
        self.progress.step(step, result.loss, targets, result.seconds["communication_s"], step_s)
        if trainer.balance is not None and trainer.balance.after(step, result.seconds["compute_s"]):
            self.step_log.shares(step, -1)

    def _train(self, step: int, batches: list[MicroBatch]) -> StepResult:
        trainer = self.trainer
        # Further numbers are summed with the requests to stop: whether all ranks bring their rows to the file (2: and
        # compare their clocks), whether they save, how many ranks shall be added, and the state of a background save.
        flushes = float(self.metrics.due()) * (2.0 if self.metrics.clocks.due() else 1.0)
        due = [flushes, float(trainer.comm.rank == 0 and self.checkpoint_timer.due()), self.stop_requests.ranks()]
        stop_requests = np.concatenate([self.stop_requests.current(), due, self.saver.numbers()])
        try:
            with self.instrumentation.ranges("step", "step"):
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
        """Compare the replicas and save after ``step``, where the ranks agreed on it or the recipe says so.

        Replicas are compared before each save: each writes a part of the state, so a checkpoint of replicas that differ
        would be a mixture of models.
        """
        trainer, run = self.trainer, self.trainer.recipe.run
        every = trainer.recipe.checkpoint.every_steps
        saves = save or (every and step % every == 0)
        if run.sentinel_every_steps and (saves or step % run.sentinel_every_steps == 0):
            check_parameters(trainer.executor, step)
        if saves:
            self._save(step)

    def _protect(self, step: int, ranks: float) -> None:
        """Protect the state of ``step`` in an elastic job. Raises GrowthRequested on all ranks for ``ranks`` more."""
        if self.protect is None:
            return
        steps = self.trainer.recipe.run.steps
        grows = ranks > 0 and step < steps and self.outcome.stop_request is None
        self.protect(step, grows)
        if grows:
            self._finish_save()
            self.metrics.flush()  # all ranks are alive: no row and no joule is lost, as it would be by a failure
            raise GrowthRequested(int(ranks))

    def _save(self, step: int) -> None:
        if step == self.trainer.recipe.run.steps:
            self.trainer.finish()
        validated = self._validated()
        used = self.energy.state()
        self._began = time.perf_counter()
        with self.instrumentation.phase("checkpoint", "save"):
            if self.saver.waits or self.saver.is_busy:  # then the one before becomes complete here
                self.metrics.flush()
            self.outcome.checkpoint = self.saver.save(step, energy=used, **validated)
            figures.write_side_tables(self.metrics, self.trainer)
        self._save_s = time.perf_counter() - self._began
        self._held_s += self._save_s
        self.checkpoint_timer.saved(self._save_s)
        self._note_complete()

    def validation_loss(self) -> float:
        """Return the mean validation loss, announced on the console where it takes long. Collective."""
        if (expected_s := self._validation_s()) >= ANNOUNCED_S:
            self.progress.say(f"computing the validation loss: about {expected_s:.0f} s")
        return mean_validation_loss(self.trainer)

    def _validation_s(self) -> float:
        """Return how long a validation takes by the mean of the steps, 0 where that is not known (local)."""
        recipe, steps, validation = self.trainer.recipe, self.outcome.steps, self.trainer.source.validation
        if validation is None or steps.count < 2:
            return 0.0
        samples = min(recipe.run.validation_samples or validation.count, validation.count)
        microbatches, pipeline = recipe.parallel.microbatches, self.trainer.grid.pipeline
        evaluations = samples * microbatches / recipe.run.global_batch
        # Each of them passes all stages of a pipeline before the next; micro-batches of a step follow one another.
        microbatch_s = steps.sums["step_s"] / (steps.count - 1) / (microbatches + pipeline - 1)
        return evaluations * pipeline * microbatch_s * FORWARD_SHARE

    def _validated(self) -> dict[str, float | None]:
        """Return the validation loss for a checkpoint, where the best checkpoints are kept."""
        if not self.trainer.recipe.checkpoint.keep_best:
            return {}
        with self.instrumentation.phase("validation", "validation"):
            loss = self.validation_loss()
        self.streaming.evaluated(self.outcome.done, loss)
        return {VAL_LOSS: None if math.isnan(loss) else loss}

    def _note_complete(self) -> None:
        """Record how long the last save took, once it is complete (local)."""
        if not self.saver.is_busy and not math.isnan(self._began):
            self.checkpoint_timer.completed(time.perf_counter() - self._began)
            self._began = math.nan
            self.streaming.saved(self.outcome.done, self._save_s)

    def _settle(self, sums: np.ndarray) -> None:
        """Continue the checkpoint that is written beside the steps, once all ranks have written their parts."""
        if self.saver.goes_on(sums):
            self.metrics.flush()  # a run that goes on from it has the rows up to it
            with self.instrumentation.phase("checkpoint", "settle"):
                self.saver.settle(sums)
            self._note_complete()

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is written beside the steps."""
        if self.saver.is_busy:
            self.metrics.flush()
            with self.instrumentation.phase("checkpoint", "finish"):
                self.saver.finish()
            self._note_complete()
