"""From a recipe to the parts of a run: grid, model, stores, optimizer, exchange, operations, data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist import collectives, models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ledger import Ledger
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.restore import restore
from hpcdist.checkpoint.save import save
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.model import Model
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.grid import Axes, Grid
from hpcdist.strategies.schedule.executor import Executor, MicroBatch
from hpcdist.strategies.schedule.generators import SCHEDULES, interleave
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.training import data
from hpcdist.training.recipe import Recipe

# What `auto` stands for until a measurement decides; the choice is part of the checkpoint and is kept on resume.
AUTO = "native"


@dataclass
class Trainer:
    """Everything a run needs, assembled on every rank alike."""

    comm: Communicator
    recipe: Recipe
    grid: Grid
    data_axis: Communicator
    source: data.Source
    model: Model
    parameters: FlatStore
    gradients: FlatStore
    optimizer: Optimizer
    exchange: AllreduceExchange
    executor: Executor
    operations: list[Operation]
    ledger: Ledger
    first_step: int = 0

    def place(self, batch: MicroBatch) -> MicroBatch:
        """Return a batch where the model computes (local)."""
        on = self.recipe.run.device
        return backend.place(batch[0], on), backend.place(batch[1], on)

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return the model's output for ``inputs``, both on the host (local)."""
        return backend.to_host(self.executor.logits(backend.place(inputs, self.recipe.run.device)))

    @property
    def whole(self) -> Range:
        """All of the flat space."""
        return Range(0, self.model.layout.size)

    def scalars(self, steps: int) -> dict[str, Any]:
        """Return what a checkpoint after ``steps`` steps keeps beside the pieces.

        Random streams are keyed by (seed, step, ...) and batches by the global sample index, so these numbers are all
        of their state.
        """
        return {
            "steps": steps,
            "samples": steps * self.recipe.run.global_batch,
            "seed": self.recipe.run.seed,
            "world": self.comm.size,
            "algorithm": self.exchange.algorithm,
            "data": self.source.fingerprint,
            "optimizer": self.optimizer.state(),
        }

    def save(self, directory: Path, steps: int) -> Path:
        """Write the checkpoint after ``steps`` steps. Collective."""
        return save(
            directory, steps, self.exchange.pieces(), self.scalars(steps), self.comm, self.recipe.checkpoint.keep
        )

    def restore(self, path: Path) -> None:
        """Take back the state in ``path``, written by any number of ranks (local).

        Raises DataError when the data has changed since: the sample order and every loss would be others.
        """
        resumed = restore(path, self.exchange.pieces_of(self.whole))
        if resumed["data"] != self.source.fingerprint:
            raise DataError(
                f"{path} was written by a run on other data than {self.source.description}; "
                "give back the data it was trained on, or start a new run"
            )
        self.optimizer.restore(resumed["optimizer"])
        self.first_step = int(resumed["steps"])


def assemble(session: Session, recipe: Recipe, resume_from: Path | None = None) -> Trainer:
    """Build the run of ``recipe`` on this rank, initialised or restored. Collective."""
    comm, parallel = session.comm, recipe.parallel
    grid = Grid.of(
        comm.size, data=parallel.data, pipeline=parallel.pipeline, tensor=parallel.tensor, context=parallel.context
    )
    recipe.check_world(grid.data)
    axis = Axes(grid, comm).data
    source = data.open_source(recipe.data, recipe.model, comm)
    ledger, on = Ledger(), recipe.run.device
    collectives.account(ledger)
    dtype = dtype_of(recipe.precision.mode)
    model = models.build(recipe.model, recipe.precision.mode, **source.model_inputs())
    parameters = FlatStore(model.layout, dtype, on=on, category="parameters", ledger=ledger)
    gradients = FlatStore(model.layout, dtype, on=on, category="gradients", ledger=ledger)
    whole = Range(0, model.layout.size)
    optimizer = optimizers.build(
        recipe.optimizer, model.layout, whole, dtype, total_steps=recipe.run.steps, ledger=ledger, on=on
    )
    algorithm = recipe.communication.algorithm
    if algorithm == "auto":
        algorithm = manifest.load(resume_from).scalars["algorithm"] if resume_from else AUTO
    exchange = AllreduceExchange(
        axis,
        parameters,
        gradients,
        optimizer,
        algorithm=algorithm,
        bucket_bytes=recipe.communication.bucket_bytes,
        clip_norm=recipe.optimizer.clip_norm,
    )
    executor = Executor(model, parameters, gradients, exchange, Arena(ledger, on))
    compute = SCHEDULES[parallel.schedule](len(model.stages), parallel.microbatches)
    operations = interleave(compute, exchange.plan(), executor.units)
    trainer = Trainer(
        comm,
        recipe,
        grid,
        axis,
        source,
        model,
        parameters,
        gradients,
        optimizer,
        exchange,
        executor,
        operations,
        ledger,
    )
    if resume_from is None:
        # Drawn on the host, so that a GPU starts from the same bits.
        initial = FlatStore(model.layout, dtype)
        model.initialise(initial, recipe.run.seed)
        parameters.array[...] = backend.place(initial.array, on)
    else:
        trainer.restore(resume_from)
    return trainer
