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
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Parameters
from hpcdist.optim import clip
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.pipeline import Copies
from hpcdist.strategies.schedule.generators import forward_only, gathered
from hpcdist.strategies.schedule.messages import Neighbours
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.watch import Watch
from hpcdist.strategies.seat import Seat

MicroBatch = tuple[Array, Array]  # inputs (samples, ...), targets (samples, ...)

# What each kind of operation is booked under; all others are communication.
PHASES = {
    Kind.FORWARD: "compute_s",
    Kind.BACKWARD: "compute_s",
    Kind.ADD: "compute_s",
    Kind.DIRECTION: "update_s",
    Kind.APPLY: "update_s",
    Kind.MIRROR: "update_s",
}


@dataclass
class Step:
    """What a step found out: the mean loss over the whole batch, who wants to stop, seconds by phase on this rank."""

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    wishes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class Executor:
    """The operations of one rank, the stages they compute with and the exchange they communicate through.

    ``clip_norm`` bounds the norm of the mean gradient; 0 leaves it alone.
    """

    def __init__(self, seat: Seat, exchange: Exchange, copies: Copies, arena: Arena, clip_norm: float = 0.0) -> None:
        self.seat, self.model, self.exchange, self.copies, self.arena = seat, seat.model, exchange, copies, arena
        self.clip_norm = clip_norm
        self.units = seat.ranges
        self._last = len(self.model.stages) - 1
        self._neighbours = Neighbours(seat, arena)
        self._parameters: dict[int, Parameters] = {}  # views, bound while the memory of a unit stays where it is
        self._gradients: dict[int, BoundGradients] = {}
        self._written: set[str] = set()
        self._watch = Watch()
        evaluation = forward_only(seat.units, seat.pipeline.rank, seat.pipeline.size)
        self._forward_only = gathered(evaluation, exchange.gathers) if exchange.gathers else evaluation
        self._handlers: dict[Kind, Callable[[Operation], None]] = {
            **exchange.carries_out,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._recv_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._recv_gradient,
            Kind.GATHER: self._gather,
            Kind.FREE: self._gather,
            Kind.ADD: self._reduce,
            Kind.REDUCE: self._reduce,
            Kind.START: self._reduce,
            Kind.PUSH: self._reduce,
            Kind.COPY_GRADIENT: self._copy_gradient,
            Kind.COPY_VALUE: copies.value,
            Kind.COMMIT: self._commit,
            Kind.AGREE: self._agree,
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

        ``batches`` are the micro-batches of this rank's replica, ``samples`` counts those of all replicas, and
        ``wishes`` (float64) are summed over the ranks along with the loss. Raises NonFiniteError on every rank, before
        any parameter changed, when the loss or the gradient is not finite.
        """
        self._begin(operations, batches)
        self._number, self._sent = step, wishes
        self._scale = 1.0 / (samples * self.model.tokens_per_sample)
        self._outcome = Step()
        seconds = self._outcome.seconds
        phases = [PHASES.get(operation.kind, "communication_s") for operation in operations]
        clock = time.perf_counter()
        for operation, phase, following in zip(operations, phases, [*phases[1:], ""], strict=True):
            self._handlers[operation.kind](operation)
            if phase != following:
                # What a GPU still computes belongs to this phase; a message would wait for it anyway.
                backend.synchronise(self.exchange.parameters.array)
                now = time.perf_counter()
                seconds[phase] += now - clock
                clock = now
        self._neighbours.finish()
        return self._outcome

    def evaluate(self, inputs: Array, targets: Array) -> float:
        """Return the sum of the losses of a batch in nats over all its targets; 0 but on the last stage.

        Collective over the pipeline, and over the data axis where units are gathered: then all ranks call it equally
        often, if need be with a batch of no samples.
        """
        self._begin(self._forward_only, [(inputs, targets)])
        self._dropped = {0}
        for operation in self._forward_only:
            self._handlers[operation.kind](operation)
        self._neighbours.finish()
        return sum(self._losses)

    def inspect(self, operations: Sequence[Operation], batches: Sequence[MicroBatch]) -> str | None:
        """Compute a step that `run` gave up once more; return where its first value that is not finite appeared.

        Only what this rank computed itself counts, so exactly the culprits report something. Collective, as `run`;
        nothing is updated.
        """
        self._watch.begin(self.exchange.parameters)
        self._begin(operations, batches)
        for operation in operations:
            if operation.kind is Kind.AGREE:
                break
            self._handlers[operation.kind](operation)
        self._neighbours.finish()
        return self._watch.end()

    def _begin(self, operations: Sequence[Operation], batches: Sequence[MicroBatch]) -> None:
        self.exchange.begin(operations)
        self._batches = batches
        self._losses: list[float] = []  # summed over its targets, of each micro-batch that has samples
        self._carried: dict[int, Array] = {}
        self._complete: set[int] = set()
        # Their activations are computed again before the backward, or there is none.
        self._dropped = {op.microbatch for op in operations if op.recompute}
        self._written.clear()

    def _forward(self, op: Operation) -> None:
        inputs, targets = self._batches[op.microbatch]
        if not len(inputs):
            return  # a replica may have no sample in the last, uneven micro-batch
        stage, first = self.model.stages[op.unit], op.unit == self.seat.units[0]
        x = self._neighbours.received(op.microbatch, inputs) if first else self._carried[op.microbatch]
        saved = self.arena.saved(stage.layer, op.microbatch)
        y = stage.forward(self._parameters_of(op.unit), x, self.model.operations, saved)
        self._watch.look(f"output of layer {stage.layer} in micro-batch {op.microbatch}", y)
        dropped = op.microbatch in self._dropped and not op.recompute
        if dropped and not first:
            self.arena.saved(self.model.stages[op.unit - 1].layer, op.microbatch).release()
        if op.unit == self._last:
            loss = self.model.loss.forward(y, targets, self.model.operations, saved)
            self._watch.look(f"loss of micro-batch {op.microbatch}", np.array(loss))
            if not op.recompute:
                self._losses.append(loss)
            if dropped:
                saved.release()
        self._carried[op.microbatch] = y

    def _backward(self, op: Operation) -> None:
        if not len(self._batches[op.microbatch][0]):
            return
        stage = self.model.stages[op.unit]
        saved = self.arena.saved(stage.layer, op.microbatch)
        dy = self._carried[op.microbatch]
        if op.unit == self._last:
            dy = self.model.loss.backward(self._scale, self.model.operations, saved)
        dx = stage.backward(self._parameters_of(op.unit), self._gradients_of(op.unit), dy, self.model.operations, saved)
        if dx is not None:
            self._carried[op.microbatch] = dx
        saved.release()
        if op.unit == self.seat.units[0]:
            self._neighbours.forget(op.microbatch)

    def _send_activation(self, op: Operation) -> None:
        if len(self._batches[op.microbatch][0]):
            dropped = op.microbatch in self._dropped
            self._neighbours.send_activation(op.microbatch, self._carried.pop(op.microbatch), copy=dropped)
            if dropped:
                self.arena.saved(self.model.stages[self.seat.units[-1]].layer, op.microbatch).release()

    def _recv_activation(self, op: Operation) -> None:
        inputs = self._batches[op.microbatch][0]
        self._neighbours.recv_activation(op.microbatch, len(inputs))
        if len(inputs):
            self._watch.distrust(self._neighbours.received(op.microbatch, inputs))

    def _send_gradient(self, op: Operation) -> None:
        if len(self._batches[op.microbatch][0]):
            self._neighbours.send_gradient(op.microbatch, self._carried.pop(op.microbatch))

    def _recv_gradient(self, op: Operation) -> None:
        samples = len(self._batches[op.microbatch][0])
        if samples:
            self._carried[op.microbatch] = self._neighbours.recv_gradient(op.microbatch, samples)
            self._watch.distrust(self._carried[op.microbatch])

    def _gather(self, op: Operation) -> None:
        """Gather or free a unit: where its parameters come and go, views of them are bound anew."""
        self.exchange.carries_out[op.kind](op)
        if self.exchange.gathers:
            if op.kind is Kind.GATHER:
                store = self.exchange.parameters_at(self.model.stages[op.unit].layer)
                self._watch.distrust(store.range(self.units[op.unit]))
            for unit in [unit for unit in self._parameters if op.unit in self.model.needs[unit]]:
                del self._parameters[unit]

    def _commit(self, op: Operation) -> None:
        """All parameters are elsewhere now."""
        self.exchange.carries_out[op.kind](op)
        self._parameters.clear()

    def _reduce(self, op: Operation) -> None:
        assert op.range is not None
        units = [unit for unit, part in self.units.items() if part.intersect(op.range)]
        for unit in units:
            if unit not in self._complete:
                self._gradients_of(unit).finish()  # what no micro-batch wrote is zero, not last step's
                self._complete.add(unit)
            self._watch.look_at_gradients(self._gradients_of_layer(unit), self.units[unit].intersect(op.range))
        self.exchange.carries_out[op.kind](op)
        if not self.exchange.accumulates:
            for unit in units:  # the next micro-batch begins with memory of its own
                self._gradients.pop(unit).begin_step()
                self._complete.discard(unit)

    def _copy_gradient(self, op: Operation) -> None:
        if op.unit in self.units:
            self._gradients_of(op.unit).finish()
        for key in self.copies.keys - self._written:
            self.copies.gradients.view(key)[...] = 0
        if op.unit in self.units:
            own, part = self._gradients_of_layer(op.unit), self.units[op.unit]
            self._watch.look_at_gradients(own, part)
            self.copies.gradient(op)
            self._watch.distrust(own.range(part))
        else:
            self.copies.gradient(op)

    def _agree(self, op: Operation) -> None:
        before = time.perf_counter()
        norm_squared = self.exchange.norm_squared()
        norm_s = time.perf_counter() - before  # a pass over the gradients is no communication
        self._outcome.seconds["update_s"] += norm_s
        self._outcome.seconds["communication_s"] -= norm_s
        loss, values = self.exchange.agree_losses(self._losses, np.concatenate([[norm_squared], self._sent]))
        self._outcome.loss = loss * self._scale
        self._outcome.gradient_norm = float(np.sqrt(values[0]))
        self._outcome.wishes = values[1:]
        if not np.isfinite(self._outcome.loss) or not np.isfinite(self._outcome.gradient_norm):
            self._neighbours.finish()
            raise NonFiniteError(
                f"step {self._number}: loss {self._outcome.loss}, gradient norm {self._outcome.gradient_norm}"
            )
        self.exchange.begin_update(clip.clip_scale(float(values[0]), self.clip_norm) if self.clip_norm else 1.0)

    def _parameters_of(self, unit: int) -> Parameters:
        if unit not in self._parameters:
            self._parameters[unit] = self.model.bind_stage(unit, self._parameters_at)
        return self._parameters[unit]

    def _gradients_of(self, unit: int) -> BoundGradients:
        if unit not in self._gradients:
            self._gradients[unit] = self.model.bind_stage_gradients(unit, self._gradients_at, self._written)
        return self._gradients[unit]

    def _parameters_at(self, layer: int) -> FlatStore:
        return self.copies.parameters if layer in self.copies.layers else self.exchange.parameters_at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self.copies.gradients if layer in self.copies.layers else self.exchange.gradients_at(layer)

    def _gradients_of_layer(self, unit: int) -> FlatStore:
        return self.exchange.gradients_at(self.model.stages[unit].layer)
