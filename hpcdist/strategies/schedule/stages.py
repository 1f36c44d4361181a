"""Stages of a rank: forward and backward passes, and the activations passed between stages and ranks.

A stage with ``takes``, the indices of earlier units, finds their outputs in its `Saved` as "skip.UNIT" (read-only) and
leaves the gradients as "skip.UNIT.gradient". Gradients of an output are summed in the order of its consumers, for equal
bits on all placements.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import cast

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.models.arena import Arena, ArenaSaved
from hpcdist.models.documents import unpacked
from hpcdist.models.model import LOSS_WEIGHT
from hpcdist.models.split_backward import split_operations, weight_gradients
from hpcdist.models.stage import Draw, MixedStage, Operations, Saved
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.core.parameter_views import ParameterViews
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.graphs import KernelLaunches, Moving
from hpcdist.strategies.schedule.messages import StageMessages
from hpcdist.strategies.schedule.step import NanFinder

Skip = tuple[int, int, int]  # micro-batch, source unit, target unit


class SkipExchange:
    """Storage of values and gradients of skip connections. Only `send_activation` and `send_gradient` communicate."""

    def __init__(self, placement: StagePlacement, neighbours: StageMessages) -> None:
        self._place, self._neighbours = placement, neighbours
        self._values: dict[Skip, Array] = {}
        self._gradients: dict[Skip, Array] = {}

    def begin(self) -> None:
        """Drop all stored outputs and gradients of skip connections, before the next step or evaluation."""
        self._values.clear()
        self._gradients.clear()

    def bring(self, op: Operation, saved: Saved) -> None:
        """Put the skip-connection inputs of layer ``op.unit`` into ``saved``, before the forward pass ``op``.

        ``saved``: arrays kept for the backward pass.
        """
        for source in self._place.skips_into(op.unit):
            saved.keep(f"skip.{source}", self._values[op.microbatch, source, op.unit])

    def leave(self, op: Operation, y: Array, *, dropped: bool) -> None:
        """Store ``y``, the output of the forward pass ``op``, for later layers that get it over skip connections."""
        # With ``dropped``, the activations are freed after this pass, so later units on this rank need a copy.
        if dropped:
            self.end(op)
            for source in self._place.skips_into(op.unit):
                self._neighbours.forget_gradient(op.microbatch, self._place.edge(source, op.unit))
        for target in self._place.skips_from(op.unit):
            apart = self._place.rank_of(op.unit) != self._place.rank_of(target)
            copy = dropped and not apart  # a message is copied when it is sent
            skip = (op.microbatch, op.unit, target)
            self._values[skip] = self._neighbours.keep(op.microbatch, self._edge(skip), y) if copy else y

    def add(self, op: Operation, dy: Array) -> Array:
        """Add the gradients of skip connections to ``dy``, the output gradient of layer ``op.unit``. Return ``dy``."""
        for target in self._place.skips_from(op.unit):
            skip = (op.microbatch, op.unit, target)
            dy += self._gradients.pop(skip)
            self._neighbours.forget_gradient(op.microbatch, self._edge(skip))
        return dy

    def send_back(self, op: Operation, saved: Saved) -> None:
        """Copy the gradients of skip connections from ``saved``, after the backward pass ``op``.

        The copies are for the earlier layers. ``saved``: arrays of layer ``op.unit`` for this micro-batch.
        """
        for source in self._place.skips_into(op.unit):
            skip, gradient = (op.microbatch, source, op.unit), saved[f"skip.{source}.gradient"]
            self._gradients[skip] = self._neighbours.keep(op.microbatch, self._edge(skip), gradient)

    def end(self, op: Operation) -> None:
        """Free the skip-connection inputs of layer ``op.unit``, which this layer no longer needs."""
        for source in self._place.skips_into(op.unit):
            skip = (op.microbatch, source, op.unit)
            del self._values[skip]
            self._neighbours.forget(op.microbatch, self._edge(skip))

    def send_activation(self, op: Operation, *, copy: bool) -> None:
        """Send the output of layer ``op.source`` over a skip connection to the rank that computes layer ``op.unit``."""
        self._neighbours.send_activation(op, self._values.pop((op.microbatch, op.source, op.unit)), copy=copy)

    def send_gradient(self, op: Operation) -> None:
        """Send the gradient of the output of layer ``op.source`` to the rank that computes layer ``op.source``."""
        skip = (op.microbatch, op.source, op.unit)
        self._neighbours.send_gradient(op, self._gradients.pop(skip))
        self._neighbours.forget_gradient(op.microbatch, self._edge(skip))

    def received(self, op: Operation, values: Array, *, back: bool) -> None:
        """Store ``values``, which the operation ``op`` received over a skip connection.

        ``values`` are gradients if ``back`` is true, and layer outputs otherwise.
        """
        (self._gradients if back else self._values)[op.microbatch, op.source, op.unit] = values

    def _edge(self, skip: Skip) -> int:
        return self._place.edge(skip[1], skip[2])


MicroBatch = tuple[Array, Array]  # inputs (samples, ...), targets (samples, ...)


class Stages:
    """Executor of the compute operations and pipeline messages of one rank."""

    def __init__(
        self, context: RankContext, arena: Arena, bound: ParameterViews, watch: NanFinder, launches: KernelLaunches
    ) -> None:
        self._context, self._model, self._arena, self._bound, self._watch = context, context.model, arena, bound, watch
        self._launches = launches
        self._last = len(context.model.stages) - 1
        self._place = context.placed
        self._firsts = {chunk.start for chunk in context.chunks}
        message_arena = Arena(context.ledger, context.on) if launches.own_messages else arena
        self.neighbours = StageMessages(context, message_arena)
        self._skips = SkipExchange(context.placed, self.neighbours)
        self.handlers = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive,
        }

    def begin(
        self,
        operations: Sequence[Operation],
        batches: Sequence[MicroBatch],
        draw: Draw | None = None,
        scale: float = 1.0,
    ) -> None:
        """Prepare to execute ``operations``. ``draw`` selects the dropout masks; None means evaluation.

        ``batches``: micro-batches. ``scale``: factor of the loss, by which all gradients are multiplied.
        """
        axis = self._context.context_axis
        cut = (lambda whole: whole) if axis is None else axis.cut
        inputs = [unpacked(x, cut) for x, _ in batches]
        self._documents = [documents for _, documents in inputs]
        self._batches = [(x, cut(y)) for (x, _), (_, y) in zip(inputs, batches, strict=True)]
        self._scale, evaluates = scale, draw is None
        firsts = accumulate((len(inputs) for inputs, _ in batches), initial=draw.first_sample if draw else 0)
        sizes, steady = [len(x) for x, _ in inputs], not (evaluates or self._watch.is_awake)
        draws = [replace(draw, first_sample=first) for first in firsts][: len(sizes)] if draw else []
        launch_draws = self._launches.begin(draws, sizes, scale, steady=steady)
        self._draws: Sequence[Draw | None] = [None] * len(sizes) if evaluates else launch_draws
        self._losses = backend.empty(len(batches), np.dtype(np.float64), self._context.on)
        self._counted = 0
        self._weights: list[Scalar] = []
        self._inputs: dict[tuple[int, int], Array] = {}
        self._gradients: dict[tuple[int, int], Array] = {}
        # Activations of these units are recomputed before the backward pass, or there is no backward pass.
        recomputed_kinds = {Kind.FORWARD} if evaluates else set()
        self._dropped = {(op.microbatch, op.unit) for op in operations if op.recompute or op.kind in recomputed_kinds}
        self._skips.begin()
        self.neighbours.begin(operations, sizes)

    @property
    def losses(self) -> list[float]:
        """List of the losses of completed micro-batches that have samples. Each loss is a sum over targets."""
        losses: list[float] = backend.to_host(self._losses[: self._counted]).tolist() if self._counted else []
        return losses

    @property
    def weight(self) -> float:
        """Sum of the weights of this rank's targets in this step or evaluation, or 0 if the loss has no weights."""
        return sum(float(weight) for weight in self._weights)

    @cached_property
    def _split(self) -> Operations:
        return split_operations(self._model.operations)

    def _has_samples(self, op: Operation) -> bool:
        return bool(len(self._batches[op.microbatch][0]))  # the last, uneven micro-batch may be empty on a replica

    def _saved(self, op: Operation) -> ArenaSaved:
        return self._arena.saved(self._model.stages[op.unit].layer, op.microbatch)

    def _arrives(self, unit: int) -> bool:
        return unit in self._firsts and (unit == 0 or self._place.crosses(unit))

    def forward(self, op: Operation) -> None:
        """Run the forward pass of layer ``op.unit`` for one micro-batch. The last layer also computes the loss."""
        if not self._has_samples(op):
            if not self._ran_without_samples(op):
                self._attend(op)
            return
        saved, at = self._saved(op), (op.microbatch, op.unit)
        dropped = at in self._dropped and not op.recompute
        saved.draw, saved.documents = self._draws[op.microbatch], self._documents[op.microbatch]
        self._skips.bring(op, saved)
        y, loss = self._forward(op, saved)
        self._skips.leave(op, y, dropped=dropped)
        if not self._arrives(op.unit):
            del self._inputs[at]
            if dropped:
                self._arena.saved(self._model.stages[op.unit - 1].layer, op.microbatch).release()
        if op.unit == self._last:
            if not op.recompute:
                self._losses[self._counted] = loss  # stays on its device: the host need not wait
                self._counted += 1
                if self._model.loss.weighs:
                    self._weights.append(saved[LOSS_WEIGHT])
            if dropped:
                saved.release()
        elif not (op.recompute and self._place.crosses(op.unit + 1)):  # a recomputed output was sent before
            self._inputs[op.microbatch, op.unit + 1] = y
        self.neighbours.poll()

    def _forward(self, op: Operation, saved: ArenaSaved) -> tuple[Array, Scalar]:
        stage, parameters = self._model.stages[op.unit], self._bound.parameters(op.unit)
        inputs, targets = self._batches[op.microbatch]
        x, arrives = inputs if op.unit == 0 else self._inputs[op.microbatch, op.unit], self._arrives(op.unit)
        moving = ({"x": x} if arrives else {}) | ({"targets": targets} if op.unit == self._last else {})

        def call(fixed: Moving) -> tuple[Array, Scalar]:
            y, loss = stage.forward(parameters, fixed.get("x", x), self._model.operations, saved), cast(Scalar, 0.0)
            user_name = getattr(stage, "name", "")  # the user's name of a stage from outside this library
            named = f"layer {stage.layer}{user_name and f', {user_name},'}"
            self._watch.look(f"output of {named} in micro-batch {op.microbatch}", y)
            if op.unit == self._last:
                loss = self._model.loss.forward(y, fixed["targets"], self._model.operations, saved)
                self._watch.look(f"loss of micro-batch {op.microbatch}", loss)
            return y, loss

        still = None if arrives else x
        return self._launches.run(op, saved, call, moving=moving, still=still, parameters=parameters)

    def backward(self, op: Operation) -> None:
        """Run the backward pass of layer ``op.unit``, or the input-gradient half of a split backward pass."""
        if not self._has_samples(op):
            if not self._ran_without_samples(op):
                self._bound.no_backward(op.unit)
                self._attend(op)
            return
        saved, split = self._saved(op), op.kind is Kind.BACKWARD_INPUT
        saved.scale = self._scale
        dx = self._backward(op, saved)
        self._skips.send_back(op, saved)
        if dx is not None:
            if op.unit in self._firsts and not self._place.crosses(op.unit):
                dx = self.neighbours.keep(op.microbatch, op.unit, dx)  # other chunks run before the unit that takes dx
            self._gradients[op.microbatch, op.unit] = dx
        if split:
            saved.narrow()
        else:
            self._end(op)
        if op.unit in self._firsts and (op.unit == 0 or not self._place.crosses(op.unit)):
            self._forget_gradient(op)
        self.neighbours.poll()

    def _backward(self, op: Operation, saved: ArenaSaved) -> Array | None:
        stage, last = self._model.stages[op.unit], op.unit == self._last
        parameters, gradients = self._bound.parameters(op.unit), self._bound.gradients(op.unit)
        operations = self._split if op.kind is Kind.BACKWARD_INPUT else self._model.operations
        received = None if last else self._skips.add(op, self._gradients.pop((op.microbatch, op.unit + 1)))
        arrives = not last and (op.unit + 1 in self._firsts or self._place.crosses(op.unit + 1))
        moving = {} if received is None or not arrives else {"dy": received}

        def call(fixed: Moving) -> Array | None:
            dy = fixed.get("dy", received)
            if dy is None:
                dy = self._model.loss.backward(self._scale, self._model.operations, saved)
            return stage.backward(parameters, gradients, dy, operations, saved)

        return self._launches.run(
            op,
            saved,
            call,
            moving=moving,
            still=None if arrives else received,
            parameters=parameters,
            gradients=gradients,
        )

    def _ran_without_samples(self, op: Operation) -> bool:
        # Run a pass whose layer makes collectives over the replicas. Collective if it returns True.
        stage, draw = self._model.stages[op.unit], self._draws[op.microbatch]
        if draw is None or not getattr(stage, "attends", False):
            return False
        saved, parameters, operations = self._saved(op), self._bound.parameters(op.unit), self._model.operations
        if op.kind is Kind.FORWARD:
            saved.draw = draw
            x = self._batches[op.microbatch][0] if op.unit == 0 else self._no_rows(op.unit - 1)
            stage.forward(parameters, x, operations, saved)
        else:
            stage.backward(parameters, self._bound.gradients(op.unit), self._no_rows(op.unit), operations, saved)
            self._bound.backward_done(op.unit)
            saved.release()
        return True

    def _no_rows(self, unit: int) -> Array:
        return backend.empty(0, self._model.dtype, self._context.on).reshape(self._model.stages[unit].output_shape(0))

    def _attend(self, op: Operation) -> None:
        # Take part in the expert-parallel collectives of a pass with an empty micro-batch. Collective.
        stage, operations = self._model.stages[op.unit], self._model.operations
        if operations.experts is None or not operations.experts.attends:
            return
        if not any(spec.expert for spec in stage.tensors()):
            return
        parameters, saved = self._bound.parameters(op.unit), self._saved(op)
        saved.scale = self._scale
        if op.kind is Kind.FORWARD:
            cast(MixedStage, stage).attend(parameters, operations, saved)
        else:
            gradients = self._bound.gradients(op.unit)
            cast(MixedStage, stage).attend_backward(parameters, gradients, operations, saved)
        dropped = (op.microbatch, op.unit) in self._dropped and not op.recompute
        if op.kind is not Kind.FORWARD or dropped:
            saved.release()

    def backward_weight(self, op: Operation) -> None:
        """Compute the weight gradients of layer ``op.unit``, which is the second half of a split backward pass."""
        if self._has_samples(op):
            gradients = self._bound.gradients(op.unit)
            saved, operations = self._saved(op), self._model.operations

            def call(_: Moving) -> None:
                # Parameters may be freed by now; only their names are used.
                weight_gradients(gradients.views, gradients, operations, saved)

            self._launches.run(op, saved, call, moving={}, gradients=gradients)
            self._end(op)

    def _end(self, op: Operation) -> None:
        self._bound.backward_done(op.unit)
        self._saved(op).release()
        self._skips.end(op)
        if op.unit in self._firsts:
            self._inputs.pop((op.microbatch, op.unit), None)
            self.neighbours.forget(op.microbatch, op.unit)

    def _forget_gradient(self, op: Operation) -> None:
        stop = next(chunk.stop for chunk in self._context.chunks if chunk.start == op.unit)
        if stop <= self._last:
            self.neighbours.forget_gradient(op.microbatch, stop)

    def _send_activation(self, op: Operation) -> None:
        if self._has_samples(op) and op.source >= 0:
            self._skips.send_activation(op, copy=(op.microbatch, op.source) in self._dropped)
        elif self._has_samples(op):
            dropped = (op.microbatch, op.unit - 1) in self._dropped
            self.neighbours.send_activation(op, self._inputs.pop((op.microbatch, op.unit)), copy=dropped)
            if dropped:
                self._arena.saved(self._model.stages[op.unit - 1].layer, op.microbatch).release()

    def _send_gradient(self, op: Operation) -> None:
        if self._has_samples(op) and op.source >= 0:
            self._skips.send_gradient(op)
        elif self._has_samples(op):
            self.neighbours.send_gradient(op, self._gradients.pop((op.microbatch, op.unit)))
            self._forget_gradient(op)

    def _receive(self, op: Operation) -> None:
        if self._has_samples(op):
            array, back = self.neighbours.receive(op), op.kind is Kind.RECV_GRADIENT
            self._watch.distrust(array)
            if op.source >= 0:
                self._skips.received(op, array, back=back)
            else:
                (self._gradients if back else self._inputs)[op.microbatch, op.unit] = array
