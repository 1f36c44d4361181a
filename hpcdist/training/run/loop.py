"""Training loop: batch, step, checks, save, and the decision to stop at the end of a step.

The ranks agree on what to do after a step by their `StepRequests`, which the step sums over the ranks.
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
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.comm.record.timing import OperationTiming
from hpcdist.comm.start import Session
from hpcdist.constants import METRICS_FILE, STOP_FILE
from hpcdist.errors import NonFiniteError, StorageError
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.replica_check import check_parameters, explain_nonfinite
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.training.build import fault_injection
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe import figures
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.event_publisher import EventPublisher
from hpcdist.training.observe.instrumentation import ConsoleProgress, Instrumentation, StepLog
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.run import saving
from hpcdist.training.run.saving import CheckpointTimer, build_saver
from hpcdist.training.run.stop_requests import StepRequests, StopReason, StopRequests, agreed_reason


def mean_validation_loss(trainer: Trainer) -> float:
    """Return the mean validation loss of the model of ``trainer``, or NaN without validation samples. Collective."""
    # The samples do not depend on the number of ranks, so the loss differs only by rounding.
    trainer.flush()
    computes, source = trainer.context.computes, trainer.source
    parts = trainer.recipe.run.logical_shards or trainer.grid.data
    local_parts = shards_of(parts, trainer.data_axis.size)[trainer.data_axis.rank] if computes else None
    mine = [None] if local_parts is None else list(range(local_parts.start, local_parts.stop))
    most = -(-parts // trainer.data_axis.size)  # maximum number of parts of a rank
    batches = [source.validation_batches(trainer.recipe, parts, part) for part in mine]
    rounds = zip(*batches, strict=True)
    placed = ([trainer.place(batch) for batch in together] if computes else [] for together in rounds)
    return trainer.evaluate(placed, most)


ANNOUNCED_S: Final = 5.0  # a longer validation is announced
FORWARD_SHARE: Final = 1 / 3  # share of a micro-batch's time: the backward pass has two products per forward product
SAMPLED_STEPS: Final = 2048  # maximum number of steps to keep for medians


class StepStatistics:
    """Statistics of one rank's steps: the first step, sums over the later steps, and a random sample of later steps."""

    # The first step compiles kernels and opens connections. The sample of `SAMPLED_STEPS` steps is drawn by algorithm R
    # of Vitter (1985). The fixed seed makes ranks with equally many steps choose the same steps.
    def __init__(self) -> None:
        self.count = 0
        self.first: dict[str, float] = {}
        self.sums: defaultdict[str, float] = defaultdict(float)  # over the later steps
        self.sample: list[tuple[float, float, float]] = []  # seconds, bytes sent, seconds of communication
        self._random = random.Random(0)

    def add(self, step_s: float, sent_bytes: float, **figures: float) -> None:
        """Add a step of ``step_s`` seconds, in which this rank sent ``sent_bytes`` bytes.

        ``sent_bytes`` is NaN if MPI hides the traffic. ``**figures``: further measurements of the step, by name.
        """
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
        """Return the statistics as a picklable dict, to send to another rank."""
        return {"count": self.count, "first": self.first, "sums": dict(self.sums), "sample": self.sample}


@dataclass
class RunOutcome:
    """Result of a run on this rank: results of steps ``first + 1`` to ``done``, and the reason of an early end."""

    first: int
    done: int
    stop_request: StopReason | None = None
    loss: float = math.nan
    steps: StepStatistics = field(default_factory=StepStatistics)
    served_bytes: float = math.nan  # bytes per step sent by an asynchronous parameter server
    stalest: int = 0  # maximum number of updates that a gradient of this rank missed
    dropped: int = 0  # gradients of this rank that came too late
    checkpoint: Path | None = None


Protect: TypeAlias = Callable[[int, bool], None]  # `hpcdist.training.run.protection.StateProtection.keep`


class GrowthRequested(Exception):  # noqa: N818 - not an error: the loop starts again with more ranks
    """Raised on all ranks after the same step to end the loop, because ``ranks`` new ranks will join the run."""

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
        """Open the files of the run in ``directory``. Collective.

        ``attributes``: values to store in the metrics file. ``protect``: function that copies the state to other ranks,
        called after each step, or None.
        """
        self.session, self.trainer, self.directory, self.progress = session, trainer, directory, progress
        self.energy = energy
        rank0 = session.comm.rank == 0
        self.protect, self.stop_requests = protect, stop_requests
        self.traffic = OperationTiming(session.comm.events)
        session.comm.events = self.traffic
        self.saver = build_saver(trainer, directory / "checkpoints")
        if trainer.faults is not None:
            chaos, writers = trainer.recipe.chaos, trainer.recipe.checkpoint.writers
            fault_injection.refuse_impossible_faults(chaos, trainer.comm, writers, trainer.exchange)
        self.instrumentation = Instrumentation(trainer, session.spans, energy)
        # Rows after the step of the checkpoint are dropped: a killed start wrote them, and the steps are repeated.
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
            stop_requests.call_before_exit(partial(self.checkpoint_timer.ended, stopped=True))
        self._held_s = 0.0  # seconds that saves delayed steps since the last step
        self._save_s = 0.0  # seconds that the last save delayed steps
        self._began = math.nan  # time at which the last save began
        self.outcome = RunOutcome(trainer.first_step, trainer.first_step)
        self._boundary = time.perf_counter()
        self.step_log = StepLog(trainer, self.metrics, progress)

    def run(self) -> RunOutcome:
        """Train until the last step of the recipe, or until a rank requests a stop. Return a `RunOutcome`."""
        trainer = self.trainer
        self.begin()
        with trainer.batches(trainer.recipe.run.steps) as batches:
            for step, batch in enumerate(self.instrumentation.awaited(batches), start=trainer.first_step + 1):
                self.step(step, batch)
                if self.outcome.stop_request is not None:
                    break
        return self.end()

    def begin(self) -> None:
        """Start the timer of the first step, and write the clock offsets between hosts to the metrics file."""
        self.metrics.note_clocks()
        self._boundary = time.perf_counter()
        self.step_log.shares(self.outcome.done, only_last=False)

    def step(self, step: int, batch: MicroBatch) -> None:
        """Run training step number ``step`` (from 1). ``batch``: this replica's samples of the step."""
        trainer = self.trainer
        self._step(step, trainer.cut(trainer.place(batch)))
        if step == trainer.first_step + 1 and self.session.watchdog is not None:
            self.session.watchdog.tighten()  # kernels are compiled, and connections are open

    def end(self) -> RunOutcome:
        """Save a checkpoint unless the last step has been saved. Write all ranks' metrics. Return a `RunOutcome`."""
        self.stop_requests.begun()
        outcome = self.outcome
        self.metrics.flush()
        self.metrics.note_clocks()
        if outcome.checkpoint is None:
            self._look(outcome.done, save=True)
        self._finish_save()
        if outcome.done == self.trainer.recipe.run.steps:
            outcome.stop_request = None  # the run is complete, so the job is not restarted
        self.stop_requests.answered()
        self.checkpoint_timer.ended(outcome.stop_request is not None)
        return outcome

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer = self.trainer
        before, unknown = self.traffic.moved(), self.traffic.unknown_calls
        rate = trainer.learning_rate(step - trainer.executor.loss_scale.skipped)  # of the next update
        result = self._train(step, batches)
        moved = self.traffic.moved().since(before)
        bytes_sent = float(moved.messages) if self.traffic.unknown_calls == unknown else math.nan
        self.stop_requests.begun()
        if step == trainer.first_step + 1:
            trainer.comm.barrier()  # after a step has been shown, a signal on any rank saves it
        targets = trainer.targets(step)
        # A step lasts from the end of the previous step to its own end. It includes waiting for data, metrics, the
        # comparison of replicas and checkpoints, so the steps of a run add up to its time.
        now = time.perf_counter()
        begun, self._boundary = self._boundary, now
        step_s = now - begun
        seconds = {**result.seconds, "step_s": step_s}
        self.metrics.add(step, result.loss, rate, targets, seconds, bytes_sent)
        self.step_log.stepped(step, result)
        self.instrumentation.stepped(step, begun, now)
        self.streaming.stepped(step, result, self.instrumentation.waited_s)
        outcome = self.outcome
        requests = StepRequests.of(result.stop_requests)
        outcome.done, outcome.loss, outcome.stop_request = step, result.loss, agreed_reason(requests.stops)
        step_figures = {"communication_s": result.seconds["communication_s"], **moved._asdict()}
        if trainer.exchange.background is not None:
            exposed_s, total_s = trainer.exchange.background.taken()
            fetched = trainer.exchange.background.fetched()
            step_figures |= {"reductions_s": total_s, "reductions_exposed_s": exposed_s}
            step_figures |= {"hits": fetched.hits, "misses": fetched.misses, "fetches_exposed_s": fetched.exposed_s}
            self.streaming.overlapped(exposed_s, total_s, fetched.hits, fetched.misses)
        outcome.steps.add(step_s, bytes_sent, **step_figures)
        outcome.checkpoint = None
        # The requests are sums over the ranks. So every rank takes the same branches, which contain collectives.
        if requests.flush > 0:
            self.metrics.flush()
            figures.write_side_tables(self.metrics, trainer)
        if requests.flush > 1:
            self.metrics.note_clocks()
        self.checkpoint_timer.stepped(step_s - self._held_s)
        self._held_s = 0.0
        self._settle(requests.saver)
        self._look(step, save=requests.save > 0)
        self._protect(step, requests.ranks)
        self.progress.step(step, result.loss, targets, result.seconds["communication_s"], step_s)
        if trainer.balance is not None and trainer.balance.after(step, result.seconds["compute_s"]):
            self.step_log.shares(step, only_last=True)

    def _train(self, step: int, batches: list[MicroBatch]) -> StepResult:
        trainer = self.trainer
        requests = StepRequests(
            stops=self.stop_requests.current(),
            flush=float(self.metrics.due()) * (2.0 if self.metrics.clocks.due() else 1.0),
            save=float(trainer.comm.rank == 0 and self.checkpoint_timer.due()),
            ranks=self.stop_requests.ranks(),
            saver=self.saver.numbers(),
        )
        try:
            with self.instrumentation.ranges("step", "step"):
                return trainer.step(step, batches, requests.array())
        except NonFiniteError as error:
            explained = explain_nonfinite(trainer.comm, trainer.executor, trainer.operations, batches, error)
            self.metrics.flush()
            try:
                self._finish_save()
            except StorageError as failure:
                self.progress.say(str(failure))
            raise explained from None

    def _look(self, step: int, save: bool) -> None:
        # Each replica writes a part of the state: a checkpoint of different replicas would mix models.
        trainer, run = self.trainer, self.trainer.recipe.run
        config = trainer.recipe.checkpoint
        saves = save or any(every and step % every == 0 for every in (config.every_steps, config.export_every_steps))
        if run.sentinel_every_steps and (saves or step % run.sentinel_every_steps == 0):
            check_parameters(trainer.executor, step)
        if saves:
            self._save(step)

    def _protect(self, step: int, ranks: float) -> None:
        if self.protect is None:
            return
        steps = self.trainer.recipe.run.steps
        grows = ranks > 0 and step < steps and self.outcome.stop_request is None
        self.protect(step, grows)
        if grows:
            self._finish_save()
            self.metrics.flush()  # all ranks are alive, so no metrics are lost
            raise GrowthRequested(int(ranks))

    def _save(self, step: int) -> None:
        if step == self.trainer.recipe.run.steps:
            self.trainer.finish()
        validated = self._validated()
        used = self.energy.state()
        self._began = time.perf_counter()
        with self.instrumentation.phase("checkpoint", "save"):
            if self.saver.waits or self.saver.is_busy:  # this call completes the checkpoint in flight
                self.metrics.flush()
            self.outcome.checkpoint = self.saver.save(step, energy=used, **validated)
            figures.write_side_tables(self.metrics, self.trainer)
        self._save_s = time.perf_counter() - self._began
        self._held_s += self._save_s
        self.checkpoint_timer.saved(self._save_s)
        self._note_complete()

    def validation_loss(self) -> float:
        """Return the mean validation loss. Print a message before a long validation. Collective."""
        if (expected_s := self._validation_s()) >= ANNOUNCED_S:
            self.progress.say(f"computing the validation loss: about {expected_s:.0f} s")
        return mean_validation_loss(self.trainer)

    def _validation_s(self) -> float:
        recipe, steps, validation = self.trainer.recipe, self.outcome.steps, self.trainer.source.validation
        if validation is None or steps.count < 2:
            return 0.0
        samples = min(recipe.run.validation_samples or validation.count, validation.count)
        microbatches, pipeline = recipe.parallel.microbatches, self.trainer.grid.pipeline
        evaluations = samples * microbatches / recipe.run.global_batch
        # An evaluation passes all pipeline stages before the next one starts; the micro-batches of a step overlap.
        microbatch_s = steps.sums["step_s"] / (steps.count - 1) / (microbatches + pipeline - 1)
        return evaluations * pipeline * microbatch_s * FORWARD_SHARE

    def _validated(self) -> dict[str, float | None]:
        if not self.trainer.recipe.checkpoint.keep_best:
            return {}
        with self.instrumentation.phase("validation", "validation"):
            loss = self.validation_loss()
        self.streaming.evaluated(self.outcome.done, loss)
        return {VAL_LOSS: None if math.isnan(loss) else loss}

    def _note_complete(self) -> None:
        if not self.saver.is_busy and not math.isnan(self._began):
            self.checkpoint_timer.completed(time.perf_counter() - self._began)
            self._began = math.nan
            self.streaming.saved(self.outcome.done, self._save_s)

    def _settle(self, sums: np.ndarray) -> None:
        if self.saver.goes_on(sums):
            self.metrics.flush()  # so that a resumed run has all rows up to this checkpoint
            with self.instrumentation.phase("checkpoint", "settle"):
                self.saver.settle(sums)
            self._note_complete()

    def _finish_save(self) -> None:
        if self.saver.is_busy:
            self.metrics.flush()
            with self.instrumentation.phase("checkpoint", "finish"):
                self.saver.finish()
            self._note_complete()
