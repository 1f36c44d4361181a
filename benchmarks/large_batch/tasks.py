"""Tasks of the large-batch study, and their trainings with hpcdist's trainer on one rank.

All optimizers train without weight decay, with gradients clipped to norm 1, and with a linear warm-up over a fixed
number of samples, then a constant rate. So the result does not depend on the planned length of the training.
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
EVERY: Final = 1.1  # factor of samples between evaluations, rounded up to whole updates
DIVERGED: Final = 2.0  # factor over the initial loss
TRUST: Final = 0.02  # of lars: unadapted tensors take the unscaled rate, which must also suit sgd
MICROBATCHES: Final = 4  # with noise scale: its small batch is the first micro-batch


@dataclass(frozen=True)
class Task:
    """A model on data, trained to a validation loss of ``target`` within ``limit_samples``.

    ``rates`` are the search centres for the smallest of ``batches``. Each rate trains with ``search_seeds`` seeds, more
    than one if trainings with the same rate differ much.
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
        """Return the settings that comparable trainings share, as scalars."""
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
    """Return a perceptron on a table of images; the last ``fraction`` of the images is for validation."""
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


def recipe(task: Task, trial: Wanted) -> Recipe:
    noise = trial.role == "noise"
    return Recipe(
        model=task.model,
        data=task.data,
        optimizer=OptimizerConfig(
            name=trial.optimizer,  # type: ignore[arg-type]
            learning_rate=trial.learning_rate,
            weight_decay=0.0,
            trust_coefficient=TRUST,
            decay="constant",
            warmup_samples=task.warmup_samples,
        ),
        parallel=ParallelConfig(microbatches=MICROBATCHES if noise else 1),
        communication=CommunicationConfig(algorithm="native"),
        run=RunConfig(
            steps=-(-trial.limit_samples // trial.batch),
            global_batch=trial.batch,
            seed=trial.seed,
            sentinel_every_steps=0,
            validation_samples=task.validation_samples,
            noise_scale_every_steps=1 if noise else 0,
        ),
        checkpoint=CheckpointConfig(every_steps=0),
        energy=EnergyConfig(sources="none"),
    )


def train(task: Task, trial: Wanted) -> Ended:
    start_s = time.perf_counter()
    comm = solo()
    with np.errstate(over="ignore", invalid="ignore"):  # the loss shows that a training diverges
        trainer = assemble(Session(comm, locate(comm, None), "none", os._exit), recipe(task, trial))
        try:
            curve = [_evaluated(trainer, 0)]
            diverged = _steps(trainer, trial.batch, task.target, curve)
        finally:
            trainer.close()
    samples, losses = [row[0] for row in curve], [row[1] for row in curve]
    reached = crossing(samples, losses, task.target)
    finite = [loss for loss in losses if math.isfinite(loss)]
    wall_s, rows = time.perf_counter() - start_s, np.array(curve)
    if not math.isnan(reached):
        return Ended("reached", reached, min(finite), wall_s, rows)
    return Ended("diverged" if diverged else "missed", math.nan, min(finite), wall_s, rows)


def _steps(trainer: Trainer, batch: int, target: float, curve: list[tuple[float, float, float]]) -> bool:
    """Train to the target or the last step and append to ``curve``. Return True if the training diverged."""
    steps, next_evaluation = trainer.recipe.run.steps, 0.0
    with trainer.batches(steps) as batches:
        for number, batch_of_step in enumerate(batches, start=1):
            try:
                trainer.step(number, trainer.cut(trainer.place(batch_of_step)), np.zeros(1))
            except NonFiniteError:
                return True
            if number * batch < next_evaluation and number < steps:
                continue
            curve.append(_evaluated(trainer, number * batch))
            next_evaluation = EVERY * number * batch
            if curve[-1][1] <= target:
                return False
            if not curve[-1][1] < DIVERGED * curve[0][1]:
                return True
    return False


def _evaluated(trainer: Trainer, samples: int) -> tuple[float, float, float]:
    noise = math.nan if trainer.noise is None else trainer.noise.smoothed.mean.noise_scale
    return float(samples), mean_validation_loss(trainer), noise
