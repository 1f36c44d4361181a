"""Timed measurements: without garbage collection, of each operation of a training, and of PyTorch ranks."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.step import Handler, StepObserver


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collection in the ``with`` block, so that it does not disturb timed calls."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def begin_torch_group(comm: Communicator, folder: Path) -> None:
    """Start PyTorch's gloo process group. Call once per process. ``folder``: rendezvous directory. Collective."""
    import torch.distributed as group

    rendezvous = comm.broadcast_object(str((folder / f"rendezvous-{os.getpid()}").absolute()))
    group.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size)


class OperationTimer(StepObserver):
    """Observer that stores the start and end time of each operation of the latest training step."""

    def __init__(self, exchange: Exchange) -> None:
        self._array = exchange.parameters.array
        self.timed: list[tuple[float, float]] = []

    def around(self, kind: Kind, handler: Handler) -> Handler:
        clock, array, is_compute = time.perf_counter, self._array, kind in COMPUTE

        def timed(op: Operation) -> None:
            begin_s = clock()
            handler(op)
            if is_compute:
                backend.synchronise(array)
            self.timed.append((begin_s, clock()))

        return timed


class TimedTraining:
    """Training with a plain gradient allreduce and timed operations. Construction is collective over all ranks."""

    def __init__(
        self, context: RankContext, parallel: ParallelConfig, initial: FlatStore | None = None, seed: int = 0
    ) -> None:
        exchange = catalogue.allreduce(context)
        self.timer, self._number = OperationTimer(exchange), 0
        self._executor = build_executor(context, exchange, observers=(self.timer,))
        self.operations = operations(context, exchange, self._executor.copies, parallel)
        if initial is None:
            initial = FlatStore(context.model.layout, context.model.dtype)
            context.model.initialise(initial, seed)
        exchange.load_initial(initial)
        self._executor.copies.refresh()

    def timed_step(
        self, batches: Sequence[tuple[np.ndarray, np.ndarray]], samples: int, barrier_comm: Communicator
    ) -> tuple[StepResult, float, float, float]:
        """Run a training step after a barrier. Return (step result, start time, seconds, CPU seconds). Collective.

        ``batches``: (tokens, labels) of each micro-batch. ``samples``: number of samples in the global
        batch. ``barrier_comm``: communicator of the barrier.
        """
        self._number += 1
        self.timer.timed.clear()
        barrier_comm.barrier()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        done = self._executor.run(self.operations, batches, samples, self._number, np.zeros(1))
        end_s = time.perf_counter()
        return done, begin_s, end_s - begin_s, time.process_time() - cpu_s
