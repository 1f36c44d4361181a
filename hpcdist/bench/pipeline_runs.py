"""Models in training on a pipeline, one for each schedule, whose executor writes down when each operation happens.

Beside them is the same model on one rank alone, trained by every rank at the same time: what so many ranks do where
nobody waits for anybody. They share caches and memory as the ranks of the pipeline do.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.pipeline_plan import Case, Shape
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.measured import PassSeconds, agree, measure
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.generate.registry import SCHEDULES
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation
from hpcdist.strategies.schedule.placement import StagePlacement

RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
_TAG = 7002


class TimedExecutor(Executor):
    """An executor that keeps when each operation of the last step began and ended, by `time.perf_counter`."""

    def __init__(self, *of_executor: Any) -> None:
        super().__init__(*of_executor)
        self.timed: list[tuple[float, float]] = []
        for kind, handler in list(self._handlers.items()):
            self._handlers[kind] = self._timed(handler, on_device=kind in COMPUTE)

    def _timed(self, handler: Callable[[Operation], None], *, on_device: bool) -> Callable[[Operation], None]:
        """Return ``handler`` with a look at the clock before and behind; what a GPU computes is waited for."""
        clock, array = time.perf_counter, self.exchange.parameters.array

        def timed(op: Operation) -> None:
            begin_s = clock()
            handler(op)
            if on_device:
                backend.synchronise(array)
            self.timed.append((begin_s, clock()))

        return timed


@dataclass(frozen=True)
class Sample:
    """One step on one rank: from a barrier to its end, and (operations, begin and end) on the clock of the rank."""

    begin_s: float
    step_s: float
    spans_s: np.ndarray
    loss: float


class Run:
    """A model in training. Building one is collective over ``comm``, its pipeline."""

    def __init__(
        self, comm: Communicator, model: Model, schedule: str, microbatches: int, placement: StagePlacement
    ) -> None:
        self._microbatches, self._steps = microbatches, 0
        self.placement = placement
        seat = RankContext(
            world=comm,
            data=solo(),
            pipeline=comm,
            model=model,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            total_steps=1000,
            placement=placement,
        )
        exchange = AllreduceExchange(seat)
        executor = build_executor(seat, exchange, TimedExecutor)
        assert isinstance(executor, TimedExecutor)
        self.executor = executor
        chunks = len(placement.chunks) // comm.size if schedule == "interleaved" else 1
        parallel = ParallelConfig(pipeline=comm.size, schedule=schedule, microbatches=microbatches, chunks=chunks)
        self.operations = operations(seat, exchange, executor.copies, parallel)
        initial = FlatStore(model.layout, model.dtype)
        model.initialise(initial, seed=1)
        exchange.take(initial)
        executor.copies.refresh()

    def step(self, tokens: np.ndarray, together: Communicator) -> Sample:
        """Make a step on ``tokens`` (micro-batches, samples, context + 1).

        Collective over ``together``, from whose barrier on it is timed.
        """
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
        self._steps += 1
        self.executor.timed.clear()
        together.barrier()
        begin_s = time.perf_counter()
        done = self.executor.run(self.operations, batches, tokens.shape[0] * tokens.shape[1], self._steps, np.zeros(1))
        end_s = time.perf_counter()
        return Sample(begin_s, end_s - begin_s, np.array(self.executor.timed), done.loss)


def build_model(shape: Shape) -> Model:
    """Return the model (local)."""
    config = ModelConfig(layers=shape.layers, hidden=shape.hidden, heads=shape.heads, vocabulary=shape.vocabulary)
    return models.build(config, "float32", context=shape.context)


def unit_seconds(comm: Communicator, shape: Shape) -> tuple[PassSeconds, ...]:
    """Return what each unit takes for a micro-batch, measured on all ranks at once. Collective."""
    model = build_model(shape)
    comm.barrier()
    return agree(comm, measure(model, shape.samples))


def place(case: Case, seconds: Sequence[PassSeconds]) -> StagePlacement:
    """Return the placement in which the slowest rank is as fast as can be (local)."""
    row = SCHEDULES[case.schedule]
    count = case.ranks * case.chunks
    empty = row.place([range(unit, unit + 1) for unit in range(count)], case.ranks)
    whole = [one.forward + (one.input + one.weight if row.splits else one.backward) for one in seconds]
    cut = partition(whole, empty.ranks, StageDevices.alike(case.ranks), None)
    assert cut is not None, "there are no limits of memory"
    return row.place(cut.chunks, case.ranks)


def message_s(comm: Communicator, shape: Shape, turns: int = 100) -> float:
    """Return how long a message takes from rank 0 to rank 1, with both at it: half of there and back. Collective.

    It is the first decile: a rank that is interrupted would be seen as a slow message.
    """
    values = np.zeros(shape.samples * shape.context * shape.hidden, np.float32)
    taken = []
    for _ in range(turns):
        comm.barrier()
        begin_s = time.perf_counter()
        if comm.rank == 0:
            comm.send(values, 1, _TAG)
            comm.recv(values, 1, _TAG)
        elif comm.rank == 1:
            comm.recv(values, 0, _TAG)
            comm.send(values, 0, _TAG)
        taken.append((time.perf_counter() - begin_s) / 2)
    found: float = comm.broadcast_object(float(np.percentile(taken, 10)))
    return found
