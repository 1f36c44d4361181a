"""Trainings over logical shards, whose losses and norms are compared bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
from rank_runs import trainer_of as plain_trainer_of

from hpcdist.comm.communicator import Communicator
from hpcdist.training.build.trainer import Trainer

SAMPLES = 24


def trainer_of(
    comm: Communicator, path: Path, keys: dict[str, Any], resume: Path | None = None, *, shards: int
) -> Trainer:
    """Return the trainer of a small recipe on the text in ``path``, with ``keys`` changed. Collective."""
    settings = {
        "model.layers": 1,
        "model.hidden": 16,
        "model.heads": 2,
        "data.path": path,
        "data.context": 8,
        "run.steps": 20,
        "run.global_batch": SAMPLES,
        "run.logical_shards": shards,
        "run.validation_samples": 20,
        "optimizer.warmup_steps": 2,
        **keys,
    }
    return plain_trainer_of(comm, settings, resume)


def train(trainer: Trainer, last: int) -> list[tuple[float, float]]:
    """Return loss and norm of each step up to ``last``. Collective over the world."""
    found = []
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            own = trainer.cut(batch) if trainer.context.computes else []
            done = trainer.step(step, own, np.ones(2))
            assert done.stop_requests.tolist() == [trainer.comm.size] * 2
            found.append((done.loss, done.gradient_norm))
    return found
