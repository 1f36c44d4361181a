"""The executor of one rank: runs the operations of a step, through its stages and its exchange.

Each operation goes to the handler of its kind, with observers around it (`observers`). A step yields its loss, norm,
stop requests and seconds by phase as a `StepResult`. The executor also evaluates, computes a step again to find
silent data corruption (`RecomputeVerdict`), and inspects one in which a value was not finite.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink
from hpcdist.errors import NonFiniteError
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.optim import norms
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.mixed_precision import MixedPrecisionViews, NoLossScale
from hpcdist.strategies.core.parameter_views import ParameterViews
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.tied import TiedCopies
from hpcdist.strategies.schedule.generate.operation_list import evaluation_operations, insert_gathers
from hpcdist.strategies.schedule.observers import (
    GradientMeter,
    NanFinder,
    PhaseTimer,
    ProfilerRanges,
    in_range,
    phase_of,
)
from hpcdist.strategies.schedule.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.schedule.stages import MicroBatch, Stages
from hpcdist.strategies.tensor.model import CutModel

__all__ = ["Executor", "MicroBatch", "StepResult"]


@dataclass(frozen=True)
class RecomputeVerdict:
    """Result of a second computation of a step: its reason ("" for no ``suspicion``), and the ranks at fault."""

    suspicion: str
    ranks: tuple[int, ...] = ()
    fault: str = ""


@dataclass
class StepResult:
    """Result of a step: the mean loss over the whole batch, requests to stop, seconds by phase on this rank.

    ``skipped``: the gradient overflowed at its ``loss_scale``, and nothing was updated.
    """

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    stop_requests: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: float = 1.0
    skipped: bool = False
    recomputed: RecomputeVerdict | None = None
    measured: np.ndarray = field(default_factory=lambda: np.zeros(0))  # what a `Meter` counts, summed over the world
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class Executor:
    """The operations of one rank, the stages they compute with and the exchange they communicate through.

    ``clip_norm`` bounds the norm of the mean gradient; 0 leaves it alone. ``loss_scale`` is `NoLossScale` if not
    given; ``seed`` is that of what models drop.
    """

    def __init__(
        self,
        seat: RankContext,
        exchange: Exchange,
        copies: TiedCopies,
        arena: Arena,
        clip_norm: float = 0.0,
        *,
        loss_scale: NoLossScale | None = None,
        seed: int = 0,
    ) -> None:
        self.seat, self.model, self.exchange, self.copies, self.arena = seat, seat.model, exchange, copies, arena
        self.clip_norm = clip_norm
        self.units = seat.ranges
        self.loss_scale = NoLossScale() if loss_scale is None else loss_scale
        self.seed = seed
        self.recheck: Callable[[], None] | None = None  # asked when a step is agreed on; it may `compute_again`
        self.meter: GradientMeter | None = None
        self.spans: SpanSink = NULL_SPANS  # told of every operation of a step
        self.updated = 0  # the last step that is whole here: it was agreed on, and updated or left out
        widens = seat.working not in (None, seat.model.dtype)
        self._bound = (MixedPrecisionViews if widens else ParameterViews)(seat, exchange, copies)
        self._watch = NanFinder()
        if isinstance(seat.model, CutModel):
            seat.model.axis.watch = self._watch
        self._stages = Stages(seat, arena, self._bound, self._watch)
        evaluation = evaluation_operations(seat.placed, seat.pipeline.rank)
        self._forward_only = insert_gathers(evaluation, exchange.gathers) if exchange.gathers else evaluation
        self._handlers: dict[Kind, Callable[[Operation], None]] = {
            **exchange.handlers,
            **self._stages.handlers,
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

    def annotate(self, ranges: ProfilerRanges) -> None:
        """Let every operation run within one of ``ranges``, until the end of the executor (local)."""
        self._handlers = {kind: in_range(ranges, phase_of(kind), handler) for kind, handler in self._handlers.items()}

    def run(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        samples: int,
        step: int,
        stop_requests: np.ndarray,
        first_sample: int = 0,
    ) -> StepResult:
        """Run one step. Collective: every rank runs the list of its own place.

        ``batches`` are the micro-batches of this rank's replica, which begin with ``first_sample`` of the batch of all
        replicas; ``samples`` counts those of all, and ``stop_requests`` (float64) are summed over the ranks along with
        the loss. Raises NonFiniteError on every rank, before any parameter changed, when the loss is not finite, or the
        gradient and `loss_scale` has no cure.
        """
        self._draw = Draw(self.seed, step, first_sample)
        self._begin(operations, batches, self._draw)
        self.sizes, self.samples = [len(inputs) for inputs, _ in batches], samples
        self.exchange.count_samples(sum(self.sizes), samples)
        self.number, self._sent, self._step = step, stop_requests, (operations, batches)
        self._scale = 1.0 / (samples * self.model.tokens_per_sample)
        self.outcome = StepResult(loss_scale=self.loss_scale.scale)
        self._stages.scale = self._scale * self.outcome.loss_scale
        self.exchange.scaled_by(self.outcome.loss_scale)
        seconds = self.outcome.seconds
        self.model.communicated_s()  # what came before the step is not of it
        booking = PhaseTimer(operations, seconds, step, self.exchange.parameters.array, self.spans)
        for place, operation in enumerate(operations):
            self._handlers[operation.kind](operation)
            booking.done(place)
            if self.outcome.skipped:
                break
        self._stages.neighbours.finish()
        self.updated = step
        inside_s = self.model.communicated_s()
        seconds["communication_s"] += inside_s
        seconds["compute_s"] -= inside_s
        return self.outcome

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
        self._compute(operations, batches)
        self._stages.neighbours.finish()
        return self._watch.end()

    def compute_again(self) -> None:
        """Compute the step that is being agreed on once more, and agree on what comes of it. Collective."""
        self._stages.neighbours.finish()
        self._compute(*self._step)
        self._sum_up()

    def _compute(self, operations: Sequence[Operation], batches: Sequence[MicroBatch]) -> None:
        self._begin(operations, batches, self._draw)
        for operation in operations:
            if operation.kind is Kind.AGREE:
                break
            self._handlers[operation.kind](operation)

    def _begin(self, operations: Sequence[Operation], batches: Sequence[MicroBatch], draw: Draw | None = None) -> None:
        self.exchange.begin(operations)
        self._bound.begin()
        self._stages.begin(operations, batches, draw)

    def _forward(self, op: Operation) -> None:
        self._stages.forward(op)

    def _backward(self, op: Operation) -> None:
        self._stages.handlers[op.kind](op)
        if self.meter is not None:
            self.meter.went_back(op)

    def _gather(self, op: Operation) -> None:
        """Gather or free a unit: where its parameters come and go, views of them are bound anew."""
        self.exchange.handlers[op.kind](op)
        if self.exchange.gathers:
            if op.kind is not Kind.FREE:
                store = self.exchange.parameters_at(self.model.stages[op.unit].layer)
                self._watch.distrust(store.range(self.units[op.unit]))
            self._bound.moved(op.unit)

    def _commit(self, op: Operation) -> None:
        """All parameters are elsewhere now."""
        self.exchange.handlers[op.kind](op)
        self._bound.moved()

    def _reduce(self, op: Operation) -> None:
        assert op.range is not None
        units = [unit for unit, part in self.units.items() if part.intersect(op.range)]
        for unit in units:
            self._bound.complete(unit)
            self._watch.look_at_gradients(self._gradients_of_layer(unit), self.units[unit].intersect(op.range))
        if self.meter is not None:
            self.meter.exchanges(op)
        self.exchange.handlers[op.kind](op)
        if not self.exchange.accumulates:
            for unit in units:
                self._bound.exchanged(unit)

    def _copy_gradient(self, op: Operation) -> None:
        if op.unit in self.units:
            self._bound.complete(op.unit)
        self._bound.complete_copies()
        if op.unit in self.units:
            own, part = self._gradients_of_layer(op.unit), self.units[op.unit]
            self._watch.look_at_gradients(own, part)
            self.copies.gradient(op)
            self._watch.distrust(own.range(part))
        else:
            self.copies.gradient(op)

    def _sum_up(self) -> None:
        """Agree on what the computation of a step gave. Collective."""
        before = time.perf_counter()
        norm_squared = self.exchange.norm_squared()
        norm_s = time.perf_counter() - before  # a pass over the gradients is no communication
        outcome = self.outcome
        outcome.seconds["update_s"] += norm_s
        outcome.seconds["communication_s"] -= norm_s
        own = self.meter.numbers() if self.meter is not None else np.zeros(0)
        sent = np.concatenate([[norm_squared], own, self._sent])
        loss, values = self.exchange.agree_losses(self.own_losses, sent)
        outcome.loss = loss * self._scale
        self._norm_squared = float(values[0])  # of the scaled gradient
        outcome.gradient_norm = float(np.sqrt(values[0])) / outcome.loss_scale
        outcome.measured, outcome.stop_requests = np.split(values[1:], [own.size])

    def _agree(self, op: Operation) -> None:
        self._sum_up()
        if self.recheck is not None:
            self.recheck()
        outcome, scale = self.outcome, self.outcome.loss_scale
        of = f" of step {self.number - 1}" if self.exchange.alternates else ""  # whose gradient is applied now
        found = f"step {self.number}: loss {outcome.loss}, gradient norm{of} {outcome.gradient_norm}"
        try:
            if not np.isfinite(outcome.loss):
                raise NonFiniteError(found)  # no scale of its gradient cures it
            outcome.skipped = not self.loss_scale.after(found, outcome.gradient_norm)
        except NonFiniteError:
            self._stages.neighbours.finish()
            raise
        if outcome.skipped:
            return
        norm_squared, normalizes = self._norm_squared / scale**2, self.seat.optimizer.normalize_gradient
        bounded = self.clip_norm or normalizes
        clipped = norms.clip_scale(norm_squared, self.clip_norm, normalize=normalizes) if bounded else 1.0
        self.exchange.begin_update(clipped / scale)

    @property
    def own_losses(self) -> list[float]:
        """Sums over its targets, of each micro-batch of this rank (local)."""
        return self._stages.losses

    def gradients_in(self, part: Range) -> Array | None:
        """Return this rank's gradients in ``part``, a range of whole layers or in one; None for none (local)."""
        unit = next((unit for unit, own in self.units.items() if part.intersect(own)), None)
        return None if unit is None else self._gradients_of_layer(unit).range(part)

    def _gradients_of_layer(self, unit: int) -> FlatStore:
        return self.exchange.gradients_at(self.model.stages[unit].layer)
