"""Steps of a tiny model under one exchange on one rank, without a recipe, files or checkpoints."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from harness import trainings
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import NonFiniteError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies import build
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.strategies.core.operations import Operation, StagePlacement, looped
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import STAGES
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.replica_check import explain_nonfinite

GPT = ModelConfig(layers=1, hidden=16, heads=2)
ADAMW = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5)
CONTEXT, FEATURES, CLASSES = 8, 5, 4
EXCHANGES: dict[str, Callable[[RankContext], Exchange]] = {
    "allreduce": catalogue.allreduce,
    **{name: partial(catalogue.zero, stage=stage) for name, stage in STAGES.items()},
}
MicroBatches = list[tuple[np.ndarray, np.ndarray]]


def gpt(config: ModelConfig = GPT, dtype: str = "float32", context: int = CONTEXT) -> Model:
    """Return a model of tables or of text."""
    return models.build(config, dtype, context=context, features=FEATURES, classes=CLASSES)


def text(rng: np.random.Generator, steps: int, samples: int, vocabulary: int = 256) -> np.ndarray:
    """Return random tokens (steps, samples, context + 1)."""
    return rng.integers(0, vocabulary, (steps, samples, CONTEXT + 1)).astype(np.uint8)


def seat(comm: Communicator, model: Model, optimizer: OptimizerConfig, **keys: Any) -> RankContext:
    """Return the context of a rank. By default its data axis is ``comm``; ``keys`` are fields of `RankContext`."""
    given = {"data": comm, "pipeline": solo(), "total_steps": 1000, "algorithm": "ring"}
    return RankContext(world=comm, model=model, optimizer=optimizer, **given | keys)


def load_initial(context: RankContext, exchange: Any, seed: int = 3) -> None:
    """Give an exchange the initial values of the stages that it keeps. Local."""
    model = context.model
    if context.pipeline.size == 1:
        initial = FlatStore(model.layout, model.dtype)
        model.initialise(initial, seed)
        exchange.load_initial(initial)
        return
    for unit, part in context.ranges.items():
        initial = FlatStore(model.layout, model.dtype, part)
        model.initialise_stage(unit, initial, seed)
        exchange.load_initial(initial)


class RankRun:
    """A model under the exchange that ``make`` returns, with its list of operations. A context manager.


    ``config`` and ``dtype`` describe the model, ``servers`` a parameter server. Further keys are fields of the rank's
    context. ``proven`` verifies the list. Building a run is collective over ``comm``.
    """

    def __init__(
        self,
        comm: Communicator,
        make: Callable[[RankContext], Any],
        *,
        config: ModelConfig = GPT,
        dtype: str = "float64",
        model: Model | None = None,
        optimizer: OptimizerConfig = ADAMW,
        parallel: ParallelConfig | None = None,
        microbatches: int = 1,
        pipeline: int = 1,
        servers: ParameterServerConfig | None = None,
        seed: int = 3,
        proven: bool = True,
        **keys: Any,
    ) -> None:
        self.comm, self.ledger, self.number = comm, Ledger(), 0
        self.model = model or gpt(config, dtype)
        self.roles = None if servers is None else Roles.of(servers, comm.size)
        strategy = "allreduce" if servers is None else "parameter_server"
        self.parallel = parallel or ParallelConfig(strategy=strategy, pipeline=pipeline, microbatches=microbatches)
        self.grid = ProcessGrid(data=comm.size // self.parallel.pipeline, pipeline=self.parallel.pipeline)
        self.context = RankContext(
            world=comm,
            model=self.model,
            optimizer=optimizer,
            **{"total_steps": 50, "algorithm": "ring", "ledger": self.ledger, **self._axes(), **keys},
        )
        self.exchange = make(self.context)
        load_initial(self.context, self.exchange, seed)
        self.executor = build.build_executor(self.context, self.exchange, seed=seed)
        self.executor.copies.refresh()
        self.operations = build.operations(self.context, self.exchange, self.executor.copies, self.parallel)
        if proven and self.roles is None:
            exchange, count = self.exchange, self.parallel.microbatches
            proven = {"accumulates": exchange.traits.accumulates, "degrees": exchange.traits.degrees}
            build.prove(self.context, self.grid, self.operations, count, **proven)

    def _axes(self) -> dict[str, Any]:
        if self.roles is not None:
            part = self.roles.part_of(self.comm)
            computes = self.comm.rank in self.roles.workers
            return {"data": part, "pipeline": part.split(part.rank), "computes": computes}
        axes, stages = GridCommunicators(self.grid, self.comm), self.grid.pipeline
        placement = split_by_parameters(self.model, stages)
        return {"data": axes.data, "pipeline": axes.pipeline, "placement": placement}

    def __enter__(self) -> "RankRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.exchange.background is not None:
            self.exchange.background.close()

    def share(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return this replica's part of ``samples``, split into micro-batches."""
        mine = np.array_split(samples, self.context.data.size)[self.context.data.rank]
        return np.array_split(mine, self.parallel.microbatches)

    def batches(self, samples: np.ndarray) -> MicroBatches:
        """Return this replica's part of sequences (samples, context + 1) and the next tokens."""
        if not self.context.computes:
            return []
        parts = [backend.place(part, self.context.on) for part in self.share(samples)]
        return [(part[:, :-1], part[:, 1:]) for part in parts]

    def run(
        self, parts: MicroBatches, samples: int, number: int | None = None, operations: list[Operation] | None = None
    ) -> StepResult:
        """Make a step on micro-batches, of ``samples`` samples on all ranks. Collective."""
        self.number = self.number + 1 if number is None else number
        return self.executor.run(operations or self.operations, parts, samples, self.number, np.zeros(2))

    def step(self, samples: np.ndarray, number: int | None = None, operations: list[Operation] | None = None) -> float:
        """Make a step on the sequences of all ranks and return the loss. Collective."""
        return self.run(self.batches(samples), len(samples), number, operations).loss

    def losses(self, data: Iterable[np.ndarray]) -> list[float]:
        """Return the loss of a step for each element of ``data``. Collective."""
        return [self.step(samples) for samples in data]

    def train(self, data: Iterable[np.ndarray]) -> tuple[list[float], bytes]:
        """Return the losses, and the bits of the local parameters after the steps. Collective."""
        return self.losses(data), self.bits()

    def bits(self) -> bytes:
        """Return the bits of the local parameters."""
        return self.exchange.parameters.array.tobytes()

    def failure(self, samples: np.ndarray, number: int) -> str:
        """Return the reason why a step fails, as the trainer reports it. Parameters are not changed. Collective."""
        batches, before = self.batches(samples), self.bits()
        with pytest.raises(NonFiniteError) as caught:
            self.run(batches, len(samples), number)
        why = explain_nonfinite(self.comm, self.executor, self.operations, batches, caught.value)
        assert self.bits() == before, "nothing is updated"
        self.comm.barrier()  # ranks of a node may share the parameters, which callers change next
        return str(why)

    def state(self) -> trainings.State:
        """Return all that the ranks save, by kind and tensor. Collective."""
        return trainings.gather_tensors(self.comm, self.exchange.pieces())

    def load(self, state: trainings.State, scalars: dict[str, object], steps: int) -> None:
        """Load the state that another run saved after ``steps``. Collective."""
        for piece in self.exchange.wanted():
            piece.array[...] = state[piece.kind, piece.tensor][piece.flat.slice]
        self.exchange.restore(scalars)
        self.number = steps


def optimizer_of(**keys: Any) -> OptimizerConfig:
    """Return `ADAMW` with some of its keys changed."""
    return replace(ADAMW, **keys)


def split_by_parameters(model: Model, ranks: int) -> StagePlacement:
    """Return one chunk for each of ``ranks``, with the smallest possible maximum of parameters."""
    sizes = [float(sum(spec.size for spec in stage.tensors())) for stage in model.stages]
    result = partition(sizes, range(ranks), StageDevices.alike(ranks), None)
    assert result is not None
    return looped(result.chunks, ranks)


def meet(exchange: Any) -> None:
    """Join a rendezvous of servers without lock-step, as the training loop does. Collective over the world."""
    exchange.meet()
    workers = len(exchange.roles.workers)
    values = np.zeros(workers + 2)
    if exchange.works:
        values[exchange.rank] = exchange.clock
    values[-2] = exchange.updates if exchange.rank == exchange.roles.servers[0] else 0
    values[-1] = exchange.meetings.calls
    exchange.agree(values)
    exchange.leave([int(clock) for clock in values[:workers]], int(values[-2]), int(values[-1]))
