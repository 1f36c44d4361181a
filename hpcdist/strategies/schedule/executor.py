"""Runs the list of operations of a step on this rank."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.models.arena import Arena
from hpcdist.models.model import Model
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.schedule.generators import sequential
from hpcdist.strategies.schedule.operations import Kind, Operation

MicroBatch = tuple[Array, Array]  # inputs (samples, ...), targets (samples, ...)

# What each kind of operation is booked under.
PHASES = {
    Kind.FORWARD: "compute_s",
    Kind.BACKWARD: "compute_s",
    Kind.REDUCE: "communication_s",
    Kind.AGREE: "communication_s",
    Kind.DIRECTION: "update_s",
    Kind.APPLY: "update_s",
}


@dataclass
class Step:
    """What a step found out: the mean loss over the whole batch, who wants to stop, seconds by phase on this rank."""

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    wishes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES.values(), 0.0))


class Executor:
    """The operations of one rank, the model they compute with and the exchange they communicate through."""

    def __init__(
        self, model: Model, parameters: FlatStore, gradients: FlatStore, exchange: Exchange, arena: Arena
    ) -> None:
        self.model, self.exchange, self.arena = model, exchange, arena
        self._parameters = model.bind(parameters)
        self._gradients = model.bind_gradients(gradients)
        self._last = len(model.stages) - 1
        self.units = {unit: model.layout.units[stage.layer] for unit, stage in enumerate(model.stages)}
        self._handlers: dict[Kind, Callable[[Operation], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.REDUCE: self._reduce,
            Kind.AGREE: self._agree,
            Kind.DIRECTION: self._direction,
            Kind.APPLY: self._apply,
        }

    def run(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        samples: int,
        step: int,
        wishes: np.ndarray,
    ) -> Step:
        """Run one step. Collective: every rank runs the list of its own place.

        ``batches`` are this rank's micro-batches, ``samples`` counts those of all ranks, and ``wishes`` (float64) are
        summed over the ranks along with the loss. Raises NonFiniteError on every rank, before any parameter changed,
        when the loss or the gradient is not finite.
        """
        self._batches, self._number = batches, step
        self._scale = 1.0 / (samples * self.model.tokens_per_sample)
        self._loss_sum = 0.0
        self._carried: dict[int, Array | None] = {}
        self._sent = wishes
        self._complete: set[int] = set()
        self._outcome = Step()
        for gradients in self._gradients:
            gradients.begin_step()
        clock = time.perf_counter()
        for operation in operations:
            self._handlers[operation.kind](operation)
            now = time.perf_counter()
            self._outcome.seconds[PHASES[operation.kind]] += now - clock
            clock = now
        return self._outcome

    def evaluate(self, inputs: Array, targets: Array) -> float:
        """Return the sum of the losses of a batch in nats over all its targets (local)."""
        return self.model.evaluate(self._parameters, inputs, targets, self.arena)

    def logits(self, inputs: Array) -> Array:
        """Return the model's output for ``inputs`` (local)."""
        return self.model.logits(self._parameters, inputs, self.arena)

    def finite_outputs(self, inputs: Array) -> list[tuple[int, bool]]:
        """Return (layer, whether all of its output is finite) of each unit (local)."""
        seen = []
        x = inputs
        for views, stage in zip(self._parameters, self.model.stages, strict=True):
            x = stage.forward(views, x, self.model.operations, self.arena.saved(stage.layer, 0))
            seen.append((stage.layer, bool(backend.namespace(x).isfinite(x).all())))
        for stage in self.model.stages:
            self.arena.saved(stage.layer, 0).release()
        return seen

    def local_gradients(self, batches: Sequence[MicroBatch]) -> None:
        """Compute this rank's own gradients of a step that `run` gave up, without any message (local)."""
        self._batches, self._loss_sum, self._carried = batches, 0.0, {}
        for gradients in self._gradients:
            gradients.begin_step()
        for operation in sequential(len(self.model.stages), len(batches)):
            self._handlers[operation.kind](operation)
        for gradients in self._gradients:
            gradients.finish()

    def _forward(self, op: Operation) -> None:
        inputs, targets = self._batches[op.microbatch]
        if not len(inputs):
            return  # a rank may have no sample in the last, uneven micro-batch
        x = inputs if op.unit == 0 else self._carried[op.microbatch]
        assert x is not None
        stage = self.model.stages[op.unit]
        saved = self.arena.saved(stage.layer, op.microbatch)
        y = stage.forward(self._parameters[op.unit], x, self.model.operations, saved)
        if op.unit == self._last:
            self._loss_sum += self.model.loss.forward(y, targets, self.model.operations, saved)
        self._carried[op.microbatch] = y

    def _backward(self, op: Operation) -> None:
        if not len(self._batches[op.microbatch][0]):
            return
        stage = self.model.stages[op.unit]
        saved = self.arena.saved(stage.layer, op.microbatch)
        dy = self._carried[op.microbatch]
        if op.unit == self._last:
            dy = self.model.loss.backward(self._scale, self.model.operations, saved)
        assert dy is not None
        self._carried[op.microbatch] = stage.backward(
            self._parameters[op.unit], self._gradients[op.unit], dy, self.model.operations, saved
        )
        saved.release()

    def _reduce(self, op: Operation) -> None:
        assert op.range is not None
        for unit, part in self.units.items():
            if unit not in self._complete and part.intersect(op.range):
                self._gradients[unit].finish()  # what no micro-batch wrote is zero, not last step's
                self._complete.add(unit)
        self.exchange.reduce(op.range)

    def _agree(self, op: Operation) -> None:
        values = np.concatenate([[self._loss_sum], self._sent])
        self.exchange.agree(values)
        self._outcome.loss = float(values[0]) * self._scale
        self._outcome.wishes = values[1:]
        before = time.perf_counter()
        self._outcome.gradient_norm = self.exchange.gradient_norm
        norm_s = time.perf_counter() - before  # a pass over the gradients is no communication
        self._outcome.seconds["update_s"] += norm_s
        self._outcome.seconds["communication_s"] -= norm_s
        if not np.isfinite(self._outcome.loss) or not np.isfinite(self._outcome.gradient_norm):
            raise NonFiniteError(
                f"step {self._number}: loss {self._outcome.loss}, gradient norm {self._outcome.gradient_norm}"
            )

    def _direction(self, op: Operation) -> None:
        assert op.range is not None
        self.exchange.direction(op.range)

    def _apply(self, op: Operation) -> None:
        assert op.range is not None
        self.exchange.apply(op.range)
