"""The executor of one rank: runs training steps and evaluations, and computes suspicious or failed steps again."""

import time
from collections.abc import Sequence

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink
from hpcdist.errors import DataError, NonFiniteError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.optim import norms
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.mixed_precision import MixedPrecisionViews, NoLossScale
from hpcdist.strategies.core.operations import COMPUTE, EXCHANGED, Kind, Operation
from hpcdist.strategies.core.parameter_views import ParameterViews
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.tied import TiedCopies
from hpcdist.strategies.schedule.graphs import KernelLaunches
from hpcdist.strategies.schedule.operation_list import evaluation_operations, insert_gathers
from hpcdist.strategies.schedule.stages import MicroBatch, Stages
from hpcdist.strategies.schedule.step import NO_COUNTS, Handler, NanFinder, PhaseTimer, StepObserver, StepResult

__all__ = ["Executor", "MicroBatch", "StepResult"]


class Executor:
    """Executor of one rank's operations (passes, messages, updates) in training steps and evaluations."""

    def __init__(
        self,
        context: RankContext,
        exchange: Exchange,
        copies: TiedCopies,
        arena: Arena,
        clip_norm: float = 0.0,  # bound of the norm of the mean gradient; 0: none
        *,
        loss_scale: NoLossScale | None = None,
        seed: int = 0,
        spans: SpanSink = NULL_SPANS,
        observers: Sequence[StepObserver] = (),
        launches: KernelLaunches | None = None,
    ) -> None:
        self.context, self.model, self.exchange = context, context.model, exchange
        self.copies, self.arena, self.clip_norm = copies, arena, clip_norm
        self.units = context.ranges
        self.loss_scale = NoLossScale() if loss_scale is None else loss_scale
        self._seed, self._spans, self._observers = seed, spans, tuple(observers)
        self.updated = 0  # the last complete step: agreed on, and updated or skipped
        self.number, self.samples = 0, 0  # of the current or last step
        self.sizes: list[int] = []
        self.outcome = StepResult()
        self._scale = 1.0  # factor of the loss in the current step: 1 / number of targets
        self._targets = 1.0  # number of targets in the current step
        widens = context.working not in (None, context.model.dtype)
        self._bound = (MixedPrecisionViews if widens else ParameterViews)(context, exchange, copies)
        # Messages inside of stages can bring in bad values of other ranks, so they share one finder with the stages.
        self._watch: NanFinder = context.model.watch or NanFinder()
        self._stages = Stages(context, arena, self._bound, self._watch, launches or KernelLaunches())
        evaluation = evaluation_operations(context.placed, context.pipeline.rank)
        self._forward_only = (
            insert_gathers(evaluation, exchange.traits.gathers) if exchange.traits.gathers else evaluation
        )
        # Later entries replace earlier ones: kinds that need more than the exchange's handler.
        self._handlers: dict[Kind, Handler] = {
            **exchange.handlers,
            **self._stages.handlers,
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
        for observer in self._observers:
            self._handlers = {kind: observer.around(kind, handler) for kind, handler in self._handlers.items()}

    def run(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        samples: int,
        step: int,
        stop_requests: np.ndarray,
        first_sample: int = 0,
        targets: int | None = None,
    ) -> StepResult:
        """Run training step ``step``. Collective. Raises NonFiniteError if the loss or a gradient is not finite.

        ``batches``: local micro-batches. ``samples``, ``targets``: numbers of samples and targets over all replicas.
        ``first_sample``: index of this replica's first sample. ``stop_requests``: counts to sum over all ranks.
        """
        # With loss scaling, a step with a non-finite gradient is skipped.
        sizes = [len(inputs) for inputs, _ in batches]
        try:
            for observer in self._observers:
                observer.begin_step(step, operations, sizes)
            self.number, self.sizes, self.samples = step, sizes, samples
            self.outcome = StepResult(loss_scale=self.loss_scale.scale)
            self._targets = targets or samples * self.model.tokens_per_sample
            self._scale = 1.0 / self._targets
            self._draw = Draw(self._seed, step, first_sample)
            self._sent, self._step = stop_requests, (operations, batches)
            self._begin(operations, batches, self._draw)
            self._make(operations)
            for observer, sums in zip(self._observers, self._sums, strict=True):
                observer.complete_step(self, sums)
        finally:
            for observer in self._observers:
                observer.leave_step()
        return self.outcome

    def _make(self, operations: Sequence[Operation]) -> None:
        self.exchange.count_samples(sum(self.sizes), self.samples)
        self._sums = [NO_COUNTS] * len(self._observers)
        self.exchange.scaled_by(self.outcome.loss_scale)
        seconds = self.outcome.seconds
        self.model.communicated_s()  # reset the counter
        phase_timer = PhaseTimer(operations, seconds, self.number, self.exchange.parameters.array, self._spans)
        for index, operation in enumerate(operations):
            self._handlers[operation.kind](operation)
            phase_timer.done(index)
            if self.outcome.skipped:
                break
        self._stages.neighbours.finish()
        self.updated = self.number
        # Communication inside of stages (tensor axis) was counted as compute.
        inside_s = self.model.communicated_s()
        seconds["communication_s"] += inside_s
        seconds["compute_s"] -= inside_s

    def evaluate(self, inputs: Array, targets: Array) -> float:
        """Return the loss summed over ``targets``, or 0 on ranks without the last pipeline stage. Collective."""
        self._begin(self._forward_only, [(inputs, targets)])
        for operation in self._forward_only:
            self._handlers[operation.kind](operation)
        self._stages.neighbours.finish()
        return sum(self._stages.losses)

    def inspect(self, operations: Sequence[Operation], batches: Sequence[MicroBatch]) -> str | None:
        """Repeat the ``operations`` of a failed step, without update, to search for non-finite values. Collective.

        Return a description of this rank's first non-finite value, or None if all values are finite.
        """
        self._watch.begin(self.exchange.parameters)
        self._compute(operations, batches)
        self._stages.neighbours.finish()
        return self._watch.end()

    def compute_again(self) -> None:
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
        self._stages.begin(operations, batches, draw, self._scale * self.outcome.loss_scale)

    def _backward(self, op: Operation) -> None:
        self._stages.handlers[op.kind](op)
        for observer in self._observers:
            observer.went_back(self, op)

    def _gather(self, op: Operation) -> None:
        self.exchange.handlers[op.kind](op)
        if self.exchange.traits.gathers:
            if op.kind is not Kind.FREE:
                store = self.exchange.parameters_at(self.model.stages[op.unit].layer)
                self._watch.distrust_tensors(store, self.units[op.unit])
            self._bound.moved(op.unit)

    def _commit(self, op: Operation) -> None:
        self.exchange.handlers[op.kind](op)
        self._bound.moved()

    def _reduce(self, op: Operation) -> None:
        units = [unit for unit, part in self.units.items() if part.intersect(op.part)]
        for unit in units:
            self._bound.complete(unit)
            self._watch.look_at_gradients(self._gradients_of_layer(unit), self.units[unit].intersect(op.part))
        for observer in self._observers:
            observer.exchanges(self, op)
        self.exchange.handlers[op.kind](op)
        if not self.exchange.traits.accumulates:  # the next micro-batch overwrites them
            for unit in units:
                self._bound.exchanged(unit)

    def _copy_gradient(self, op: Operation) -> None:
        if op.unit in self.units:
            self._bound.complete(op.unit)
        self._bound.complete_copies()
        if op.unit in self.units:
            gradients, part = self._gradients_of_layer(op.unit), self.units[op.unit]
            self._watch.look_at_gradients(gradients, part)
            self.copies.gradient(op)
            self._watch.distrust_tensors(gradients, part)
        else:
            self.copies.gradient(op)

    def _sum_up(self) -> None:
        before = time.perf_counter()
        norm_squared = self.exchange.norm_squared()
        norm_s = time.perf_counter() - before  # a pass over the gradients is not communication
        outcome = self.outcome
        outcome.seconds["update_s"] += norm_s
        outcome.seconds["communication_s"] -= norm_s
        # One reduction of all values: losses, squared norm, the observers' counts, stop requests and loss weights.
        counts = [observer.counts(self) for observer in self._observers]
        weights = [self.own_weight] if self.model.loss.weighs else []
        local_values = np.concatenate([[norm_squared], *counts, self._sent, weights])
        loss, values = self.exchange.agree_losses(self.own_losses, local_values)
        if weights:
            self._weigh(float(values[-1]))
            values = values[:-1]
        outcome.loss = loss * self._scale * outcome.correction
        # `alternates` applies the gradient of the previous step, which was corrected in its own step.
        correction = 1.0 if self.exchange.traits.alternates else outcome.correction
        self._norm_squared = float(values[0]) * correction**2  # of the scaled gradient
        outcome.gradient_norm = float(np.sqrt(values[0])) * correction / outcome.loss_scale
        *self._sums, outcome.stop_requests = np.split(values[1:], np.cumsum([row.size for row in counts], dtype=int))
        outcome.measured = np.concatenate([NO_COUNTS, *self._sums])

    def _weigh(self, weight: float) -> None:
        # ``weight``: sum of the weights of all targets.
        exchange = self.exchange
        targets = self._targets if exchange.traits.lock_step else sum(self.sizes) * self.model.tokens_per_sample
        if not targets:  # a worker without samples in this step
            return
        if not 0 < weight < np.inf:
            self._stages.neighbours.finish()
            raise DataError(
                f"step {self.number}: the weights of all targets in the batch sum to {weight}, expected a finite "
                "number above 0; remove batches in which no target has a weight"
            )
        self.outcome.correction = exchange.correction = targets / weight
        if self.outcome.correction != 1.0 and not exchange.traits.corrects:
            self._stages.neighbours.finish()
            raise UsageError(
                f"step {self.number}: the weights of all targets in the batch sum to {weight:g}, expected {targets:g}. "
                "With parameter_server.backup_workers, every sample must have the same sum of target weights; pass the "
                "sum as tokens_per_sample to wrap(), or set parameter_server.backup_workers = 0"
            )

    def _agree(self, op: Operation) -> None:
        self._sum_up()
        for observer in self._observers:
            observer.agreed(self)
        outcome, scale = self.outcome, self.outcome.loss_scale
        of_step = (
            f" of step {self.number - 1}" if self.exchange.traits.alternates else ""
        )  # the applied gradient's step
        summary = f"step {self.number}: loss {outcome.loss}, gradient norm{of_step} {outcome.gradient_norm}"
        try:
            if not np.isfinite(outcome.loss):
                raise NonFiniteError(summary)  # no loss scale can help: the loss is not scaled
            outcome.skipped = not self.loss_scale.after(summary, outcome.gradient_norm)
        except NonFiniteError:
            self._stages.neighbours.finish()
            raise
        if outcome.skipped:
            return
        norm_squared, normalizes = self._norm_squared / scale**2, self.context.optimizer.normalize_gradient
        correction = 1.0 if self.exchange.traits.alternates else outcome.correction
        clip = norms.clip_scale(norm_squared, self.clip_norm, normalize=normalizes)
        self.exchange.begin_update(clip * correction / scale)

    @property
    def own_losses(self) -> list[float]:
        return self._stages.losses

    @property
    def own_weight(self) -> float:
        """Sum of the target weights of this rank in the current or last step, or 0 if the loss is unweighted."""
        return self._stages.weight

    def gradients_in(self, part: Range) -> Array | None:
        unit = next((unit for unit, unit_range in self.units.items() if part.intersect(unit_range)), None)
        return None if unit is None else self._gradients_of_layer(unit).range(part)

    def _gradients_of_layer(self, unit: int) -> FlatStore:
        return self.exchange.gradients_at(self.model.stages[unit].layer)
