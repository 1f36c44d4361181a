"""Timed model: the built-in gpt or a wrapped one in training, with its phases and kinds of operation timed."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.pipeline.run import TimedExecutor
from hpcdist.bench.step.plan import StepSample
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.model import Model
from hpcdist.models.stage import Operations
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.observers import PHASES
from hpcdist.strategies.schedule.operations import Kind, Operation

# What the entries of the table of operations are called in a report.
KINDS: Final = {"linear_column": "matmul", "linear_row": "matmul", "embed": "embedding", "positions": "embedding"}
_WAYS: Final = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
}
Seconds = dict[tuple[str, str], float]  # (kind of operation, "forward" or "backward") -> in one step


class TimedRun:
    """A model in training, replicated over the ranks of ``comm``. Building one is collective.

    ``initial`` are its first parameters, on the host; None: those that it has itself. ``on`` is where it computes.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        model: Model,
        optimizer: OptimizerConfig,
        total_steps: int,
        initial: FlatStore | None,
        on: str = "cpu",
    ) -> None:
        self.name, self.model, self.ledger, self._comm, self._number = name, model, Ledger(), comm, 0
        # Both are collective: whether ranks can share memory is asked of all.
        shares = comm.size > 1 and shared_memory.is_available(comm)
        seat = RankContext(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=model,
            optimizer=optimizer,
            total_steps=total_steps,
            algorithm="node_shared" if shares else "native",
            on=on,
            ledger=self.ledger,
        )
        exchange = AllreduceExchange(seat)
        executor = build_executor(seat, exchange, TimedExecutor)
        assert isinstance(executor, TimedExecutor)
        self._executor = executor
        self.operations = operations(seat, exchange, executor.copies, ParallelConfig())
        if initial is None:
            initial = FlatStore(model.layout, model.dtype)
            model.initialise(initial, seed=0)
        exchange.take(initial)
        executor.copies.refresh()

    def step(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> StepSample:
        """Make a step on this rank's samples, from a barrier on. Collective over ``together``."""
        self._number += 1
        self._executor.timed.clear()
        together.barrier()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        samples = len(x) * self._comm.size
        done = self._executor.run(self.operations, [(x, targets)], samples, self._number, np.zeros(1))
        step_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        phases: defaultdict[str, float] = defaultdict(float)
        for operation, (first_s, last_s) in zip(self.operations, self._executor.timed, strict=True):
            phases[_phase(operation)] += last_s - first_s
        return StepSample(loss=done.loss, own_loss=False, step_s=step_s, cpu_s=cpu_s, phases=dict(phases))

    def profile(self, x: np.ndarray, targets: np.ndarray, together: Communicator) -> Seconds:
        """Make a step whose operations are timed one by one, which costs some microseconds each. Collective.

        The update of the step is in there, too, and clipping with the norm that it needs; "all" is the step.
        """
        found: Seconds = defaultdict(float)
        before = self.model.operations
        self.model.operations = timed_operations(before, found)
        try:
            sample = self.step(x, targets, together)
        finally:
            self.model.operations = before
        for phase in ("clipping", "update", "communication"):
            if sample.phases.get(phase):
                found[phase, "step"] = sample.phases[phase]
        found["all", "step"] = sample.step_s
        return dict(found)

    def activation_bytes(self) -> int:
        """Return the most that activations have taken so far on this rank (local)."""
        return self.ledger.peak["activations"]


def _phase(operation: Operation) -> str:
    """Return the phase, by its name in `hpcdist.bench.step.plan.PHASES`, that an operation belongs to."""
    if operation.kind is Kind.FORWARD:
        return "backward" if operation.recompute else "forward"
    if operation.kind is Kind.AGREE:
        return "clipping"
    found = PHASES.get(operation.kind, "communication")
    return "backward" if found == "compute" else found


def timed_operations(table: Operations, into: Seconds) -> Operations:
    """Return ``table`` with operations that add the seconds of each of their calls to ``into``, by kind and way."""
    entries = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: _Timed(one, KINDS.get(name, name), into) for name, one in entries.items()})


class _Timed:
    """One operation, with a clock around each of its passes."""

    def __init__(self, inner: Any, kind: str, into: Seconds) -> None:
        self._inner, self._kind, self._into = inner, kind, into

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._measured(found, (self._kind, _WAYS[name])) if name in _WAYS else found

    def _measured(self, call: Callable[..., Any], key: tuple[str, str]) -> Callable[..., Any]:
        def measured(*given: Any, **named: Any) -> Any:
            begin_s = time.perf_counter()
            result = call(*given, **named)
            for array in (*given, result):
                if backend.is_device(array):  # what it computes is waited for
                    backend.synchronise(array)
                    break
            self._into[key] = self._into.get(key, 0.0) + time.perf_counter() - begin_s
            return result

        return measured
