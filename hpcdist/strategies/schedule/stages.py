"""Runs the stages of a rank forward and back: what flows between them, and between ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.models.arena import Arena
from hpcdist.models.dropout import Draw
from hpcdist.models.operations import Operations
from hpcdist.models.split import narrow, splitting, weight_gradients
from hpcdist.models.stage import Saved
from hpcdist.strategies.bound import Bound
from hpcdist.strategies.schedule.messages import Neighbours
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.skips import Skips
from hpcdist.strategies.schedule.watch import Watch
from hpcdist.strategies.seat import Seat

MicroBatch = tuple[Array, Array]  # inputs (samples, ...), targets (samples, ...)


class Stages:
    """The computing operations of one rank, and its messages in the pipeline.

    What a unit hands on is named by the micro-batch and the unit that takes it: its input on the way forward, the
    gradient of its input on the way back.
    """

    def __init__(self, seat: Seat, arena: Arena, bound: Bound, watch: Watch) -> None:
        self._seat, self._model, self._arena, self._bound, self._watch = seat, seat.model, arena, bound, watch
        self._last = len(seat.model.stages) - 1
        self._place = seat.placed
        self._firsts = {chunk.start for chunk in seat.chunks}
        self.neighbours = Neighbours(seat, arena)
        self._skips = Skips(seat.placed, self.neighbours)
        self.scale = 1.0  # of the loss, in backward
        self.carries_out = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._recv_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._recv_gradient,
        }

    def begin(self, operations: Sequence[Operation], batches: Sequence[MicroBatch], draw: Draw | None = None) -> None:
        """Begin a list. ``draw`` is that of its first sample; without one it evaluates: nothing is kept or dropped."""
        self._batches, evaluates = batches, draw is None
        firsts = accumulate((len(inputs) for inputs, _ in batches), initial=draw.first_sample if draw else 0)
        self._draws = [draw and replace(draw, first_sample=first) for first in firsts]
        self._losses = backend.empty(len(batches), np.dtype(np.float64), self._seat.on)
        self._counted = 0
        self._inputs: dict[tuple[int, int], Array] = {}
        self._gradients: dict[tuple[int, int], Array] = {}
        # Their activations are computed again before the backward, or there is none.
        again = {Kind.FORWARD} if evaluates else set()
        self._dropped = {(op.microbatch, op.unit) for op in operations if op.recompute or op.kind in again}
        self._skips.begin()
        self.neighbours.begin(operations, [len(inputs) for inputs, _ in batches])

    @property
    def losses(self) -> list[float]:
        """Sums over its targets, of each micro-batch so far that has samples; what a GPU computes is waited for."""
        found: list[float] = backend.to_host(self._losses[: self._counted]).tolist() if self._counted else []
        return found

    @cached_property
    def _split(self) -> Operations:
        return splitting(self._model.operations)

    def _has_samples(self, op: Operation) -> bool:
        return bool(len(self._batches[op.microbatch][0]))  # a replica may have none in the last, uneven micro-batch

    def _saved(self, op: Operation) -> Saved:
        return self._arena.saved(self._model.stages[op.unit].layer, op.microbatch)

    def _arrives(self, unit: int) -> bool:
        """Whether the input of ``unit`` is there again for a second forward: from another rank, or data."""
        return unit in self._firsts and (unit == 0 or self._place.crosses(unit))

    def forward(self, op: Operation) -> None:
        """Run one unit on one micro-batch, and the loss behind the last."""
        if not self._has_samples(op):
            return
        stage, saved, at = self._model.stages[op.unit], self._saved(op), (op.microbatch, op.unit)
        inputs, targets = self._batches[op.microbatch]
        dropped = at in self._dropped and not op.recompute
        x = inputs if op.unit == 0 else self._inputs[at]
        saved.draw = self._draws[op.microbatch]
        self._skips.bring(op, saved)
        y = stage.forward(self._bound.parameters(op.unit), x, self._model.operations, saved)
        called = getattr(stage, "name", "")  # what its user calls it, where it is not of this library
        self._watch.look(f"output of layer {stage.layer}{called and f', {called},'} in micro-batch {op.microbatch}", y)
        self._skips.leave(op, y, dropped=dropped)
        if not self._arrives(op.unit):
            del self._inputs[at]
            if dropped:
                self._arena.saved(self._model.stages[op.unit - 1].layer, op.microbatch).release()
        if op.unit == self._last:
            loss = self._model.loss.forward(y, targets, self._model.operations, saved)
            self._watch.look(f"loss of micro-batch {op.microbatch}", loss)
            if not op.recompute:
                self._losses[self._counted] = loss  # where it was computed: the host need not wait for it
                self._counted += 1
            if dropped:
                saved.release()
        elif not (op.recompute and self._place.crosses(op.unit + 1)):  # else it was sent long ago
            self._inputs[op.microbatch, op.unit + 1] = y
        self.neighbours.poll()

    def backward(self, op: Operation) -> None:
        """Take one micro-batch back through one unit; its weights' gradients are left where the backward is split."""
        if not self._has_samples(op):
            self._bound.no_backward(op.unit)
            return
        stage, saved = self._model.stages[op.unit], self._saved(op)
        split = op.kind is Kind.BACKWARD_INPUT
        if op.unit == self._last:
            dy = self._model.loss.backward(self.scale, self._model.operations, saved)
        else:
            dy = self._skips.add(op, self._gradients.pop((op.microbatch, op.unit + 1)))
        parameters, gradients = self._bound.parameters(op.unit), self._bound.gradients(op.unit)
        dx = stage.backward(parameters, gradients, dy, self._split if split else self._model.operations, saved)
        self._skips.send_back(op, saved)
        if dx is not None:
            if op.unit in self._firsts and not self._place.crosses(op.unit):
                dx = self.neighbours.keep(op.microbatch, op.unit, dx)  # other chunks come before the one that takes it
            self._gradients[op.microbatch, op.unit] = dx
        if split:
            narrow(saved)
        else:
            self._end(op)
        if op.unit in self._firsts and (op.unit == 0 or not self._place.crosses(op.unit)):
            self._forget_gradient(op)
        self.neighbours.poll()

    def backward_weight(self, op: Operation) -> None:
        """Do what is left of a backward that was split."""
        if self._has_samples(op):
            gradients = self._bound.gradients(op.unit)
            # Of the parameters, which may be freed by now, only the names count.
            weight_gradients(gradients.views, gradients, self._model.operations, self._saved(op))
            self._end(op)

    def _end(self, op: Operation) -> None:
        """Give back what a unit has kept of a micro-batch, which is through."""
        self._bound.backward_done(op.unit)
        self._saved(op).release()
        self._skips.end(op)
        if op.unit in self._firsts:
            self._inputs.pop((op.microbatch, op.unit), None)
            self.neighbours.forget(op.microbatch, op.unit)

    def _forget_gradient(self, op: Operation) -> None:
        """Give back the gradient that came into the chunk whose first unit is that of ``op``."""
        stop = next(chunk.stop for chunk in self._seat.chunks if chunk.start == op.unit)
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

    def _recv_activation(self, op: Operation) -> None:
        if self._has_samples(op):
            x = self.neighbours.receive(op)
            self._watch.distrust(x)
            if op.source >= 0:
                self._skips.received(op, x, back=False)
            else:
                self._inputs[op.microbatch, op.unit] = x

    def _send_gradient(self, op: Operation) -> None:
        if self._has_samples(op) and op.source >= 0:
            self._skips.send_gradient(op)
        elif self._has_samples(op):
            self.neighbours.send_gradient(op, self._gradients.pop((op.microbatch, op.unit)))
            self._forget_gradient(op)

    def _recv_gradient(self, op: Operation) -> None:
        if self._has_samples(op):
            dy = self.neighbours.receive(op)
            self._watch.distrust(dy)
            if op.source >= 0:
                self._skips.received(op, dy, back=True)
            else:
                self._gradients[op.microbatch, op.unit] = dy
