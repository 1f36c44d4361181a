"""Stragglers made on purpose: an executor whose forward and backward take as long as the recipe says.

The time is added operation by operation, so that what an exchange does between them (a reduction of the last layers, a
look at what has come) meets it where a slower processor would have it. Nothing else changes: same numbers, same bits.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend, rng
from hpcdist.strategies.parameter_server.asynchronous.base import AsynchronousServerExchange
from hpcdist.strategies.schedule.executor import Executor, StepResult
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.stages import MicroBatch
from hpcdist.training.chaos_config import ChaosConfig

STREAM: Final = 0x6368616F73  # names the random stream of slow steps, apart from those of data and parameters
SLICE_S: Final = 1e-3  # a rank that serves others beside its own work looks so often what has come


def is_slow(config: ChaosConfig, rank: int, step: int) -> bool:
    """Whether ``step`` is a slow one of ``rank`` (local)."""
    if rank not in config.slow_ranks:
        return False
    return bool(rng.stream(config.seed, STREAM, rank, step).random() < config.slow_probability)


class Pace:
    """How much longer the operations of a step must take.

    A step of ``count`` operations takes ``least_s``, spread evenly over them, or what they need themselves if that is
    more, and then ``factor`` times that.
    """

    def __init__(self, count: int, least_s: float, factor: float) -> None:
        self._count, self._least_s, self._factor = count, least_s, factor
        self._done, self._computed_s, self._taken_s = 0, 0.0, 0.0

    def lacking_s(self, computed_s: float) -> float:
        """Return how long to sleep behind the next operation, which took ``computed_s`` by itself."""
        self._done += 1
        self._computed_s += computed_s
        due_s = self._factor * max(self._computed_s, self._least_s * self._done / self._count)
        return max(0.0, due_s - self._taken_s - computed_s)

    def took(self, seconds: float) -> None:
        """Take note that the operation and its sleep took ``seconds``."""
        self._taken_s += seconds


class SlowedExecutor(Executor):
    """An executor of rank ``rank``; an even share of a step has ``even_samples`` samples."""

    def __init__(self, config: ChaosConfig, rank: int, even_samples: float, *of_executor: Any) -> None:
        super().__init__(*of_executor)
        self._config, self._rank, self._even_samples = config, rank, even_samples
        self._pace: Pace | None = None  # evaluations and repetitions of a step are not slowed down

    def run(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        samples: int,
        step: int,
        wishes: np.ndarray,
        first_sample: int = 0,
    ) -> StepResult:
        """Run one step, as `Executor.run`, at the pace of this rank."""
        count = sum(operation.kind in (Kind.FORWARD, Kind.BACKWARD) for operation in operations)
        own = sum(len(inputs) for inputs, _ in batches)
        factor = self._config.slow_factor if is_slow(self._config, self._rank, step) else 1.0
        self._pace = Pace(count, self._config.step_s * own / self._even_samples, factor)
        try:
            return super().run(operations, batches, samples, step, wishes, first_sample)
        finally:
            self._pace = None

    def _forward(self, op: Operation) -> None:
        self._paced(super()._forward, op)

    def _backward(self, op: Operation) -> None:
        self._paced(super()._backward, op)

    def _paced(self, compute: Callable[[Operation], None], op: Operation) -> None:
        begun = time.perf_counter()
        compute(op)
        if self._pace is None:
            return
        backend.synchronise(self.exchange.parameters.array)  # a GPU is as slow as the step says, not its queue
        self._sleep(self._pace.lacking_s(time.perf_counter() - begun))
        self._pace.took(time.perf_counter() - begun)

    def _sleep(self, seconds: float) -> None:
        """Sleep; where other ranks are served beside the own work, look meanwhile what has come."""
        exchange = self.exchange
        serves = isinstance(exchange, AsynchronousServerExchange) and exchange.shard is not None
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, SLICE_S) if serves else left)
            if serves:
                exchange.carries_out[Kind.COLLECT](Operation(Kind.COLLECT))
