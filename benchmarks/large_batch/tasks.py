"""Tasks of the study of large batches, and one training of them: hpcdist's own trainer, on one rank.

For all optimizers alike: no weight decay, gradients clipped to a norm of 1, a linear warm-up over as many samples
whatever the batch, then a constant rate. So a training that reaches its target does not depend on how long it could
have gone on, and what differs is the optimizer and its rate.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.large_batch.search import Ended, Wanted, crossing
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.comm.config import CommunicationConfig
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.energy.config import EnergyConfig
from hpcdist.errors import NonFiniteError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig, Scaling
from hpcdist.strategies.config import ParallelConfig
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe.config import DataConfig, RunConfig
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run.loop import mean_validation_loss

RULES: Final[Mapping[str, Scaling]] = {"sgd": "linear", "adamw": "sqrt", "lars": "linear", "lamb": "sqrt"}
EVERY: Final = 1.1  # an evaluation after a tenth more samples, at the end of an update
DIVERGED: Final = 2.0  # times the loss of the start
TRUST: Final = 0.02  # of lars: tensors that are not adapted take the rate as it is, so it must be one for sgd too
MICROBATCHES: Final = 4  # where the noise scale is measured: the first is the small batch


@dataclass(frozen=True)
class Task:
    """A model on data, and how far it is trained: to a ``target`` of the validation loss, within ``limit_samples``.

    ``rates`` are where the search begins, for the smallest of ``batches``, each with ``search_seeds`` seeds: more than
    one where trainings with the same rate differ much.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    target: float
    limit_samples: int
    warmup_samples: int
    batches: tuple[int, ...]
    rates: Mapping[str, float]
    validation_samples: int = 0
    search_seeds: int = 1
    about: str = field(default="", compare=False)

    def settings(self) -> dict[str, Any]:
        """Return what must be the same in trainings that are compared, as scalars."""
        model, data = self.model, self.data
        return {
            "model": f"{model.kind}, {model.layers} layers of {model.hidden}",
            "context": data.context if model.kind == "gpt" else 0,
            "target": self.target,
            "limit_samples": self.limit_samples,
            "warmup_samples": self.warmup_samples,
            "trust_coefficient": TRUST,
            "validation_samples": self.validation_samples,
            "data": self.about,
        }


def gpt(text: str) -> Task:
    """Return the byte GPT on a text, "" for the standard library's."""
    return Task(
        "gpt",
        ModelConfig(layers=2, hidden=64, heads=2),
        DataConfig(path=text, context=32),
        target=2.4,
        limit_samples=30_000,
        warmup_samples=1024,
        batches=(8, 32, 128, 512),
        rates={"sgd": 0.15, "adamw": 2e-3, "lars": 0.15, "lamb": 8e-3},
        validation_samples=128,
        about=text or "the Python standard library",
    )


def classifier(name: str, path: Path, fraction: float, rows: int) -> Task:
    """Return a perceptron on a table of images in ``path``, of which the last ``fraction`` is to validate with."""
    small = name == "digits"
    targets = {"digits": 0.1, "mnist": 0.12, "cifar10": 1.5, "cifar100": 3.4}
    return Task(
        name,
        ModelConfig(kind="mlp", layers=2, hidden=64 if small else 256),
        DataConfig(path=str(path), validation_fraction=fraction),
        target=targets[name],
        limit_samples=40_000 if small else 600_000,
        warmup_samples=1024,
        batches=(8, 32, 128, 512) if small else (16, 64, 256, 1024, 4096),
        rates={"sgd": 0.06, "adamw": 3e-3, "lars": 0.06, "lamb": 5e-3},
        validation_samples=0 if small else 2000,
        search_seeds=3,
        about=f"{name}, {rows} images",
    )


def recipe(task: Task, wanted: Wanted) -> Recipe:
    """Return the recipe of a training."""
    noise = wanted.role == "noise"
    return Recipe(
        model=task.model,
        data=task.data,
        optimizer=OptimizerConfig(
            name=wanted.optimizer,  # type: ignore[arg-type]
            learning_rate=wanted.learning_rate,
            weight_decay=0.0,
            trust_coefficient=TRUST,
            decay="constant",
            warmup_samples=task.warmup_samples,
        ),
        parallel=ParallelConfig(microbatches=MICROBATCHES if noise else 1),
        communication=CommunicationConfig(algorithm="native"),
        run=RunConfig(
            steps=-(-wanted.limit_samples // wanted.batch),
            global_batch=wanted.batch,
            seed=wanted.seed,
            sentinel_every_steps=0,
            validation_samples=task.validation_samples,
            noise_scale_every_steps=1 if noise else 0,
        ),
        checkpoint=CheckpointConfig(every_steps=0),
        energy=EnergyConfig(sources="none"),
    )


def train(task: Task, wanted: Wanted) -> Ended:
    """Make one training in this process."""
    began = time.perf_counter()
    comm = solo()
    with np.errstate(over="ignore", invalid="ignore"):  # whoever diverges is told by the loss
        trainer = assemble(Session(comm, locate(comm, None), "none", os._exit), recipe(task, wanted))
        try:
            curve = [_evaluated(trainer, 0)]
            diverged = _steps(trainer, wanted.batch, task.target, curve)
        finally:
            trainer.close()
    samples, losses = [row[0] for row in curve], [row[1] for row in curve]
    reached = crossing(samples, losses, task.target)
    finite = [loss for loss in losses if math.isfinite(loss)]
    wall_s, rows = time.perf_counter() - began, np.array(curve)
    if not math.isnan(reached):
        return Ended("reached", reached, min(finite), wall_s, rows)
    return Ended("diverged" if diverged else "missed", math.nan, min(finite), wall_s, rows)


def _steps(trainer: Trainer, batch: int, target: float, curve: list[tuple[float, float, float]]) -> bool:
    """Train to the target or the last step, and add to ``curve``; return whether the training diverged."""
    steps, due = trainer.recipe.run.steps, 0.0
    with trainer.batches(steps) as batches:
        for number, batch_of_step in enumerate(batches, start=1):
            try:
                trainer.step(number, trainer.cut(trainer.place(batch_of_step)), np.zeros(1))
            except NonFiniteError:
                return True
            if number * batch < due and number < steps:
                continue
            curve.append(_evaluated(trainer, number * batch))
            due = EVERY * number * batch
            if curve[-1][1] <= target:
                return False
            if not curve[-1][1] < DIVERGED * curve[0][1]:
                return True
    return False


def _evaluated(trainer: Trainer, samples: int) -> tuple[float, float, float]:
    noise = math.nan if trainer.noise is None else trainer.noise.smoothed.mean.noise_scale
    return float(samples), mean_validation_loss(trainer), noise
