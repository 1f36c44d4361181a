"""The training loop: batch, step, look, save; and the decision to stop, taken together at a step boundary."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpcdist.comm.recording import Traffic
from hpcdist.comm.start import Session
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.nonfinite import explain
from hpcdist.strategies.schedule.executor import MicroBatch, Step
from hpcdist.strategies.sentinel import check_replicas
from hpcdist.training.data import Prefetcher, microbatches
from hpcdist.training.metrics import Metrics
from hpcdist.training.progress import Progress
from hpcdist.training.survival import STOP_FILE, StopWishes, Wish, agreed
from hpcdist.training.trainer import Trainer


@dataclass
class Outcome:
    """What a run did in this process: steps from ``first`` to ``done``, and why it ended early, if it did."""

    first: int
    done: int
    wish: Wish | None = None
    loss: float = float("nan")
    step_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)  # NaN where the MPI library chose the algorithm
    checkpoint: Path | None = None


class Loop:
    """The run of one rank. Every method is collective over the world."""

    def __init__(
        self,
        session: Session,
        trainer: Trainer,
        directory: Path,
        progress: Progress,
        attributes: Mapping[str, float | str],
    ) -> None:
        self.session, self.trainer, self.directory, self.progress = session, trainer, directory, progress
        rank0 = session.comm.rank == 0
        self.wishes = StopWishes(directory / STOP_FILE if rank0 else None)
        self.traffic = Traffic(session.comm.events)
        session.comm.events = self.traffic
        self.metrics = Metrics(session.comm, directory / "metrics.h5", trainer.first_step or None, attributes)
        self.outcome = Outcome(trainer.first_step, trainer.first_step)

    def run(self) -> Outcome:
        """Train to the last step of the recipe, or until somebody wishes to stop."""
        trainer, outcome = self.trainer, self.outcome
        steps = trainer.recipe.run.steps
        self.wishes.listen()
        with Prefetcher(trainer.source, trainer.recipe, trainer.data_axis, trainer.first_step, steps) as batches:
            for step, batch in enumerate(batches, start=trainer.first_step + 1):
                self._step(step, microbatches(trainer.place(batch), trainer.recipe.parallel.microbatches))
                if step == trainer.first_step + 1 and self.session.watchdog is not None:
                    self.session.watchdog.tighten()  # kernels are compiled and connections open: no grace any more
                if outcome.wish is not None:
                    break
        self.metrics.flush()
        if outcome.checkpoint is None:
            self._save(outcome.done)
        return outcome

    def _step(self, step: int, batches: list[MicroBatch]) -> None:
        trainer = self.trainer
        before = time.perf_counter()
        sent, unknown = self.traffic.sent_bytes, self.traffic.unknown.total()
        found = self._train(step, batches)
        elapsed = time.perf_counter() - before
        bytes_sent = float(self.traffic.sent_bytes - sent) if self.traffic.unknown.total() == unknown else float("nan")
        targets = trainer.recipe.run.global_batch * trainer.model.tokens_per_sample
        self.metrics.add(step, found.loss, trainer.optimizer.learning_rate, targets, found.seconds, bytes_sent)
        outcome = self.outcome
        outcome.done, outcome.loss, outcome.wish = step, found.loss, agreed(found.wishes)
        outcome.step_s.append(elapsed)
        outcome.communication_s.append(found.seconds["communication_s"])
        outcome.sent_bytes.append(bytes_sent)
        outcome.checkpoint = None
        if found.wishes[len(Wish)] > 0:
            self.metrics.flush()
        self.progress.step(step, found.loss, targets, found.seconds["communication_s"] / elapsed)
        self._look(step)

    def _train(self, step: int, batches: list[MicroBatch]) -> Step:
        trainer = self.trainer
        # One more number decides with the others when all ranks bring their rows to the file.
        wishes = np.append(self.wishes.current(), float(self.metrics.due()))
        try:
            return trainer.executor.run(trainer.operations, batches, trainer.recipe.run.global_batch, step, wishes)
        except NonFiniteError as error:
            self.metrics.flush()
            raise explain(
                trainer.comm, trainer.executor, trainer.parameters, trainer.gradients, batches, error
            ) from None

    def _look(self, step: int) -> None:
        """Do what is due after ``step``: compare the replicas, save."""
        trainer, run = self.trainer, self.trainer.recipe.run
        if run.sentinel_every_steps and step % run.sentinel_every_steps == 0 and trainer.exchange.replicas_identical:
            check_replicas(trainer.data_axis, trainer.parameters, step, trainer.exchange.agree_algorithm)
        every = trainer.recipe.checkpoint.every_steps
        if every and step % every == 0:
            self._save(step)

    def _save(self, step: int) -> None:
        self.metrics.flush()
        self.outcome.checkpoint = self.trainer.save(self.directory / "checkpoints", step)
