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
from hpcdist.models.dropout import Draw
from hpcdist.optim import clip
from hpcdist.strategies.bound import Bound
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.loss_scale import Unscaled
from hpcdist.strategies.pipeline import Copies
from hpcdist.strategies.schedule.generators import forward_only, gathered
from hpcdist.strategies.schedule.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.schedule.stages import MicroBatch, Stages
from hpcdist.strategies.schedule.watch import Watch
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.tensor.model import CutModel
from hpcdist.strategies.working import WorkingCopies

__all__ = ["Executor", "MicroBatch", "Step"]

# What each kind of operation is booked under; all others are communication.
PHASES = {
    **dict.fromkeys(COMPUTE, "compute_s"),
    Kind.ADD: "compute_s",
    Kind.KEEP: "compute_s",
    Kind.DIRECTION: "update_s",
    Kind.APPLY: "update_s",
    Kind.MIX: "update_s",
    Kind.MIRROR: "update_s",
}


@dataclass
class Step:
    """What a step found out: the mean loss over the whole batch, who wants to stop, seconds by phase on this rank.

    ``skipped``: the gradient overflowed at its ``loss_scale``, and nothing was updated.
    """

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    wishes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: float = 1.0
    skipped: bool = False
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class Executor:
    """The operations of one rank, the stages they compute with and the exchange they communicate through.

    ``clip_norm`` bounds the norm of the mean gradient; 0 leaves it alone. ``loss_scale``, and the ``seed`` of what
    models drop, may be set before the first step.
    """

    def __init__(self, seat: Seat, exchange: Exchange, copies: Copies, arena: Arena, clip_norm: float = 0.0) -> None:
        self.seat, self.model, self.exchange, self.copies, self.arena = seat, seat.model, exchange, copies, arena
        self.clip_norm = clip_norm
        self.units = seat.ranges
        self.loss_scale = Unscaled()
        self.seed = 0
        self._bound = (Bound if seat.working is None else WorkingCopies)(seat, exchange, copies)
        self._watch = Watch()
        if isinstance(seat.model, CutModel):
            seat.model.axis.watch = self._watch
        self._stages = Stages(seat, arena, self._bound, self._watch)
        evaluation = forward_only(seat.placed, seat.pipeline.rank)
        self._forward_only = gathered(evaluation, exchange.gathers) if exchange.gathers else evaluation
        self._handlers: dict[Kind, Callable[[Operation], None]] = {
            **exchange.carries_out,
            **self._stages.carries_out,
            Kind.FORWARD: self._forward,
            **dict.fromkeys(COMPUTE[1:], self._backward),
            Kind.GATHER: self._gather,
            Kind.WAIT_GATHER: self._gather,
            Kind.FREE: self._gather,
            **dict.fromkeys(EXCHANGED, self._reduce),
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
        first_sample: int = 0,
    ) -> Step:
        """Run one step. Collective: every rank runs the list of its own place.

        ``batches`` are the micro-batches of this rank's replica, which begin with ``first_sample`` of the batch of all
        replicas; ``samples`` counts those of all, and ``wishes`` (float64) are summed over the ranks along with the
        loss. Raises NonFiniteError on every rank, before any parameter changed, when the loss is not finite, or the
        gradient and `loss_scale` has no cure.
        """
        self._draw = Draw(self.seed, step, first_sample)
        self._begin(operations, batches, self._draw)
        self.exchange.count_samples(sum(len(inputs) for inputs, _ in batches), samples)
        self._number, self._sent = step, wishes
        self._scale = 1.0 / (samples * self.model.tokens_per_sample)
        self._outcome = Step(loss_scale=self.loss_scale.scale)
        self._stages.scale = self._scale * self._outcome.loss_scale
        seconds = self._outcome.seconds
        phases = [PHASES.get(operation.kind, "communication_s") for operation in operations]
        self.model.communicated_s()  # what came before the step is not of it
        clock = time.perf_counter()
        for operation, phase, following in zip(operations, phases, [*phases[1:], ""], strict=True):
            self._handlers[operation.kind](operation)
            if phase != following:
                # What a GPU still computes belongs to this phase; a message would wait for it anyway.
                backend.synchronise(self.exchange.parameters.array)
                now = time.perf_counter()
                seconds[phase] += now - clock
                clock = now
            if self._outcome.skipped:
                break
        self._stages.neighbours.finish()
        inside_s = self.model.communicated_s()
        seconds["communication_s"] += inside_s
        seconds["compute_s"] -= inside_s
        return self._outcome

    def evaluate(self, inputs: Array, targets: Array) -> float:
        """Return the sum of the losses of a batch in nats over all its targets; 0 but on the last stage.

        Collective over the pipeline, and over the data axis where units are gathered: then all ranks call it equally
        often, if need be with a batch of no samples.
        """
        self._begin(self._forward_only, [(inputs, targets)])
        for operation in self._forward_only:
            self._handlers[operation.kind](operation)
        self._stages.neighbours.finish()
        return sum(self._stages.losses)

    def inspect(self, operations: Sequence[Operation], batches: Sequence[MicroBatch]) -> str | None:
        """Compute a step that `run` gave up once more; return where its first value that is not finite appeared.

        Only what this rank computed itself counts, so exactly the culprits report something. Collective, as `run`;
        nothing is updated.
        """
        self._watch.begin(self.exchange.parameters)
        self._begin(operations, batches, self._draw)
        for operation in operations:
            if operation.kind is Kind.AGREE:
                break
            self._handlers[operation.kind](operation)
        self._stages.neighbours.finish()
        return self._watch.end()

    def _begin(self, operations: Sequence[Operation], batches: Sequence[MicroBatch], draw: Draw | None = None) -> None:
        self.exchange.begin(operations)
        self._bound.begin()
        self._stages.begin(operations, batches, draw)

    def _forward(self, op: Operation) -> None:
        self._stages.forward(op)

    def _backward(self, op: Operation) -> None:
        self._stages.carries_out[op.kind](op)

    def _gather(self, op: Operation) -> None:
        """Gather or free a unit: where its parameters come and go, views of them are bound anew."""
        self.exchange.carries_out[op.kind](op)
        if self.exchange.gathers:
            if op.kind is not Kind.FREE:
                store = self.exchange.parameters_at(self.model.stages[op.unit].layer)
                self._watch.distrust(store.range(self.units[op.unit]))
            self._bound.moved(op.unit)

    def _commit(self, op: Operation) -> None:
        """All parameters are elsewhere now."""
        self.exchange.carries_out[op.kind](op)
        self._bound.moved()

    def _reduce(self, op: Operation) -> None:
        assert op.range is not None
        units = [unit for unit, part in self.units.items() if part.intersect(op.range)]
        for unit in units:
            self._bound.complete(unit)
            self._watch.look_at_gradients(self._gradients_of_layer(unit), self.units[unit].intersect(op.range))
        self.exchange.carries_out[op.kind](op)
        if not self.exchange.accumulates:
            for unit in units:
                self._bound.exchanged(unit)

    def _copy_gradient(self, op: Operation) -> None:
        if op.unit in self.units:
            self._bound.gradients(op.unit).finish()
        for key in self.copies.keys - self._bound.written:
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
        loss, values = self.exchange.agree_losses(self._stages.losses, np.concatenate([[norm_squared], self._sent]))
        outcome, scale = self._outcome, self._outcome.loss_scale
        outcome.loss = loss * self._scale
        outcome.gradient_norm = float(np.sqrt(values[0])) / scale
        outcome.wishes = values[1:]
        of = f" of step {self._number - 1}" if self.exchange.alternates else ""  # whose gradient is applied now
        found = f"step {self._number}: loss {outcome.loss}, gradient norm{of} {outcome.gradient_norm}"
        try:
            if not np.isfinite(outcome.loss):
                raise NonFiniteError(found)  # no scale of its gradient cures it
            outcome.skipped = not self.loss_scale.after(found, outcome.gradient_norm)
        except NonFiniteError:
            self._stages.neighbours.finish()
            raise
        if outcome.skipped:
            return
        clipped = clip.clip_scale(float(values[0]) / scale**2, self.clip_norm) if self.clip_norm else 1.0
        self.exchange.begin_update(clipped / scale)

    def _gradients_of_layer(self, unit: int) -> FlatStore:
        return self.exchange.gradients_at(self.model.stages[unit].layer)
