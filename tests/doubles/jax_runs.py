"""Trainings of models of JAX on a few ranks, beside the same in plain JAX and optax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from rank_runs import abort, state

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.models.model import Model
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import own_samples
from hpcdist.training.recipe import recipe as recipes

Batch = tuple[np.ndarray, np.ndarray]
OPTIMIZER = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}


@dataclass
class Run:
    """Losses of the steps, and all tensors by name afterwards."""

    losses: list[float]
    tensors: dict[str, np.ndarray]
    trainer: Trainer | None = None


def trainer_of(comm: Communicator, model: Model, samples: int, keys: dict[str, Any]) -> Trainer:
    """Return the trainer of ``model`` under the recipe ``keys``, for steps of so many samples. Collective."""
    settings = {
        "model.kind": "mlp",
        "precision.mode": model.dtype.name,
        "run.global_batch": samples,
        "run.steps": 100,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.clip_norm": 0,
        **{f"optimizer.{key}": value for key, value in OPTIMIZER.items()},
        **keys,
    }
    recipe = recipes.load(None, [f"{key}={value}" for key, value in settings.items()], {}).recipe
    return assemble(Session(comm, locate(comm, None), "test", abort), recipe, script_model=model)


def step(trainer: Trainer, number: int, batch: Batch) -> float:
    """Make a step, counted from 1, on this rank's share of ``batch``; return the loss. Collective."""
    own = own_samples(trainer.recipe, trainer.data_axis, number - 1, trainer.shares).slice
    return trainer.step(number, trainer.cut((batch[0][own], batch[1][own])), np.zeros(2)).loss


def train(comm: Communicator, build: Callable[[], Model], batches: list[Batch], keys: dict[str, Any]) -> Run:
    """Make a step for each of ``batches``. Collective; every rank has a model of its own."""
    trainer = trainer_of(comm, build(), len(batches[0][0]), keys)
    losses = [step(trainer, number, batch) for number, batch in enumerate(batches, start=1)]
    whole = {
        tensor: values.reshape(trainer.model.layout.by_key[tensor].spec.shape)
        for (kind, tensor), values in state(trainer).items()
        if kind == "parameters"
    }
    trainer.close()
    return Run(losses, whole, trainer)


def plain(params: Any, loss: Callable[[Any, Batch], Any], batches: list[Batch]) -> tuple[list[float], Any]:
    """The same with jax.value_and_grad and optax on one process: losses, and the params afterwards."""
    own = OPTIMIZER
    matrices = jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params)
    update = optax.adamw(
        own["learning_rate"],
        b1=own["beta1"],
        b2=own["beta2"],
        eps=own["epsilon"],
        weight_decay=own["weight_decay"],
        mask=matrices,
    )
    moments, losses = update.init(params), []
    compute = jax.jit(jax.value_and_grad(loss))
    for batch in batches:
        value, gradient = compute(params, batch)
        change, moments = update.update(gradient, moments, params)
        params = optax.apply_updates(params, change)
        losses.append(float(value))
    return losses, params
